"""A scan reads the ``wal`` table and then the append host's tail as one list.

The chain's, without gap or repetition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument, PositionTruncated, TickNotReached, WalGap
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client import remote_tables
from millrace.client.append_client import AppendClient
from millrace.client.consume import scan as scanning
from millrace.client.consume.consumer import Consumer
from millrace.client.consume.scan import Scan, WalOpener, scan
from millrace.client.remote_tables import RemoteTables
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.server.flight import LogServer
from millrace.message.ids import LogId, MessageId, compose_tick, tick_physical_ms
from millrace.message.model import ImmutableMessage, MutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.node.append.history_reads import HistoryReads as ServedHistories
from millrace.node.append.host import AppendHost, HostSettings
from millrace.node.append.server import AppendExtension
from millrace.node.append.tail_buffer import TailLimits
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.tail import Evicted, TailBatch, TailSource, TimeTick
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.tables.wal.log_replay import UncommittedMessages
from millrace.tables.wal.reader import TRIMMED_APP_SUFFIX, WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.wal.scanner import (
    All,
    DeliverPolicy,
    Filter,
    ImmutableTxn,
    Latest,
    Scanner,
    StartAfter,
    StartAfterTick,
    StartFrom,
    TypeFilter,
    visible_units,
)
from millrace.wal.state import ChannelState
from tests.node.append.samples import (
    PCHANNEL,
    commit_wal,
    insert,
    judged,
    keys_of,
    open_log,
    opening,
    transaction,
)

V0, V1 = "p0_1v0", "p0_1v1"
WHERE = ("here", "elsewhere")
TOKEN = "a-token-of-the-reader"
SMALL_TAIL = HostSettings(tail=TailLimits(max_bytes=100_000, keep_bytes=0))


@dataclass
class Deployment:
    service: RocksMQ
    host: AppendHost
    wal: Path
    history: str | WalOpener
    """The ``wal`` table as a reader has it."""
    tail: TailSource
    marks: list[LogId] = field(default_factory=list)

    def append(self, *appended: MutableMessage) -> None:
        assert self.host.append(PCHANNEL, encode_entry(appended)).rejected == 0
        self.marks.append(self.service.open(PCHANNEL).describe().end)

    def commit(self, end: LogId | None = None) -> int:
        return commit_wal(self.service, self.wal, end=end)

    def scan(self, channel: str, policy: DeliverPolicy, *filters: Filter) -> Scan:
        """A scan that ends at everything that is appended by now."""
        until = self.host.tick(PCHANNEL)
        return scan(channel, policy, wal=self.history, tail=self.tail, filters=filters, until_tick=until)

    def ids(self) -> list[MessageId]:
        """The ids of all units, by the chain's own rows."""
        return [unit.id for unit in visible_units(Scanner().push(judged(self.service).messages))]


@contextmanager
def deployed(folder: Path, where: str, host_settings: HostSettings | None = None) -> Iterator[Deployment]:
    """A host with its reader, which has the folder here, or the server elsewhere that stands before it."""
    with (
        open_log(folder / "log", PCHANNEL) as service,
        AppendHost(service, ChannelState.new, settings=host_settings or HostSettings()) as host,
        ExitStack() as served,
    ):
        host.append(PCHANNEL, opening()).results()
        settings = Settings(data_dir=folder)
        if where == "here":
            yield Deployment(service, host, folder / "wal", settings.wal_uri, host)
            return
        patch = served.enter_context(pytest.MonkeyPatch.context())
        for name in ("FIRST_PIECE_BYTES", "PIECE_BYTES"):
            patch.setattr(remote_tables, name, 1)  # a piece a row group
        extension = AppendExtension(host, histories=ServedHistories(settings, NoCollections(), host))
        server = LogServer(service, tokens=[TOKEN], extensions=[extension])
        served.callback(server.close)
        client = served.enter_context(AppendClient(RemoteLogService.at(server.address, token=TOKEN)))
        yield Deployment(service, host, folder / "wal", RemoteTables(client).wal_opener([PCHANNEL]), client)


class NoCollections:
    """A catalog of messages that were put into a log without one."""

    def collection_of(self, vchannel: str) -> str | None:
        return None

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        return []


