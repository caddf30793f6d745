"""One range of one PChannel's log, from plan to files: read, chain, write. Knows no Spark, so that any host can run it.

:func:`run_ingest` is a pure function of (base position, log) but for file names. It commits nothing: it leaves durable files and
a :class:`IngestReport` that names them. An entry that cannot be processed ends the range right before it, so that what lies
in front of it is committed and the report says exactly which entry parks the PChannel.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from millrace.base.errors import LogRegressed, LogUnavailable, MillraceError, PositionTruncated
from millrace.base.failpoint import hit
from millrace.log.protocol import Log
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import LogEntries, value_bytes, weight
from millrace.message.wire.decode import entry_crc
from millrace.node.ingest.wal_writer import WalRangeWriter
from millrace.node.range_loop.failure import RangeFailure
from millrace.storage.parquet_file import FileAction
from millrace.tables.wal.table import WalPosition, WalTotals
from millrace.wal.chain import Chain, ChainOutcome
from millrace.wal.entry_chunks import chunk_entries, id_at
from millrace.wal.state import ChannelState

SLICE_BYTES: Final = 16 << 20
"""Log bytes that are decoded at a time: what bounds a task's memory."""


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """What one task is to do: go on from `base` up to `end`, or to where about `max_bytes` of the log are taken."""

    base: WalPosition
    end: LogId
    max_bytes: int

    @property
    def channel(self) -> str:
        return self.base.pchannel


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What a task hands to the committer. Without `actions` there is nothing to commit."""

    pchannel: str
    base_commits: int
    base_tick: int
    last_tick: int
    position: LogId
    totals: WalTotals
    """Of this range alone."""
    actions: tuple[FileAction, ...] = ()
    removed_state: str | None = None
    log_bytes: int = 0
    entries: int = 0
    failure: RangeFailure | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """By part: read and write (what the task waited for them, which go on beside it) and chain."""

    @classmethod
    def without_effect(cls, base: WalPosition, position: LogId, failure: RangeFailure | None = None) -> Self:
        """Of a range from `base` that leaves the table as it is."""
        start = base.pchannel, base.commits, base.last_tick
        return cls(*start, base.last_tick, position, WalTotals(), failure=failure)

    @property
    def channel(self) -> str:
        return self.pchannel

    @property
    def tick(self) -> int:
        return self.last_tick

    @property
    def rows(self) -> int:
        return self.totals.digest.rows

    def progress(self) -> dict[str, Any]:
        return {
            "position": str(self.position),
            "tick": self.tick,
            "rows": self.rows,
            "seconds": {part: round(value, 4) for part, value in self.seconds.items()},
        }


class _Stopwatch:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds = {"read": 0.0, "chain": 0.0, "write": 0.0}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


def run_ingest(plan: IngestPlan, *, log: Log, table: object, slice_bytes: int = SLICE_BYTES) -> IngestReport:
    """Run the chain over the planned range and leave its rows in durable files of the table at the URI `table`.

    Raises nothing that comes from log, chain or disk: that is the report's `failure`.
    """
    writer = WalRangeWriter(table, plan.channel)
    watch = _Stopwatch()
    try:
        state = plan.base.state or ChannelState.new(plan.channel)
    except MillraceError as error:
        return IngestReport.without_effect(plan.base, EARLIEST, RangeFailure.of(error))
    report = IngestReport.without_effect(plan.base, state.position)
    taken = entries_taken = 0
    failure: RangeFailure | None = None
    with _WriteBehind(writer, state) as behind:
        try:
            check_not_regressed(log, state)
            with closing(_slices(log, state.position, plan, slice_bytes)) as slices:
                for entries in slices:
                    watch.lap("read")
                    outcome, failure = process_until_failure(Chain(), state, entries)
                    watch.lap("chain")
                    if outcome is not None:
                        if not behind.add(outcome):
                            break
                        state = outcome.state
                        watch.lap("write")
                    taken += value_bytes(entries.batch)
                    entries_taken += entries.batch.num_rows
                    if failure is not None:
                        break
        except Exception as error:  # one PChannel's trouble is no reason to end the query that serves the others
            failure = RangeFailure.of(error, state.position)
        behind.settle()
    watch.lap("write")
    if behind.error is not None:  # part of a slice may be in the files
        writer.abort()
        failure = RangeFailure.of(behind.error, behind.state.position)
        return replace(report, position=behind.state.position, failure=failure, seconds=watch.seconds)
    report = replace(
        report, position=state.position, failure=failure, log_bytes=taken, entries=entries_taken, seconds=watch.seconds
    )
    try:
        if writer.rows == 0:
            writer.abort()
            # Nothing but unpersisted ticks: the state stays where it is, the next range reads them again.
            return report
        actions = writer.finish(state, plan.base)
        watch.lap("write")
    except Exception as error:
        writer.abort()
        return replace(report, failure=RangeFailure.of(error, state.position))
    hit("range.written")
    return replace(
        report,
        last_tick=state.last_tick,
        totals=writer.totals,
        actions=tuple(actions),
        removed_state=plan.base.state_path,
    )


class _WriteBehind:
    """Writes outcomes in a thread while the chain works on the next one, so that the disk is not waited for."""

    def __init__(self, writer: WalRangeWriter, state: ChannelState) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-write-behind")
        self._pending: tuple[Future[None], ChannelState] | None = None
        self.state = state
        """The state behind what is written."""
        self.error: Exception | None = None
        """Why no more is written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def add(self, outcome: ChainOutcome) -> bool:
        """Have `outcome` written once the one before it is; False where that one failed."""
        if not self.settle():
            return False
        self._pending = self._thread.submit(self._writer.add, outcome), outcome.state
        return True

    def settle(self) -> bool:
        """Wait until everything added is written; False where something failed."""
        if self._pending is not None:
            (writing, state), self._pending = self._pending, None
            try:
                writing.result()
                self.state = state
            except Exception as error:  # the disk's trouble, or ours: the report says it
                self.error = error
        return self.error is None


