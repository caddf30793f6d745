"""Who appends on a log with one writer.

The owner, which opens anew where it was fenced; and the log's server, when no node is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import (
    AppendUnresolved,
    AssignmentStale,
    DeadlineExceeded,
    LogFenced,
    LogUnavailable,
    MillraceError,
)
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.client.produce.lane import Lane, ProducerIdentity
from millrace.coord.clock import SystemClock
from millrace.coord.session import APPEND, INGEST, NODE_PREFIX, NodeInfo, moving_roles
from millrace.coord.store_factory import cluster_token, open_cluster_store
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.server.flight import LogServer
from millrace.message import builders
from millrace.message.wire.encode import encode_entry
from millrace.meta.store import Delete, MetaStore, Put
from millrace.node.append.host import AppendHost
from millrace.node.cluster.append_router import POLL_SECONDS, AppendRouter, append_extension
from millrace.node.cluster.append_server import AppendServer
from millrace.rpc.discovery import ServerRecord, write_record
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.tail import TailBatch
from millrace.rpc.wire import APPEND_ROLE
from millrace.wal.state import ChannelState
from tests.node.append.samples import insert, open_log, opening
from tests.node.cluster.one_writer import View, Writers

PCHANNEL = "dml_0"
DEADLINE = 20.0


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[RocksMQ]:
    with open_log(tmp_path / "log", PCHANNEL) as service:
        yield service


def node(
    settings: Settings, name: str, service: RocksMQ, writers: Writers, held: Callable[[str], bool]
) -> AppendServer:
    return AppendServer(
        replace(settings, node=name), held=held, drain_seconds=5.0, open_log=lambda _: View(service, writers)
    )


def tick(server: AppendServer, term: int) -> str:
    """What becomes of a time tick in `term` that a client appends there.

    "" where it is taken, else the error's name.
    """
    (placing, host) = server.gate, server.host
    try:
        with placing.appending(PCHANNEL):
            outcome = host.append(PCHANNEL, [encode_entry([builders.time_tick(term=term)])], deadline=DEADLINE)
        outcome.result()
    except MillraceError as error:
        return type(error).__name__
    return ""


def test_on_a_log_with_one_writer_the_next_owner_fences_the_one_before(settings: Settings, embedded: RocksMQ) -> None:
    writers, alive = Writers(), {"n1@1", "n2@2"}
    with (
        node(settings, "n1", embedded, writers, alive.__contains__) as one,
        node(settings, "n2", embedded, writers, alive.__contains__) as two,
    ):
        one.open(PCHANNEL, "n1@1")
        assert tick(one, 1) == ""
        alive.discard("n1@1")
        two.open(PCHANNEL, "n2@2")
        assert tick(two, 2) == ""
        assert tick(one, 1) == "AssignmentStale"
        with pytest.raises(AssignmentStale):
            one.open(PCHANNEL, "n1@1")
        assert tick(two, 2) == "", "an opening that came too late took nothing over"


def test_an_owner_that_a_sleeper_fenced_opens_anew_and_its_clients_go_on(settings: Settings, embedded: RocksMQ) -> None:
    writers, alive = Writers(), {"n1@1", "n2@2"}
    with (
        node(settings, "n1", embedded, writers, alive.__contains__) as one,
        node(settings, "n2", embedded, writers, alive.__contains__) as two,
    ):
        two.open(PCHANNEL, "n2@2")
        one.open(PCHANNEL, "n1@1")  # its order was on the way while it slept: it looked at its session before
        alive.discard("n1@1")
        # To be sent again, and here: nobody else is named. Its own tailing may have found the other writer already, and
        # opened the next term; then this one is of an older term.
        assert tick(two, 2) in ("LogUnavailable", "AppendRejected")
        assert poll_until(lambda: tick(two, 3) == "", Deadline.after(DEADLINE), interval=0.05)
        assert tick(one, 2) == "AssignmentStale"
        for _ in range(3):
            assert tick(two, 3) == "", "who has no session takes nothing back"


# -- the log's server --------------------------------------------------------------------------------------------------


@pytest.fixture
def store(settings: Settings) -> Iterator[MetaStore]:
    with open_cluster_store(settings, SystemClock()) as store:
        yield store


def registered(store: MetaStore, session: str, *roles: str) -> None:
    info = NodeInfo(session.partition("@")[0], "grpc://127.0.0.1:1", roles, "grpc://127.0.0.1:2")
    store.commit([Put(NODE_PREFIX + session, info.encode())])


def mine(elsewhere: AppendRouter, wanted: bool) -> bool:
    return poll_until(lambda: elsewhere.is_local(PCHANNEL) is wanted, Deadline.after(DEADLINE), interval=0.02)


def test_the_logs_server_appends_nothing_while_nodes_do_and_takes_the_log_back_by_a_term(
    settings: Settings, store: MetaStore
) -> None:
    terms: list[str] = []
    elsewhere = AppendRouter(settings)

    def open_term(pchannel: str) -> None:
        assert elsewhere.is_local(pchannel), "the opening itself goes into the log"
        terms.append(pchannel)

    try:
        assert elsewhere.suppress_ticks(), "before it has looked nothing is known"
        elsewhere.start(open_term)
        assert mine(elsewhere, True)
        assert not elsewhere.suppress_ticks()
        registered(store, "n0@1", INGEST)
        registered(store, "n1@2", APPEND, INGEST)
        assert mine(elsewhere, False)
        assert elsewhere.suppress_ticks()
        with pytest.raises(AssignmentStale), elsewhere.appending(PCHANNEL):
            pass
        assert terms == []
        store.commit([Delete(NODE_PREFIX + "n1@2")])
        assert mine(elsewhere, True)
        for _ in range(2):
            with elsewhere.appending(PCHANNEL):
                pass
        assert terms == [PCHANNEL], "once"
        registered(store, "n1@3", APPEND)
        assert mine(elsewhere, False)
        store.commit([Delete(NODE_PREFIX + "n1@3")])
        assert mine(elsewhere, True)
        assert terms == [PCHANNEL, PCHANNEL], "and anew when nodes had it again"
    finally:
        elsewhere.close()


def test_appends_that_come_while_the_log_is_taken_back_wait_for_the_term(settings: Settings, store: MetaStore) -> None:
    registered(store, "n1@2", APPEND)
    elsewhere, going, may_go = AppendRouter(settings), threading.Event(), threading.Event()

    def open_term(pchannel: str) -> None:
        going.set()
        assert may_go.wait(DEADLINE)

    try:
        elsewhere.start(open_term)
        assert mine(elsewhere, False)
        store.commit([Delete(NODE_PREFIX + "n1@2")])
        first = threading.Thread(target=mine, args=(elsewhere, True))
        first.start()
        assert going.wait(DEADLINE)
        came = threading.Event()
        second = threading.Thread(target=lambda: (elsewhere.is_local(PCHANNEL), came.set()))
        second.start()
        assert not came.wait(0.2)
        may_go.set()
        assert came.wait(DEADLINE)
        first.join()
        second.join()
    finally:
        may_go.set()
        elsewhere.close()


def test_what_a_node_fenced_before_the_server_saw_it_is_asked_for_there(settings: Settings, store: MetaStore) -> None:
    elsewhere = AppendRouter(settings)
    try:
        with pytest.raises(LogFenced), elsewhere.appending(PCHANNEL):
            raise LogFenced("somebody else has it, and no node is there")

        def append() -> None:
            with elsewhere.appending(PCHANNEL):
                registered(store, "n1@2", APPEND)
                raise LogFenced("the node has it")

        with pytest.raises(AssignmentStale):
            append()
    finally:
        elsewhere.close()


def test_before_it_is_known_whether_there_are_nodes_nothing_is_appended(settings: Settings, store: MetaStore) -> None:
    elsewhere = AppendRouter(replace(settings, meta_store="etcd://127.0.0.1:9/nowhere"))
    try:
        with pytest.raises(LogUnavailable, match="nodes"):
            elsewhere.is_local(PCHANNEL)
        assert elsewhere.suppress_ticks()
    finally:
        elsewhere.close()


@pytest.fixture
def alone(settings: Settings) -> Iterator[LogServer]:
    """The log's server of a deployment whose nodes may append, in this process."""
    folder = settings.log_path
    with open_log(folder, PCHANNEL) as service:
        service.open(PCHANNEL).append(opening(PCHANNEL))
        record = ServerRecord.of_this_process("")
        server = LogServer(service, tokens=[record.token], extensions=[append_extension(service, folder)])
        _published = write_record(folder, replace(record, address=server.address))
        try:
            yield server
        finally:
            server.close(timeout=1.0)
            server.wait()