@pytest.fixture(params=WHERE)
def deployment(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with deployed(tmp_path, request.param) as made:
        yield made


def fill(made: Deployment) -> None:
    """Messages on both VChannels, a transaction that others fall into, one rolled back, several messages an entry."""
    ours, theirs = keys_of(V0, 20), keys_of(V1, 10)
    for key in ours[:4]:
        made.append(insert(key))
    begin, *rest, commit = transaction(5, ours[4:8], vchannel=V0)
    made.append(begin, rest[0])
    made.append(insert(theirs[0]), insert(theirs[1]))
    made.append(*rest[1:], insert(ours[8]))
    made.append(*transaction(6, theirs[2:4], vchannel=V1, commit=False))
    made.append(commit)
    for key in ours[9:12]:
        made.append(insert(key))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("committed", [None, 3, 6, -1], ids=["no table", "part", "inside a transaction", "all"])
def test_every_policy_delivers_its_part_of_the_models_list(deployment: Deployment, committed: int | None) -> None:
    fill(deployment)
    if committed is not None:
        deployment.commit(deployment.marks[committed])
    model = deployment.ids()
    whole = list(deployment.scan(PCHANNEL, All()))
    assert [unit.id for unit in whole][: len(model)] == model
    assert sum(isinstance(unit, ImmutableTxn) for unit in whole) == 1
    for place in range(len(model)):
        at = whole[place]
        for policy, expected in (
            (StartFrom(at.id), model[place:]),
            (StartAfter(at.id), model[place + 1 :]),
            (StartAfterTick(at.time_tick), model[place + 1 :]),
        ):
            found = [unit.id for unit in deployment.scan(PCHANNEL, policy)]
            assert found[: len(expected)] == expected, policy
            # Behind the model stand only the ticks that the scans themselves asked for.
            assert all(found_id > model[-1] for found_id in found[len(expected) :])


def test_a_scan_counts_what_it_delivers_and_what_its_filters_leave_out(deployment: Deployment) -> None:
    fill(deployment)
    metrics = Metrics()

    def told(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"millrace_{name}", {"pchannel": PCHANNEL, **labels}) or 0.0

    inserts = TypeFilter({MessageType.INSERT})
    until = deployment.host.tick(PCHANNEL)
    with scan(
        V0, All(), wal=deployment.history, tail=deployment.tail, filters=[inserts], until_tick=until, metrics=metrics
    ) as found:
        assert told("wal_scanner_total") == 1
        units = list(found)
    found.close()
    assert told("wal_scanner_total") == 0
    bodies = [body for unit in units for body in (unit.bodies if isinstance(unit, ImmutableTxn) else [unit])]
    assert len(bodies) == 12
    assert told("wal_scan_message_total", type="INSERT") == 12
    assert told("wal_scan_message_total", type="COMMIT_TXN") == 1
    assert told("wal_scan_delay_seconds_count") >= 1
    assert told("wal_scan_message_bytes_total") >= sum(len(body.payload) for body in bodies)
    left_out = told("wal_scan_pass_message_total")
    assert left_out >= 2, "the other VChannel's"
    with pytest.raises(WalGap):
        found._pushed([judged(deployment.service).messages], 0)
    assert told("wal_scan_time_tick_violation_message_total") == 1
    assert told("wal_scan_pass_message_total") == left_out


def test_an_open_transactions_bodies_come_whole_from_a_tick_in_its_middle(deployment: Deployment) -> None:
    keys = keys_of(V0, 3)
    begin, *bodies, commit = transaction(5, keys, vchannel=V0)
    deployment.append(begin, *bodies[:2])
    middle = deployment.commit()
    deployment.append(bodies[2], commit)
    units = [unit for unit in deployment.scan(V0, StartAfterTick(middle)) if isinstance(unit, ImmutableTxn)]
    (txn,) = units
    assert len(txn.bodies) == 3
    assert txn.bodies[0].time_tick <= middle < txn.time_tick


def test_a_transaction_that_a_scan_assembles_is_counted_by_its_bytes(deployment: Deployment) -> None:
    begin, *bodies, commit = transaction(5, keys_of(V0, 3), vchannel=V0)
    deployment.append(begin, *bodies)
    metrics = Metrics()

    def held() -> float:
        return metrics.registry.get_sample_value("millrace_wal_scanner_txn_buf_bytes", {"pchannel": PCHANNEL}) or 0.0

    with scan(V0, All(), wal=deployment.history, tail=deployment.tail, metrics=metrics) as found:
        while not held():
            assert found.poll(timeout=10.0) is not None
        assert held() >= sum(len(body.payload) for body in bodies)
        deployment.append(commit)
        while held():
            assert found.poll(timeout=10.0) is not None


def test_latest_delivers_what_is_appended_from_then_on_alone(deployment: Deployment) -> None:
    fill(deployment)
    deployment.commit()
    found = scan(PCHANNEL, Latest(), wal=deployment.history, tail=deployment.tail)
    key = keys_of(V0, 1)[0]
    result = deployment.host.append(PCHANNEL, encode_entry([insert(key)])).result()
    with found:
        assert next(iter(found)).id == result.message_id


def test_a_vchannel_and_its_types_can_be_scanned_alone(deployment: Deployment) -> None:
    fill(deployment)
    units = list(deployment.scan(V1, All(), TypeFilter({MessageType.INSERT})))
    assert [unit.vchannel for unit in units] == [V1, V1]
    assert [unit.type for unit in units if not isinstance(unit, ImmutableTxn)] == [MessageType.INSERT] * 2


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_a_scan_under_load_switches_from_table_to_tail_without_gap_or_repetition(tmp_path: Path, where: str) -> None:
    """Appender, committer and two readers at once, with a tail so small that the slow reader falls out of it."""
    with deployed(tmp_path, where, SMALL_TAIL) as made:
        made.commit()
        begun, done = threading.Event(), threading.Event()

        def append() -> None:
            try:
                for number, key in enumerate(keys_of(V0, 150)):
                    if number == 75:
                        assert begun.wait(30), "the slow reader has not come to its tenth message"
                    made.append(insert(key, body=bytes(2_000)))
            finally:
                done.set()

        def fall_behind() -> None:
            begun.set()
            assert done.wait(30), "the appends have not come to their end"

        def commit() -> None:
            while not done.wait(0.05):
                made.commit()
            made.commit()

        counting = _Counting(made.tail)
        with ThreadPoolExecutor(4) as pool:
            readers = [
                pool.submit(_read, scan(V0, All(), wal=made.history, tail=counting), 150, at_tenth=at_tenth)
                for at_tenth in (None, fall_behind)
            ]
            work = [pool.submit(append), pool.submit(commit)]
            for each in work:
                each.result()
            found = [reader.result() for reader in readers]
        model = [row["time_tick"] for row in judged(made.service).messages.to_pylist() if row["type"] == "INSERT"]
        assert found == [model, model]
        assert counting.evicted > 0, "no reader ever fell out of the tail: the test shows nothing"
        assert counting.tailed > 0


def _read(found: Scan, inserts: int, *, at_tenth: Callable[[], None] | None) -> list[int]:
    ticks: list[int] = []
    with found:
        for unit in found:
            if not isinstance(unit, ImmutableTxn) and unit.type == MessageType.INSERT:
                ticks.append(unit.time_tick)
                if at_tenth is not None and len(ticks) == 10:
                    at_tenth()
            if len(ticks) == inserts:
                return ticks
    return ticks


class _Counting:
    """A tail that counts how it answers."""

    def __init__(self, source: TailSource) -> None:
        self._source = source
        self.evicted = self.tailed = 0

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 1) -> TailBatch | Evicted:
        found = self._source.tail(pchannel, after_tick, timeout=timeout, max_bytes=max_bytes)
        if isinstance(found, Evicted):
            self.evicted += 1
        elif found.batches:
            self.tailed += 1
        return found

    def time_tick(self, pchannel: str, *, persist: bool = True, deadline: float = 30.0) -> TimeTick:
        return self._source.time_tick(pchannel, persist=persist, deadline=deadline)


