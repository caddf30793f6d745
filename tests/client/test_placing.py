"""Where a client's appends go while nobody can say who takes them: it asks again, and its caller sees latency alone."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.base.errors import AssignmentStale, LogUnavailable, MetaUnavailable
from millrace.client.placing import Place, Places
from millrace.rpc.assignments import Update


class Server:
    """The log's server: its meta store is away for the first `away` questions."""

    deadline = 5.0

    def __init__(self, away: int) -> None:
        self.away = away

    def repeated(self, ask: Any, *, seconds: float) -> Update:
        self.away -= 1
        if self.away >= 0:
            raise MetaUnavailable("etcd is away")
        return Update(1, True, ())

    def link(self, deadline: Any) -> Server:
        return self

    def check(self) -> None:
        """The connection stands."""


def place(server: Server, seconds: float) -> Place:
    return Places(server).at("dml_0", deadline=seconds)  # type: ignore[arg-type]


def test_an_append_goes_on_when_the_meta_store_is_there_again() -> None:
    server = Server(away=3)

    def call(link: Any, deadline: Any) -> str:
        if server.away >= 0:
            raise AssignmentStale("nodes take it: ask who")
        return "taken"

    assert place(server, 30.0).sent_once(call, seconds=30.0, what="an append") == "taken"
    assert server.away == -1, "asked until somebody could tell"


def test_an_append_gives_up_at_its_deadline() -> None:
    def call(link: Any, deadline: Any) -> str:
        raise AssignmentStale("nodes take it: ask who")

    with pytest.raises(LogUnavailable, match="nobody took it"):
        place(Server(away=1_000_000), 0.2).sent_once(call, seconds=0.2, what="an append")