@pytest.mark.slow
def test_without_a_coordinator_a_tick_or_a_read_is_refused_at_its_deadline_and_the_server_asks_itself_once_at_a_time(
    settings: Settings, store: MetaStore, alone: LogServer
) -> None:
    process = psutil.Process()
    with AppendClient.connect(settings.data_dir, start=False, deadline=5.0) as client:
        client.tick(PCHANNEL)
        registered(store, "n1@2", APPEND)  # it lives, and nobody assigns it anything
        assert poll_until(lambda: stale(client), Deadline.after(DEADLINE), interval=0.05)
        before = client.time_tick(PCHANNEL, persist=False)
        threads = process.num_threads()
        for call in (
            lambda: client.tick(PCHANNEL, deadline=1.0),
            lambda: client.confirm(PCHANNEL, before.time_tick + (1 << 40), deadline=1.0),
        ):
            with pytest.raises((LogUnavailable, DeadlineExceeded)):
                call()
        with pytest.raises(AssignmentStale):  # sent once: its producer decides whether and when it is sent again
            client.append(PCHANNEL, [encode_entry([builders.time_tick(term=1)])], deadline=1.0)
        assert process.num_threads() < threads + 20
        after = client.time_tick(PCHANNEL, persist=False)
        assert after.last_confirmed == before.last_confirmed, "nothing was appended, though time goes on"
        assert client.mvcc(f"{PCHANNEL}_1v0").confirmed, "what is in the log can be read"
        tailed = client.tail(PCHANNEL, before.time_tick - 1, timeout=0.0)
        assert isinstance(tailed, TailBatch)
        assert (tailed.batches, tailed.confirmed_tick >= after.time_tick) == ([], True)
        store.commit([Delete(NODE_PREFIX + "n1@2")])
        assert poll_until(lambda: not stale(client), Deadline.after(DEADLINE), interval=0.05)
        assert client.tick(PCHANNEL) > after.time_tick