def trim_first_commit(made: Deployment) -> int:
    """Take away the file of the table's first commit, as retention does; the tick up to which."""
    table, snapshot = WalTable.open(made.wal), WalSnapshot.open(made.wal)
    assert snapshot is not None
    first, second = snapshot.plan(PCHANNEL).files[:2]
    tick, app = second.first_tick, PCHANNEL + TRIMMED_APP_SUFFIX
    earliest = snapshot.confirmed_at(PCHANNEL, tick).log_id
    moves = {app: tick, f"{app}/ledger": earliest.ledger, f"{app}/entry": earliest.entry}
    part = CommitPart(
        removes=[first.path], app_transactions={name: AppTransaction(0, to) for name, to in moves.items()}, info={}
    )
    assert not commit_fenced(table.table, [part]).fenced
    return tick


def test_who_begins_or_stands_where_retention_has_been_hears_of_it(deployment: Deployment) -> None:
    keys = keys_of(V0, 12)
    for some in (keys[:4], keys[4:8]):
        for key in some:
            deployment.append(insert(key))
        deployment.commit()
    standing = deployment.scan(PCHANNEL, All())
    behind = deployment.scan(PCHANNEL, StartFrom(MessageId(0, 0, 0, 0)))
    tick = trim_first_commit(deployment)
    with pytest.raises(PositionTruncated) as refused:
        deployment.scan(PCHANNEL, StartAfterTick(1))
    assert refused.value.earliest == LogId(*refused.value.earliest)
    inserts = [unit for unit in deployment.scan(PCHANNEL, All()) if unit.time_tick > tick]
    assert sum(isinstance(unit, ImmutableMessage) and unit.type is MessageType.INSERT for unit in inserts) == 3
    for pinned in (standing, behind):
        if deployment.tail is not deployment.host:
            with pytest.raises(PositionTruncated):  # a server holds no version for a reader between two pieces
                list(pinned)
            continue
        units = [unit.id for unit in pinned]
        assert units == deployment.ids()[: len(units)], "a version that was pinned before is read to its end"


