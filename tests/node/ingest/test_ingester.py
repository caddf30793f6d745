"""One range from log to files: what it takes, where it stops, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millrace.base.errors import LogUnavailable, PositionTruncated
from millrace.log.protocol import Log
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogDescription, LogEntries
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestPlan, IngestReport, run_ingest
from millrace.node.ingest.wal_writer import WalFileWriter
from millrace.node.range_loop.schedule import UNBOUNDED
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import Chain, ChainOutcome
from millrace.wal.digest import WalDigest
from millrace.wal.state import ChannelState
from tests.node.log_samples import accepted, opening, poison, rejected, tick


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RocksMQ]:
    with RocksMQ(tmp_path / "log") as found:
        found.create("p0")
        yield found


@pytest.fixture
def log(service: RocksMQ) -> Log:
    return service.open("p0")


@pytest.fixture
def table(tmp_path: Path) -> WalTable:
    return WalTable.create(tmp_path / "wal")


def run(log: Log, table: WalTable, *, max_bytes: int = UNBOUNDED, slice_bytes: int = 1 << 20) -> IngestReport:
    """One attempt from where the table stands to where the log ends."""
    table.refresh()
    plan = IngestPlan(base=table.position("p0"), end=log.describe().end, max_bytes=max_bytes)
    return run_ingest(plan, log=log, table=Path(table.uri), slice_bytes=slice_bytes)


def commit(table: WalTable, report: IngestReport) -> None:
    assert WalCommitter(WalTable.open(table.uri)).commit([report]).committed == (report,)
    table.refresh()


def rows(table: WalTable) -> list[tuple[str, int]]:
    """(kind, log entry) of all messages and rejections."""
    found = DeltaTable(str(Path(table.uri))).to_pyarrow_table(columns=["kind", "entry"]).to_pylist()
    return sorted((row["kind"], row["entry"]) for row in found if row["kind"] != "state")


def test_a_range_takes_the_log_from_the_position_to_its_end(log: Log, table: WalTable) -> None:
    ids = log.append([opening(), accepted(), rejected()])
    report = run(log, table)
    assert (report.totals.messages, report.totals.rejections, report.failure) == (2, 1, None)
    assert report.position == ids[-1].following()
    commit(table, report)
    more = log.append([accepted()])
    commit(table, run(log, table))
    assert rows(table) == [
        *(("message", item.entry) for item in (ids[0], ids[1], more[0])),
        ("rejection", ids[2].entry),
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("slice_bytes", [1, 200, 1 << 20])
def test_the_content_does_not_depend_on_slices_and_batches(log: Log, table: WalTable, slice_bytes: int) -> None:
    log.append([rejected(b"x" * 100), opening(), *([accepted(), tick(), rejected(b"y" * 50)] * 5)])
    whole = run(log, table)
    assert run(log, table, slice_bytes=slice_bytes).totals == whole.totals
    digest = WalDigest()
    while (report := run(log, table, max_bytes=1, slice_bytes=slice_bytes)).actions:
        commit(table, report)
        digest += report.totals.digest
    assert digest == whole.totals.digest == table.position("p0").totals.digest
    assert table.position("p0").last_tick == whole.last_tick


def test_ticks_without_rows_make_nothing_to_commit(log: Log, table: WalTable) -> None:
    log.append([opening(), tick()])
    commit(table, run(log, table))
    log.append([tick(), tick()])
    report = run(log, table)
    assert (report.actions, report.entries, report.failure) == ((), 2, None)
    assert not list((Path(table.uri) / "kind=message").rglob("*.draft"))
    log.append([accepted()])
    after = run(log, table)
    assert after.entries == 3, "the ticks are read again, which the chain's purity makes harmless"
    commit(table, after)


def test_what_stands_before_an_entry_that_cannot_be_processed_is_committed(log: Log, table: WalTable) -> None:
    ids = log.append([opening(), accepted(), accepted(), poison(), accepted()])
    report = run(log, table)
    assert report.failure is not None
    assert (report.failure.code, report.failure.retriable) == ("UNSUPPORTED_VERSION", False)
    assert report.failure.position == ids[3]
    commit(table, report)
    assert rows(table) == [("message", item.entry) for item in ids[:3]]
    again = run(log, table)
    assert (again.actions, again.failure) == ((), report.failure)


class Unlucky:
    """A log whose reads from `bad` on fail."""

    def __init__(self, log: Log, *, bad: LogId, error: Exception) -> None:
        self._log, self._bad, self._error = log, bad, error

    def read(self, position: LogId, **options: Any) -> LogEntries:
        if position >= self._bad:
            raise self._error
        return self._log.read(position, **{**options, "max_bytes": 1})

    def describe(self) -> LogDescription:
        return self._log.describe()

    def end(self) -> LogId:
        return self.describe().end


@pytest.mark.parametrize(
    "error, retriable", [(LogUnavailable("gone"), True), (OSError("broken pipe"), True), (KeyError("bug"), False)]
)
def test_a_log_that_fails_midway_leaves_what_was_read_and_a_failure_that_says_whether_to_retry(
    log: Log, table: WalTable, error: Exception, retriable: bool
) -> None:
    ids = log.append([opening(), accepted(), accepted()])
    report = run(Unlucky(log, bad=ids[2], error=error), table)  # type: ignore[arg-type]
    assert report.failure is not None
    assert (report.failure.retriable, report.failure.position) == (retriable, ids[2])
    assert report.totals.messages == 2
    commit(table, report)
    commit(table, run(log, table))
    assert rows(table) == [("message", item.entry) for item in ids]


@pytest.mark.parametrize("good_writes", [0, 1, 2])
def test_a_disk_that_fails_leaves_no_file_and_is_tried_again(
    log: Log, table: WalTable, monkeypatch: pytest.MonkeyPatch, good_writes: int
) -> None:
    ids = log.append([opening(), accepted(), accepted(), accepted()])
    write, left = WalFileWriter.write, [None] * good_writes

    def full(file: WalFileWriter, rows: pa.RecordBatch) -> None:
        if not left:
            raise OSError(28, "No space left on device")
        left.pop()
        write(file, rows)

    with monkeypatch.context() as patch:
        patch.setattr(WalFileWriter, "write", full)
        report = run(log, table, slice_bytes=1)
    assert report.failure is not None
    assert (report.actions, report.failure.retriable) == ((), True)
    unwritten = (LogId(0, 0), ids[1], ids[2])[good_writes]
    assert report.failure.position == report.position == unwritten, "where the first slice begins that is not written"
    assert not list(Path(table.uri).rglob("*.parquet"))
    commit(table, run(log, table))
    assert rows(table) == [("message", item.entry) for item in ids]


def test_the_chain_works_on_a_slice_while_the_one_before_is_written(
    log: Log, table: WalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([opening(), accepted(), accepted()])
    process, write = Chain.process, WalFileWriter.write
    judged, second = [], threading.Event()

    def processing(chain: Chain, state: ChannelState, entries: LogEntries) -> ChainOutcome:
        judged.append(entries.next)
        if len(judged) > 1:
            second.set()
        return process(chain, state, entries)

    def waiting(file: WalFileWriter, rows: pa.RecordBatch) -> None:
        assert second.wait(30), "the first slice's rows are written before the chain has the second slice"
        write(file, rows)

    monkeypatch.setattr(Chain, "process", processing)
    monkeypatch.setattr(WalFileWriter, "write", waiting)
    report = run(log, table, slice_bytes=1)
    assert (report.failure, report.totals.messages, len(judged)) == (None, 3, 3)


def test_a_log_that_ends_before_the_committed_position_has_regressed(service: RocksMQ, table: WalTable) -> None:
    service.open("p0").append([opening(), accepted()])
    commit(table, run(service.open("p0"), table))

    class Shorter(Unlucky):
        def describe(self) -> LogDescription:
            return LogDescription(begin=LogId(0, 0), end=LogId(0, 1), bytes=0)

    plan = IngestPlan(table.position("p0"), service.open("p0").describe().end.following(), UNBOUNDED)
    log = Shorter(service.open("p0"), bad=LogId(9, 9), error=OSError())
    report = run_ingest(plan, log=log, table=Path(table.uri))  # type: ignore[arg-type]
    assert report.failure is not None
    assert (report.failure.code, report.failure.retriable) == ("LOG_REGRESSED", False)


def test_a_log_whose_last_committed_entry_changed_has_regressed(log: Log, table: WalTable) -> None:
    ids = log.append([opening(), accepted()])
    commit(table, run(log, table))

    class Rewritten(Unlucky):
        def read(self, position: LogId, **options: Any) -> LogEntries:
            found = self._log.read(position, **options)
            if position == ids[-1]:
                columns = [*found.batch.columns[:3], pa.array([b"other bytes"], pa.large_binary())]
                return LogEntries(pa.RecordBatch.from_arrays(columns, schema=ENTRY_SCHEMA), found.next)
            return found

    log.append([accepted()])
    rewritten = Rewritten(log, bad=LogId(9, 9), error=OSError())
    report = run(rewritten, table)  # type: ignore[arg-type]
    assert report.failure is not None
    assert report.failure.code == "LOG_REGRESSED"
    assert report.actions == ()


def test_a_position_that_retention_took_is_an_error_and_not_a_skip(log: Log, table: WalTable) -> None:
    ids = log.append([opening(), accepted()])
    commit(table, run(log, table))
    log.append([accepted()])

    class Truncated(Unlucky):
        def read(self, position: LogId, **options: Any) -> LogEntries:
            raise PositionTruncated("the earliest position is 0:99", earliest=(0, 99))

        def describe(self) -> LogDescription:
            return LogDescription(begin=LogId(1, 0), end=LogId(1, 9), bytes=0)

    report = run(Truncated(log, bad=ids[0], error=OSError()), table)  # type: ignore[arg-type]
    assert report.failure is not None
    assert (report.failure.code, report.failure.retriable) == ("POSITION_TRUNCATED", False)
    assert "0:99" in report.failure.message


def test_a_last_entry_that_retention_took_is_no_regression(log: Log, table: WalTable) -> None:
    log.append([opening(), accepted()])
    commit(table, run(log, table))
    log.truncate(log.describe().end)
    log.append([accepted()])
    assert run(log, table).failure is None
