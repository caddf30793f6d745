"""Runs one range of one PChannel's log from plan to files: read, chain, write. Independent of Spark.

:func:`run_ingest` is a pure function of (base position, log), except for file names. It commits nothing: it leaves
durable
files and an :class:`IngestReport` that names them. An entry that cannot be processed ends the range right before it.
The
entries before it are committed, and the report names the entry that parks the PChannel.
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
"""Log bytes that are decoded at a time. Bounds a task's memory."""

_CHAIN: Final = Chain()
"""It has no state."""


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """One range: from `base` to `end`, or until about `max_bytes` of the log are read."""

    base: WalPosition
    end: LogId
    max_bytes: int
    peeked: int | None = None
    """Bytes of the log in it, if the planner read them."""
    generations: bytes = b""
    """The list of the log's backends and tombstones, for a task that does not share the data folder."""

    @property
    def channel(self) -> str:
        return self.base.pchannel

    @property
    def bytes(self) -> int:
        return self.max_bytes if self.peeked is None else self.peeked


@dataclass(frozen=True, slots=True)
class IngestReport:
    """A task's result for the committer. Without `actions` there is nothing to commit."""

    pchannel: str
    base_commits: int
    base_tick: int
    last_tick: int
    position: LogId
    totals: WalTotals
    """Totals of this range alone."""
    actions: tuple[FileAction, ...] = ()
    replaced_states: tuple[str, ...] = ()
    log_bytes: int = 0
    entries: int = 0
    failure: RangeFailure | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by part: chain, and the time that the task waited for reads and writes, which run concurrently."""

    @classmethod
    def without_effect(cls, base: WalPosition, position: LogId, failure: RangeFailure | None = None) -> Self:
        """Make the report of a range from `base` that leaves the table unchanged."""
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
    """Measures seconds by part."""

    def __init__(self) -> None:
        self.seconds = {"read": 0.0, "chain": 0.0, "write": 0.0}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


def run_ingest(plan: IngestPlan, *, log: Log, table: object, slice_bytes: int = SLICE_BYTES) -> IngestReport:
    """Run the chain over the planned range and write its rows to durable files of the table at the URI `table`.

    Raises nothing that log, chain or disk raise: those errors become the report's `failure`.
    """
    writer = WalRangeWriter(table, plan.channel)
    watch = _Stopwatch()
    try:
        # No state: the PChannel has no commit yet.
        state = plan.base.state or ChannelState.new(plan.channel)
    except MillraceError as error:
        return IngestReport.without_effect(plan.base, EARLIEST, RangeFailure.of(error))
    report = IngestReport.without_effect(plan.base, state.position)
    taken = entries_taken = 0
    failure: RangeFailure | None = None
    with _WriteBehind(writer, state, inline=plan.peeked is not None) as writes:
        try:
            # Before anything is read: a log that lost its tail would otherwise give other rows for committed positions.
            check_not_regressed(log, state)
            with closing(_slices(log, state.position, plan, slice_bytes)) as slices:
                for entries in slices:
                    watch.lap("read")
                    outcome, failure = process_until_failure(_CHAIN, state, entries)
                    watch.lap("chain")
                    if outcome is not None:
                        # The previous write failed: stop, its error becomes the report's.
                        if not writes.add(outcome):
                            break
                        state = outcome.state
                        watch.lap("write")
                    taken += value_bytes(entries.batch)
                    entries_taken += entries.batch.num_rows
                    if failure is not None:
                        break
        except Exception as error:  # a failure of one PChannel must not end the query that serves the others
            failure = RangeFailure.of(error, state.position)
        writes.settle()
    watch.lap("write")
    if writes.error is not None:  # the files may hold part of a slice
        writer.abort()
        failure = RangeFailure.of(writes.error, writes.state.position)
        return replace(report, position=writes.state.position, failure=failure, seconds=watch.seconds)
    report = replace(
        report, position=state.position, failure=failure, log_bytes=taken, entries=entries_taken, seconds=watch.seconds
    )
    try:
        if writer.rows == 0:
            writer.abort()
            # Only ticks without rows: the state stays, and the next range reads them again.
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
        replaced_states=writer.replaced_states,
    )


class _WriteBehind:
    """Writes outcomes in a thread while the chain processes the next slice; `inline`: at once, for there is one."""

    def __init__(self, writer: WalRangeWriter, state: ChannelState, *, inline: bool) -> None:
        self._writer = writer
        self._inline = inline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-write-behind")
        self._pending: tuple[Future[None], ChannelState] | None = None
        self.state = state
        """The state after the last written outcome."""
        self.error: Exception | None = None
        """The error that stopped writing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def add(self, outcome: ChainOutcome) -> bool:
        """Queue `outcome` once its predecessor is written. Returns False if that failed."""
        if not self.settle():
            return False
        writing = Future[None]() if self._inline else self._thread.submit(self._writer.add, outcome)
        self._pending = writing, outcome.state
        if self._inline:
            try:
                self._writer.add(outcome)
                writing.set_result(None)
            except Exception as error:
                writing.set_exception(error)
        return True

    def settle(self) -> bool:
        """Wait for all queued outcomes. Returns False if one failed."""
        if self._pending is not None:
            (writing, state), self._pending = self._pending, None
            try:
                writing.result()
                self.state = state
            except Exception as error:  # reported as the range's failure
                self.error = error
        return self.error is None


def _slices(log: Log, position: LogId, plan: IngestPlan, slice_bytes: int) -> Generator[LogEntries, None, None]:
    """Yield the planned range in slices, cut into chunks for the chain. Reads one slice ahead."""
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
    """Return the outcome of the entries before the first one that cannot be processed, and that entry's failure.

    Without a failure, the outcome covers all `entries`. Finds the entry by bisection, which is valid because the chain
    is pure.
    """
    try:
        return chain.process(state, entries), None
    except Exception as error:  # any error: this entry would raise it again, which is what parks the PChannel
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
    """Raise LogRegressed if the log ends before the state's position, or the bytes of its last entry differ."""
    end = log.end()
    if end.generation < state.position.generation:
        raise LogUnavailable(
            f"{state.pchannel} continues at {state.position}, but its log ends at {end}. Either a switch of the backend"
            " is in progress or was interrupted (run `millrace log switch` again), or the list of generations "
            "is an old copy"
        )
    if end < state.position:
        raise LogRegressed(
            f"the log of {state.pchannel} ends at {end}, but the wal table has committed up to {state.position}: "
            "the log lost acknowledged entries. Restore it, or fail over to a copy. If the setting `log` was "
            "changed, set it back: only `millrace log switch` moves a log to another backend. If the setting `tables` "
            "names the tables of another deployment, give this one a place of its own"
        )
    last = state.last_entry
    if last is None:
        return
    try:
        found = log.read(last, end=last.following(), max_bytes=1).batch
    except PositionTruncated:
        return  # retention removed it
    if (
        found.num_rows != 1
        or id_at(found, 0) != last
        or entry_crc(found.column("value")[0].as_buffer()) != state.last_entry_crc
    ):
        raise LogRegressed(
            f"entry {last} of {state.pchannel} is not the one the wal table was made from: "
            "the log was truncated and written again. Restore it"
        )


def _prefix(entries: LogEntries, count: int) -> LogEntries:
    return LogEntries(batch=entries.batch.slice(0, count), next=id_at(entries.batch, count))