def test_a_scan_up_to_a_tick_ends_on_a_pchannel_where_nothing_more_happens(deployment: Deployment) -> None:
    last = deployment.host.tick(PCHANNEL)
    end = deployment.service.open(PCHANNEL).end()
    until = compose_tick(tick_physical_ms(last) + 100)
    with scan(PCHANNEL, All(), wal=deployment.history, tail=deployment.tail, until_tick=until) as found:
        units = list(found)
    assert units
    assert found.ended
    assert found.confirmed_tick >= until
    assert deployment.service.open(PCHANNEL).end() == end, "no entry was needed for it"


def test_a_scan_with_ticks_gives_them_while_nothing_happens_and_none_before_a_row(deployment: Deployment) -> None:
    with scan(
        PCHANNEL, Latest(), wal=deployment.history, tail=deployment.tail, filters=[TypeFilter([MessageType.INSERT])],
        tick_interval=0.01,
    ) as found:  # fmt: skip
        units = iter(found)
        first, second = next(units), next(units)
        for tick in (first, second):
            assert isinstance(tick, ImmutableMessage)
            assert (tick.type, tick.not_persisted) == (MessageType.TIME_TICK, True)
        assert first.time_tick < second.time_tick
        [written] = deployment.host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
        seen = second.time_tick
        while True:
            unit = next(units)
            assert unit.time_tick > seen
            seen = unit.time_tick
            if isinstance(unit, ImmutableMessage) and unit.type == MessageType.INSERT:
                break
        assert seen == written.time_tick
    with pytest.raises(InvalidArgument, match="interval of ticks"):
        scan(PCHANNEL, All(), wal=deployment.history, tail=deployment.tail, tick_interval=0.0)


def test_a_closed_scan_ends(deployment: Deployment) -> None:
    found = scan(PCHANNEL, Latest(), wal=deployment.history, tail=deployment.tail)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, found)
        found.close()
        assert reading.result(timeout=10) == []


def test_a_poll_without_news_returns_at_its_timeout(deployment: Deployment) -> None:
    with scan(PCHANNEL, Latest(), wal=deployment.history, tail=deployment.tail) as found:
        assert found.poll(timeout=0.05) is None
        assert found.confirmed_tick > 0


@pytest.mark.parametrize("committed", [False, True], ids=["of the tail", "of the table"])
def test_a_scan_up_to_a_units_own_tick_delivers_that_unit_and_none_after_it(
    deployment: Deployment, committed: bool
) -> None:
    fill(deployment)
    if committed:
        deployment.commit()
    whole = list(deployment.scan(PCHANNEL, All()))
    for place, unit in enumerate(whole):
        with scan(PCHANNEL, All(), wal=deployment.history, tail=deployment.tail, until_tick=unit.time_tick) as found:
            assert [each.id for each in found] == [each.id for each in whole[: place + 1]]