def _slices(log: Log, position: LogId, plan: IngestPlan, slice_bytes: int) -> Generator[LogEntries, None, None]:
    """The planned range in slices, in portions for the chain; while one is worked on, the next is read (and the one before written)."""
    taken = 0
    ahead: Future[LogEntries] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="millrace-read-ahead") as reader:
        while position < plan.end and taken < plan.max_bytes:
            size = min(slice_bytes, plan.max_bytes - taken)
            entries = ahead.result() if ahead is not None else log.read(position, end=plan.end, max_bytes=size)
            if entries.batch.num_rows == 0:
                return
            position = entries.next
            taken += weight(entries.batch)
            if position < plan.end and taken < plan.max_bytes:
                size = min(slice_bytes, plan.max_bytes - taken)
                ahead = reader.submit(log.read, position, end=plan.end, max_bytes=size)
            yield from chunk_entries(entries)


def process_until_failure(
    chain: Chain, state: ChannelState, entries: LogEntries
) -> tuple[ChainOutcome | None, RangeFailure | None]:
    """The outcome of `entries`, or of those before the first one that cannot be processed, and the failure at that one.

    Finds the entry by halving, which is right because the chain is a pure function.
    """
    try:
        return chain.process(state, entries), None
    except Exception as error:  # whatever it is, this entry would raise it again: that is what parks the PChannel
        cause = error
    good, bad = 0, entries.batch.num_rows
    outcome: ChainOutcome | None = None
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            outcome = chain.process(state, _prefix(entries, middle))
            good = middle
        except Exception as error:
            cause, bad = error, middle
    position = id_at(entries.batch, good)
    return outcome, replace(RangeFailure.of(cause, position), retriable=isinstance(cause, MemoryError))


def check_not_regressed(log: Log, state: ChannelState) -> None:
    """Raises LogRegressed where the log ends before the state's position, or its last entry has other bytes."""
    end = log.end()
    if end.generation < state.position.generation:
        raise LogUnavailable(
            f"{state.pchannel} goes on at {state.position}, and its log ends at {end}: a switch of the backend is"
            " under way, or was interrupted (run millrace log switch again), or the list of the generations is an old copy"
        )
    if end < state.position:
        raise LogRegressed(
            f"the log of {state.pchannel} ends at {end}, but the wal table has committed up to {state.position}: "
            "the log lost entries it had acknowledged; restore it, or fail over to a copy, before going on (if the setting log was "
            "changed, set it back: a log goes to another backend by millrace log switch)"
        )
    last = state.last_entry
    if last is None:
        return
    try:
        found = log.read(last, end=last.following(), max_bytes=1).batch
    except PositionTruncated:
        return  # retention took it
    if (
        found.num_rows != 1
        or id_at(found, 0) != last
        or entry_crc(found.column("value")[0].as_buffer()) != state.last_entry_crc
    ):
        raise LogRegressed(
            f"entry {last} of {state.pchannel} is not the one the wal table was made from: "
            "the log was cut and written again; restore it before going on"
        )


def _prefix(entries: LogEntries, count: int) -> LogEntries:
    return LogEntries(batch=entries.batch.slice(0, count), next=id_at(entries.batch, count))
