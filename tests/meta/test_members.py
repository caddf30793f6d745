"""An etcd of several members: what found no connection goes to the next one, what was sent goes to nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.brokers.server import free_ports
from millrace.meta.etcd import EtcdAddress, EtcdStore
from millrace.meta.store import Put

CALLS: list[tuple[str, Callable[[EtcdStore], object]]] = [
    ("kv/txn", lambda store: store.commit([Put("a", b"1")])),
    ("lease/grant", lambda store: store.grant(10.0)),
    ("lease/keepalive", lambda store: store.renew(7)),
    ("lease/revoke", lambda store: store.revoke(7)),
]


class Member:
    """A member that answers, or takes a call and hangs up."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.hangs_up = False
        member = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                member.taken.append(self.path.removeprefix("/v3/"))
                if member.hangs_up:
                    self.close_connection = True
                    return
                said = {"header": {"revision": "3"}, "succeeded": True, "ID": "7", "result": {"TTL": "10"}}
                body = json.dumps(said).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def member() -> Iterator[Member]:
    made = Member()
    serving = threading.Thread(target=made.server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        serving.join()


@pytest.mark.parametrize("call, act", CALLS, ids=[call for call, _ in CALLS])
def test_a_write_whose_answer_is_lost_is_not_sent_to_the_next_member(
    call: str, act: Callable[[EtcdStore], object]
) -> None:
    with member() as first, member() as second, EtcdStore(EtcdAddress((first.url, second.url), "p/")) as store:
        first.hangs_up = True
        with pytest.raises(MetaAmbiguous):
            act(store)
        assert first.taken.count(call) == 1
        assert second.taken == []


@pytest.mark.parametrize("call, act", CALLS, ids=[call for call, _ in CALLS])
def test_a_write_that_finds_no_connection_goes_to_the_next_member(
    call: str, act: Callable[[EtcdStore], object]
) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    with member() as second, EtcdStore(EtcdAddress((dead, second.url), "p/")) as store:
        act(store)
        assert second.taken.count(call) == 1


def test_a_read_whose_answer_is_lost_is_made_at_the_next_member_and_that_one_is_asked_from_then_on() -> None:
    with member() as first, member() as second, EtcdStore(EtcdAddress((first.url, second.url), "p/")) as store:
        first.hangs_up = True
        assert store.get("a") is None
        taken = len(first.taken)
        assert store.get("a") is None
        assert len(first.taken) == taken
        second.hangs_up = True
        with pytest.raises(MetaUnavailable):
            store.get("a")