class _Terms:
    """Implements TermSource: the term that the append host follows."""

    def __init__(self, client: AppendClient) -> None:
        self._client = client

    def term(self, pchannel: str) -> int:
        return int(self._client.describe(pchannel)["term"])

    def next_epoch(self, producer_id: int, *, held: int | None = None) -> int:
        raise AssertionError("a node without a coordinator claims no epoch")


def test_a_producer_sends_again_while_nobody_has_its_pchannel_and_by_its_deadline_knows_that_nothing_was_appended(
    settings: Settings, store: MetaStore, alone: LogServer
) -> None:
    with AppendClient.connect(settings.data_dir, start=False, deadline=5.0) as client:
        client.tick(PCHANNEL)
        registered(store, "n1@2", APPEND)  # it lives, and nobody assigns it anything
        assert poll_until(lambda: stale(client), Deadline.after(DEADLINE), interval=0.05)
        before = client.describe(PCHANNEL)["position"]
        patience = replace(settings, append_deadline=1.0, append_attempts=2)
        lane = Lane(client, ProducerIdentity(7, _Terms(client), owned=False), patience, PCHANNEL)
        began = time.monotonic()
        with pytest.raises(AppendUnresolved, match=r"nothing of the newest appends .* was accepted: ASSIGNMENT_STALE"):
            lane.send([[insert(1, vchannel=f"{PCHANNEL}_1v0")]])
        assert 1.0 <= time.monotonic() - began < 5.0
        assert client.describe(PCHANNEL)["position"] == before
        store.commit([Delete(NODE_PREFIX + "n1@2")])
        lane.deliver(lambda: None)  # the log's server takes the log back meanwhile
        assert not lane.unresolved, "what was held is decided"
        assert client.describe(PCHANNEL)["position"] > before
        lane.close()