@pytest.mark.parametrize("where", WHERE)
def test_who_falls_out_of_the_tail_behind_what_retention_took_hears_of_it(tmp_path: Path, where: str) -> None:
    with deployed(tmp_path, where, SMALL_TAIL) as made:
        made.commit()
        keys = iter(keys_of(V0, 200))
        with scan(V0, All(), wal=made.history, tail=made.tail) as found:
            made.append(insert(next(keys)))
            assert found.poll(timeout=10.0) is not None  # it stands in the tail now
            for _ in range(2):
                for _ in range(15):
                    made.append(insert(next(keys), body=bytes(2_000)))
                made.commit()
            assert trim_first_commit(made) > found.confirmed_tick
            with pytest.raises(PositionTruncated):
                found.poll(timeout=10.0)


def fill_beyond_the_tail(made: Deployment, count: int = 20) -> None:
    """More on V0 than the host's tail holds."""
    for key in keys_of(V0, count):
        made.append(insert(key, body=bytes(2_000)))


def inserts_of(made: Deployment) -> list[MessageId]:
    units = visible_units(Scanner().push(judged(made.service).messages))
    return [unit.id for unit in units if unit.type is MessageType.INSERT]


@pytest.mark.parametrize("where", WHERE)
def test_a_scan_that_nothing_can_go_on_with_says_what_it_waits_for_and_goes_on_once_that_is_there(
    tmp_path: Path, where: str
) -> None:
    with deployed(tmp_path, where, SMALL_TAIL) as made:
        fill_beyond_the_tail(made)
        until = made.host.tick(PCHANNEL)
        found = scan(V0, All(), wal=made.history, tail=made.tail, until_tick=until, stall_timeout=0.3)
        for _ in range(2):
            with pytest.raises(TickNotReached, match="is the streaming node running") as waited:
                found.poll(timeout=20.0)
            assert waited.value.retriable
            assert not found.caught_up
        made.commit()
        delivered = [unit for rows in found.tables() for unit in visible_units(rows)]
        assert [unit.id for unit in delivered if unit.type is MessageType.INSERT] == inserts_of(made)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("committed", [None, 1, 10], ids=["no table", "a table", "half of it in the table"])
def test_what_has_left_the_tail_and_is_in_no_table_is_read_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: int | None
) -> None:
    monkeypatch.setattr(scanning, "_TABLE_FIRST", 0.0)
    with deployed(tmp_path, "here", SMALL_TAIL) as made:
        fill_beyond_the_tail(made)
        if committed is not None:
            made.commit(made.marks[committed])
        log = UncommittedMessages(Settings(data_dir=tmp_path).wal_uri, made.service)
        begun: list[LogId] = []

        def noted(pchannel: str) -> Iterator[tuple[pa.RecordBatch, int]]:
            begun.append(log._state(pchannel).position)
            return log(pchannel)

        got: list[MessageId] = []
        inserts = TypeFilter({MessageType.INSERT})
        with scan(V0, All(), wal=made.history, tail=made.tail, filters=[inserts], log=noted) as found:
            for _ in range(2):  # the second time it has come to the end, and falls behind again
                while (rows := found.poll(timeout=0.5)) is not None or not found.caught_up:
                    got += [] if rows is None else [unit.id for unit in visible_units(rows)]
                assert got == inserts_of(made)
                fill_beyond_the_tail(made)
            while len(got) < 60:
                rows = found.poll(timeout=10.0)
                assert rows is not None
                got += [unit.id for unit in visible_units(rows)]
        assert got == inserts_of(made)
        assert begun == sorted(begun)
        assert len(set(begun)) == len(begun) == 3, "each time from where it ended, not from the table's end"


@pytest.mark.slow
def test_the_lag_of_a_consumer_that_waits_is_no_zero(tmp_path: Path) -> None:
    with deployed(tmp_path, "here", SMALL_TAIL) as made:
        fill_beyond_the_tail(made)
        with Consumer([V0], wal=made.history, tail=made.tail) as consumer:
            assert consumer.poll(timeout=1.5) is None
            assert consumer.lag > 0
            made.commit()
            while consumer.lag:
                assert consumer.poll(timeout=10.0) is not None or not consumer.lag
