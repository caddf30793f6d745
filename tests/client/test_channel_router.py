"""Where a client's appends go while nobody can say who takes them: it asks again, and its caller sees latency alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import AssignmentStale, LogUnavailable, MetaUnavailable
from millrace.client.channel_router import ChannelRouter
from millrace.client.produce.lane import deliver_single
from millrace.rpc.assignments import AssignmentUpdate
from millrace.rpc.discovery import ServerRecord


class Server:
    """The log's server: its meta store is away for the first `away` questions."""

    deadline = 5.0

    def __init__(self, away: int) -> None:
        self.away = away

    def call_with_retry(self, ask: Any, *, seconds: float) -> AssignmentUpdate:
        self.away -= 1
        if self.away >= 0:
            raise MetaUnavailable("etcd is away")
        return AssignmentUpdate(1, True, ())

    def link(self, deadline: Any) -> Server:
        return self

    def check(self) -> None:
        """The connection stands."""


class Taking(dict[str, Any]):
    """Links whose readers wait for each other, where nothing keeps them one behind the other."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self._together = threading.Barrier(readers)

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        with suppress(threading.BrokenBarrierError):
            self._together.wait(0.2)
        return found


class Dead:
    """A connection to a node that died."""

    record = ServerRecord.remote("grpc://h:1", "token")
    closed = False

    def close(self) -> None:
        self.closed = True


def test_two_appends_whose_node_dies_drop_its_link_both(monkeypatch: pytest.MonkeyPatch) -> None:
    server, link = Server(away=0), Dead()
    dropped: list[Any] = []
    monkeypatch.setattr(server, "drop_link", dropped.append, raising=False)
    places = ChannelRouter(server)  # type: ignore[arg-type]
    places._links = Taking(2)
    places._links[link.record.address] = link  # type: ignore[assignment]
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(places.drop, link) for _ in range(2)]:  # type: ignore[arg-type]
            each.result(timeout=30.0)
    assert link.closed
    assert not places._links
    assert dropped == [link], "the second finds it gone, and the service is told as of any other link"


def send_to(server: Server, refused: Callable[[], bool]) -> Callable[[Deadline], str]:
    """Return a function that sends once, as a route does: a refusal marks the owner as stale."""
    route = ChannelRouter(server).route("dml_0")  # type: ignore[arg-type]

    def call(link: Any, deadline: Deadline) -> str:
        if refused():
            raise AssignmentStale("nodes take it: ask who")
        return "taken"

    return lambda deadline: route._once(call, deadline, "whether it was taken is unknown")


def test_a_route_sends_once_and_looks_up_the_owner_before_the_next_attempt() -> None:
    server = Server(away=0)
    send = send_to(server, lambda: True)
    for asked in range(3):
        with pytest.raises(AssignmentStale):
            send(Deadline.after(5.0))
        assert server.away == -asked, "nobody is asked before the first attempt, and once before each other one"


def test_an_append_goes_on_when_the_meta_store_is_there_again() -> None:
    server = Server(away=3)
    send = send_to(server, lambda: server.away >= 0)
    assert deliver_single(send, deadline=Deadline.after(30.0)) == "taken"
    assert server.away == -1, "asked until somebody could tell"


def test_an_append_gives_up_at_its_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(AssignmentStale):
        deliver_single(send_to(Server(away=1_000_000), lambda: True), deadline=Deadline.after(0.2))
    assert 0.2 <= time.monotonic() - began < 5.0


def test_who_waits_for_anothers_look_up_waits_until_its_own_deadline() -> None:
    server = Server(away=0)
    router = ChannelRouter(server)  # type: ignore[arg-type]
    router.mark_stale(router.route("dml_0"))
    with router._asking, pytest.raises(LogUnavailable, match="in time"):
        router.route("dml_0").link(Deadline.after(0.05))