def stale(client: AppendClient) -> bool:
    """Whether the log's server says of a forwarded tick that it does not take it."""
    request = {"pchannel": PCHANNEL, "deadline": 1.0, "forwarded": True}
    try:
        client.service.call_with_retry(
            lambda link, _: link.act(f"{APPEND_ROLE}/tick", request, timeout=5.0), seconds=5.0
        )
    except AssignmentStale:
        return True
    return False


def test_a_node_refuses_a_tick_of_a_pchannel_that_it_does_not_have(settings: Settings, embedded: RocksMQ) -> None:
    writers, alive = Writers(), {"n1@1"}
    with node(settings, "n1", embedded, writers, alive.__contains__) as one:
        one.open(PCHANNEL, "n1@1")
        service = RemoteLogService.at(one.address, token=cluster_token(settings))
        with AppendClient(service) as client:
            assert client.tick(PCHANNEL)
            alive.discard("n1@1")
            with pytest.raises(AssignmentStale):
                client.tick(PCHANNEL)
            assert client.tick(PCHANNEL, persist=False), "looking appends nothing"


class _Owners:
    """Implements AppendForwarder: a node has everything, and appends by `node`."""

    def __init__(self, node: AppendHost) -> None:
        self._node = node
        self.asked: list[str] = []

    def is_local(self, pchannel: str) -> bool:
        return False

    def append(self, pchannel: str, entries: list[bytes], *, deadline: float, principal: str) -> object:
        self.asked.append(f"append {principal}".rstrip())
        return self._node.append(pchannel, entries, deadline=deadline)

    def tick(self, pchannel: str, *, tick: int = 0, source_id: int = 0, deadline: float) -> None:
        self.asked.append("tick")
        self._node.tick(pchannel, deadline=deadline)

    def suppress_ticks(self) -> bool:
        return True


def test_what_the_logs_server_appends_by_itself_goes_to_the_owner_and_is_seen_there_when_it_is_done(
    embedded: RocksMQ,
) -> None:
    writers = Writers()
    with (
        AppendHost(View(embedded, writers), ChannelState.new) as node,
        AppendHost(View(embedded, writers), ChannelState.new, owners=(owners := _Owners(node))) as server,
    ):
        opening = encode_entry([builders.term_opening(term=1, chain_version=1, config={})])
        tick = server.append(PCHANNEL, [opening], deadline=DEADLINE, principal="ada").result().time_tick
        assert server.tick(PCHANNEL, deadline=DEADLINE) > tick
        confirmed = server.confirm(PCHANNEL, tick + (1 << 18), deadline=DEADLINE)
        assert confirmed >= tick + (1 << 18)
        assert server.state(PCHANNEL).term == 1
        assert owners.asked[:2] == ["append ada", "tick"]
        assert node.state(PCHANNEL).last_tick >= confirmed


def test_roles_move_where_the_log_is_no_one_process() -> None:
    assert moving_roles("rocksmq") == (INGEST,)
    assert set(moving_roles("kafka://h:1/p")) == set(moving_roles("pulsar://h:1/t/n")) == {APPEND, INGEST}
    assert POLL_SECONDS <= 0.5
