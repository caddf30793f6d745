"""Run the engine beside a flow's tasks, store its output in the spool, and restart it after growing pauses."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    CaptureEnded,
    CaptureLost,
    DeadlineExceeded,
    FlowNotRunning,
    InvalidArgument,
    LogUnavailable,
    MillraceError,
    StreamBusy,
)
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.requests import ask
from millrace.flows.sources.capture.ddl import (
    Effect,
    current_records,
    effect_of,
    records_after,
    renamed_tables,
    table_of,
)
from millrace.flows.sources.capture.engine import Batch, Columns, Engine, Event, History, regex_of
from millrace.flows.sources.capture.rereading import Rereading, TableReader
from millrace.flows.sources.capture.shared_spool import shared_spool
from millrace.flows.sources.capture.spool import FILE, Mark, Spool, Standing, is_fed_here
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.runtime.supervisor import RestartBackoff

CHANGES: Final = frozenset("cudrt")
TRUNCATION: Final = b'{"o":"t"}'
_IDLE: Final = frozenset({"heartbeat", "notification", "tombstone"})
_COMPLETED: Final = frozenset({"Initial Snapshot: COMPLETED", "Initial Snapshot: SKIPPED"})
_INCREMENTAL: Final = "Incremental Snapshot: "
_SCANNED: Final = "Incremental Snapshot: TABLE_SCAN_COMPLETED"
_READING: Final = "incremental_snapshot_"
"""The prefix of names in an offset that list the tables which the engine reads beside their changes."""
SNAPSHOT: Final = "snapshot_asked"
"""The fact of a spool (`Spool.fact`) that a new snapshot was requested (`ask_for_snapshot`)."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_FULL_PAUSE: Final = 0.2
_MORE_HISTORY: Final = 1000
"""Records that a schema history may have beyond twice those that were needed at the last pruning."""
_READ_TRIES: Final = 3
"""Attempts to read rows beside the changes before they count as lost: a new snapshot reads them in another way."""
_LAG_SECONDS: Final = 5.0
"""Seconds between two queries for the end of the database's log."""
_LOST: Final = (
    "no longer available on the server",
    "purged gtids",
    "purged required",
    "been purged",
    "already purged",
    "could not find first log file",
    "can no longer get changes from replication slot",
    "can no longer access replication slot",
    "slot has been invalidated",
    "cannot read from logical replication slot",
    "replica identity full",
    "parser does not know a statement",
    "a session logs statements in place of rows",
    "schema size",
    "schema isn't known",
)
"""Texts of an engine that cannot continue from its offset: the following changes are removed or unreadable."""
_AHEAD: Final = ("dbz-4350", "not found in result set", 'because "array" is null')
"""Texts of an engine that read rows of a table that a later statement in the log changes, so it does not know them."""
_AHEAD_SECONDS: Final = 20.0
"""Seconds for which an engine reads the log first. An idle log may end inside a transaction, as the engine sees it."""
_NO_SLOT: Final = re.compile(r"replication slot \S+ does not exist")
"""Not a slot that is in use, or for which the server has no room."""

_logger: Final = logging.getLogger(__name__)


class Database:
    """A feeder's hooks for its engine's database. The base class leaves everything to the engine."""

    whole_transactions = False
    """Whether the engine continues only after a whole transaction, and so reads the last part of one again."""

    def before_engine(self, now: Standing) -> Mapping[str, str]:
        """Prepare a start of the engine. Without an offset, the engine begins a snapshot.

        Returns properties of this start, besides the common ones. Raises CaptureLost if the database no longer has the
        changes after the offset, InvalidSettings, LogUnavailable.
        """
        return {}

    def before_change(self, now: Standing) -> None:
        """Check the engine's first batch after a start, before it is stored. Raises as `before_engine`."""

    def offset(self, offset: Any) -> Any:
        """Return the position from which the engine continues, from the offset after a whole transaction."""
        return offset

    def resume(self, offset: Any) -> Any:
        """Return the position at which the engine starts, from the stored offset."""
        return offset

    def reader(self) -> TableReader | None:
        """Return a reader of rows beside the changes, if the engine cannot do that. Needs `whole_transactions`."""
        return None

    def tables(self, now: Standing) -> tuple[str, ...]:
        """Return the tables whose snapshot was begun; empty if unknown."""
        return now.tables

    def wake(self) -> None:
        """Write something into the log, if the engine would otherwise not report its end."""


@dataclass(slots=True)
class _Taken:
    """The content of a batch for the spool."""

    changes: list[tuple[str, bytes]]
    marks: list[Mark] = field(default_factory=list)
    columns: list[tuple[str, dict[str, Any], int]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    moment: int = 0

    @property
    def marked(self) -> int:
        """The number of changes before the newest mark."""
        return self.marks[-1].number if self.marks else 0


class DatabaseLog(Protocol):
    """The end of the database's log. May be used from any thread."""

    def end(self) -> Any:
        """Return the position after the newest change, in JSON. Raises LogUnavailable."""
        ...

    def behind(self, offset: Any, end: Any, /) -> int:
        """Return the bytes of the log after the engine's `offset` and before `end`. Raises LogUnavailable."""
        ...

    def moment(self, offset: Any, /) -> float:
        """Return when the change at `offset` was made, in seconds since 1970; 0 if unknown."""
        ...


class Feeder(Closeable):
    """Feeds the spool in `folder` until it is closed, or until another machine takes it over (`check`).

    Raises StreamBusy if another process of this machine feeds it, and the errors of taking over a shared spool.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        tables: Sequence[str],
        properties: Mapping[str, str],
        max_bytes: int,
        snapshot_again: bool = False,
        database: Database | None = None,
        log: DatabaseLog | None = None,
        reading: Mapping[str, str] | None = None,
    ) -> None:
        """Start to feed. With `log`, `wait_complete` waits for its content, and the lag is measured.

        `reading` are additional properties of an engine that reads a table's rows beside its changes.
        """
        self._settings, self._folder = settings, folder
        self._database = database or Database()
        self._tables, self._properties = frozenset(tables), properties
        self._name = ", ".join(tables) if len(tables) < 4 else f"{tables[0]} and {len(tables) - 1} more"
        self._reading = dict(reading or {})
        """Empty for an engine that cannot do that, so that all tables are read again if one is added."""
        self._max_bytes, self._again, self._log = max_bytes, snapshot_again, log
        self._spool = Spool(folder, write=True, shared=shared_spool(settings, folder.name))
        self._taken_over: StreamBusy | None = None
        self._unread: list[str] = []
        self._asked: list[str] = []
        """Tables of `unread` that this engine knows."""
        self._rereading: Rereading | None = None
        """Used instead of an engine that can."""
        self._careful = False
        """Whether rows are read only after the log as of the start is read (see `_AHEAD`)."""
        self._failed: Counter[str] = Counter()
        """Failed attempts to read the rows of each table."""
        self._definitions: dict[str, Any] = {}
        self._transaction = ""
        """The transaction of the last BEGIN; at the start, the one that contains the engine's offset."""
        self._named = ""
        """The last marked transaction. Rows that are read beside the changes come after it."""
        self._backoff = RestartBackoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._stop = threading.Event()
        self._engine: Engine | None = None
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()
        self._watch = threading.Thread(target=self._measure, name="capture-lag", daemon=True)
        self._watch.start()

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id; None between two engines."""
        with self._guard:
            return None if self._engine is None else self._engine.pid

    def check(self) -> None:
        """Raise the error of another machine that took over the spool, if any."""
        if self._taken_over is not None:
            raise self._taken_over

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._stop.set()
        with self._guard:
            engine = self._engine
        if engine is not None:
            engine.close()
        self._thread.join()
        self._watch.join()
        self._spool.close()

    def wait_complete(self, seconds: float) -> None:
        """Wait until the spool has all changes that the database had at the call.

        Raises DeadlineExceeded, with the engine's last error, and LogUnavailable.
        """
        end = Deadline.after(seconds)
        newest = None if self._log is None else self._log.end()
        self._database.wake()
        with Spool(self._folder) as spool:
            while not self._has(spool.standing(), newest):
                if not end.pause(0.1):
                    now = spool.standing()
                    words = "is not read to the end of its log" if now.complete else "has an unfinished snapshot"
                    raise DeadlineExceeded(f"{self._name} {words} after {seconds:.0f} s. {now.error}")

    def _measure(self) -> None:
        """Record how far the engine lags behind the database's log, until this is closed."""
        if self._log is None:
            return
        while not self._stop.wait(_LAG_SECONDS):
            try:
                with Spool(self._folder) as spool:
                    self._note_lag(spool, self._log)
            except (MillraceError, OSError, sqlite3.Error) as error:
                _logger.debug("the lag of %s is unknown: %s", self._name, error)
            except Exception:  # the next attempt may succeed
                _logger.warning("the lag of %s is unknown", self._name, exc_info=True)

    def _note_lag(self, spool: Spool, log: DatabaseLog) -> None:
        offset = spool.standing().offset
        if offset is None:
            return
        behind: int | None
        try:
            behind = max(0, log.behind(offset, log.end()))
        except LogUnavailable:
            behind = None
        moment = log.moment(offset)
        age = round(max(0.0, time.time() - moment), 1) if moment and behind != 0 else 0.0
        now = spool.standing()
        if (now.lag_bytes, round(now.lag_seconds)) != (behind, round(age)):
            spool.note(lag_bytes=behind, lag_seconds=age)

    def _has(self, now: Standing, newest: Any) -> bool:
        if not now.complete or now.unread:
            return False
        return self._log is None or (now.offset is not None and self._log.behind(now.offset, newest) <= 0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._spool.resume()
                self._capture()
            except StreamBusy as error:
                _logger.warning("%s: %s", self._name, error)
                self._taken_over = error
                return
            except Exception as error:  # otherwise lanes would wait forever for a thread that ended
                if self._stop.is_set():
                    return
                expected = isinstance(error, (MillraceError, OSError, sqlite3.Error, msgspec.MsgspecError))
                said = str(error) if expected else f"{type(error).__name__}: {error}"
                lost = is_loss(error)
                anew = lost and self._again
                if lost and not anew:
                    name = self._folder.name.removeprefix("millrace-")
                    said = (
                        f"{CaptureLost.code}: {said}. Only a new snapshot, which reads the"
                        " tables again, can continue: run"
                        f" `millrace flows snapshot {name}`, or set on_loss to snapshot"
                    )
                self._careful |= any(words in said.lower() for words in _AHEAD)
                with suppress(sqlite3.Error):  # a full disk cannot store the reason either; the log has it
                    self._spool.note(error=said)
                with suppress(sqlite3.Error, MillraceError, OSError):  # the changes are lost at the next start, too
                    if anew:
                        self._spool.begin_epoch()
                        self._failed.clear()
                        self._spool.note(error=said)
                self._backoff.record_failure(said)
                pause = self._backoff.remaining_pause()
                words = f"again in {pause:.0f} s"
                if lost:
                    words = "a new snapshot begins" if anew else words
                _logger.warning("%s: %s (%s)", self._name, said, words, exc_info=None if expected else error)
                self._stop.wait(pause)

    def _capture(self) -> None:
        """Run the engine until it ends or this is closed. Raises the engine's errors."""
        now = self._spool.standing()
        known, reader = set(self._database.tables(now)), self._database.reader()
        added = sorted(self._tables - known) if known else []
        anew = now.offset is None or not now.complete or bool(self._spool.fact(SNAPSHOT))
        if anew or (added and not self._reading and reader is None):
            added = []
            self._spool.begin_epoch()  # the engine cannot continue a snapshot
            self._spool.note(tables=sorted(self._tables), definitions={}, rereading=None, **{SNAPSHOT: False})
        elif set(now.tables) != self._tables:
            self._spool.forget(sorted(self._tables))
            if reader is None:
                # A table that was captured before may have lost rows since; all that it has come again.
                self._spool.append(
                    [(table, TRUNCATION) for table in added],
                    [],
                    partition=now.partition,
                    offset=now.offset,
                    tables=sorted(self._tables),
                    unread=[*(each for each in now.unread if each in self._tables), *added],
                )
        self._rereading = None
        if reader is not None:
            # Before a snapshot begins: every later change of a shape counts.
            self._rereading = Rereading(reader, sorted(self._tables), self._spool.fact("rereading"), added=added)
            found = {"rereading": self._rereading.stored(), "unread": self._rereading.pending}
            self._spool.note(tables=sorted(self._tables), **found)
        now = self._spool.standing()
        self._named = self._spool.last_source() if now.complete else ""
        self._unread, self._definitions = list(now.unread), self._spool.fact("definitions") or {}
        self._transaction = str((now.offset or {}).get("transaction_id") or "")
        # The engine's offset lists the tables that it was about to read.
        about = str((now.offset or {}).get("incremental_snapshot_collections", ""))
        self._asked = [
            each for each, count in Counter(self._unread).items() for _ in range(min(count, about.count(f'"{each}"')))
        ]
        self._merge()
        reads = bool(self._unread and self._reading)
        offset = now.offset
        ahead = self._log if self._careful and reads else None
        target, begun = None if ahead is None else ahead.end(), time.monotonic()
        if offset is not None and (not reads or ahead):  # or a table that it was reading is no longer part of the flow
            offset = {name: value for name, value in offset.items() if not name.startswith(_READING)}
            self._asked = []
            self._merge()
        stored = self._pruned_history(offset)
        records = needed = len(stored)
        known = {_history_key(each) for each in records_after(stored, offset)}
        engine = Engine(
            self._settings,
            {**self._properties, **self._database.before_engine(now), **(self._reading if reads else {})},
            log_file=self._folder / "engine.log",
            tables=sorted(self._tables),
            partition=now.partition,
            offset=self._database.resume(offset),
            history=stored,
        )
        with self._guard:
            self._engine = engine  # from now on `close` closes it; before, the loop's condition does
        replaces = now.epoch > 1 and not now.complete
        history: list[str] = []
        columns: list[Columns] = []
        complete = now.complete
        taking = _Taking(now, self._database)
        try:
            while not self._stop.is_set():
                match engine.read():
                    case History(record):
                        # The engine repeats a record that it read just before it was killed.
                        if _history_key(record) not in known:
                            history.append(record)
                    case Columns() as description:
                        columns.append(description)
                    case batch:
                        if not taking.begun:
                            self._database.before_change(now)
                        self._wait_for_room(complete)
                        complete |= self._take(batch, taking, history, columns, replaces=replaces, complete=complete)
                        replaces = False
                        records += len(history)
                        if complete and records > 2 * needed + _MORE_HISTORY:
                            records = needed = len(self._pruned_history(self._spool.standing().offset))
                        history, columns = [], []
                        hit("capture.spooled")
                        engine.acknowledge()
                        if complete and any(each.operation not in _IDLE for each in batch.events):
                            self._backoff.reset()  # not earlier: a snapshot that fails returns rows each time
                        if self._rereading is not None:
                            self._rereading.wake()
                        elif self._unread and complete:
                            if not reads:
                                return  # it restarts as one that reads
                            if ahead is not None and (
                                time.monotonic() - begun > _AHEAD_SECONDS
                                or ahead.behind(self._spool.standing().offset, target) <= 0
                            ):
                                ahead = None
                            if ahead is None:
                                self._ask(engine)
                        else:
                            self._careful = False
        finally:
            with self._guard:
                self._engine = None
            engine.close()

    def _pruned_history(self, offset: Any) -> list[str]:
        """Remove schema-history records that are not needed from `offset` on; return the others."""
        stored = self._spool.history()
        if offset is not None and len(needed := current_records(stored, offset)) < len(stored):
            self._spool.replace_history(needed)
            stored = needed
        return stored

    def _take(
        self,
        batch: Batch,
        taking: _Taking,
        history: list[str],
        columns: Sequence[Columns],
        *,
        replaces: bool,
        complete: bool,
    ) -> bool:
        """Put a batch into the spool. Return whether the snapshot is complete."""
        taken = _Taken([(table, TRUNCATION) for table in sorted(self._tables)] if replaces else [])
        waiting = iter(columns)
        for line, event in zip(batch.lines, batch.events, strict=True):
            if event.described:
                found = next(waiting)
                if found.table in self._tables:
                    taken.columns.append((found.table, found.description, len(taken.changes)))
                    if self._rereading is not None and complete:
                        self._rereading.look()
                        self._unread = self._rereading.pending
            if event.operation in CHANGES and event.table in self._tables:
                taken.moment = event.milliseconds
                if taking.again:
                    taking.again -= 1
                    continue
                taken.changes.append((event.table, line))
                if event.operation == "t" and not taking.whole:  # DDL commits by itself
                    self._mark(taken, event.transaction or self._transaction)
            elif event.operation == "END":
                right = self._settled(event, complete=complete)
                if taking.ends(event, self._name, taken.marked, len(taken.changes)) or right:
                    self._mark(taken, event.transaction or "", event.milliseconds)
                if self._rereading is not None and event.offset is not None and complete:
                    self._read(taken, self._rereading, event)
            elif event.operation == "BEGIN":
                # The rest of a transaction begins again after a restart inside it.
                if not taking.whole and (not event.transaction or event.transaction != self._transaction):
                    self._mark(taken, "")
                self._transaction = event.transaction or ""
            elif event.operation == "ddl":
                self._follow(taken, event, streaming=complete)
            elif event.notification in _COMPLETED and not complete:
                complete = True
                self._mark(taken, "")
                taking.at(event)
            elif event.notification.startswith(_INCREMENTAL):
                self._progress(taken, event)
        if self._rereading is not None:
            taken.state |= {"rereading": self._rereading.stored(), "unread": self._rereading.pending}
        partition, offset = taking.place(batch.events[-1], len(taken.changes) - taken.marked)
        self._spool.append(
            taken.changes,
            taken.marks,
            partition=partition,
            offset=offset,
            history=history,
            columns=taken.columns,
            complete=complete,
            moment=taken.moment,
            **taken.state,
        )
        return complete

    def _settled(self, event: Event, *, complete: bool) -> bool:
        """Return whether all rows that were read beside the changes are right at the end of a transaction."""
        if self._rereading is None or event.offset is None or not complete:
            return False
        right = self._rereading.settle(self._database.offset(event.offset))
        self._unread = self._rereading.pending
        return right

    def _read(self, taken: _Taken, rereading: Rereading, event: Event) -> None:
        """Store rows that are read beside the changes, after the end of a transaction."""
        found = rereading.pages(self._database.offset(event.offset))
        for table, description, lines in found:
            if description is None:
                taken.changes.append((table, TRUNCATION))
            else:
                taken.columns.append((table, description, len(taken.changes)))
                taken.changes += [(table, line) for line in lines]
        self._unread = rereading.pending
        if found:
            self._mark(taken, "")

    def _mark(self, taken: _Taken, transaction: str, milliseconds: int = 0) -> None:
        moment = milliseconds or taken.moment
        self._named = transaction or self._named
        taken.marks.append(Mark(len(taken.changes), self._named, moment, whole=not self._unread))

    def _follow(self, taken: _Taken, event: Event, *, streaming: bool) -> None:
        """Apply a statement to captured tables, and select the tables to be read again."""
        for change in msgspec.json.decode(event.after):
            table = table_of(change)
            before = self._definitions.get(table)
            if table in self._tables:
                self._definitions[table] = change["table"]
                taken.state["definitions"] = self._definitions
            if not streaming:
                continue
            for each in sorted(renamed_tables(event.notification, table) & self._tables - {table}):
                taken.changes.append((each, TRUNCATION))  # its name now belongs to another table or to none
                self._definitions[each] = None
            if table not in self._tables:
                continue
            effect = effect_of(event.notification, change, before)
            if effect is Effect.REPLACE:
                taken.changes.append((table, TRUNCATION))
            if effect is not Effect.NOTHING and change["table"] is not None:
                _logger.info("%s is read again after %s", table, event.notification[:200])
                self._unread.append(table)
                taken.state["unread"] = self._unread
        self._mark(taken, self._transaction)

    def _progress(self, taken: _Taken, event: Event) -> None:
        """Record which tables were read beside the changes.

        Raises CaptureEnded or CaptureLost if one could not be read.
        """
        if event.notification == _SCANNED:
            facts = msgspec.json.decode(event.after)
            table, status = facts.get("scanned_collection", ""), facts.get("status", "")
            if status not in ("SUCCEEDED", "EMPTY"):
                self._failed[table] += 1
                self._careful = True
                words = f"the rows of {table} could not be read beside its changes: {status}; its log says why"
                # For example, a key with a zero date can never be compared with the key of the next part.
                raise (CaptureLost if self._failed[table] >= _READ_TRIES else CaptureEnded)(words)
            del self._failed[table]
            for names in (self._unread, self._asked):
                if table in names:
                    names.remove(table)
            taken.state["unread"] = self._unread
        self._mark(taken, "")

    def _ask(self, engine: Engine) -> None:
        """Signal the engine to read the rows of tables that were not requested yet. It accepts one signal a second."""
        missing = self._merge()
        if missing:
            self._asked += missing
            tables = [regex_of(each) for each in missing]
            engine.signal("execute-snapshot", {"type": "incremental", "data-collections": tables})

    def _merge(self) -> list[str]:
        """Return the tables to request. One reading suffices for all statements since a table was last requested."""
        missing = list(Counter(self._unread) - Counter(self._asked))
        self._unread = [*self._asked, *missing]
        return missing

    def _wait_for_room(self, complete: bool) -> None:
        """Wait while the spool is full, if lanes have changes to pass.

        A snapshot and a transaction are unbounded, since nothing of them leaves the spool before they are complete.
        """
        while complete and not self._stop.is_set():
            now = self._spool.standing()
            if now.bytes <= self._max_bytes or not self._spool.has_before(now.high):
                return
            self._stop.wait(_FULL_PAUSE)


def ask_for_snapshot(settings: Settings, flow: str, group: str) -> None:
    """Make the capture of a flow with this consumer group take a new snapshot at its engine's next start.

    A capture that stopped with a loss starts it within a minute. With a meta store, its worker is asked on whichever
    machine it runs; if none does, the note is stored where the next one finds it. Raises InvalidArgument if the flow
    has captured nothing, StreamBusy if one starts meanwhile, DeadlineExceeded, MetaUnavailable, MetaAmbiguous.
    """
    folder = spool_folder(settings, group)
    if not settings.meta_store or is_fed_here(folder):
        note_snapshot(folder)
        return
    with suppress(FlowNotRunning):
        ask(settings, flow, "snapshot", {})
        return
    shared = shared_spool(settings, group)
    assert shared is not None, "there is a meta store"
    if not shared.read() and not (folder / FILE).exists():
        shared.close()
        raise _nothing(group)
    with Spool(folder, write=True, shared=shared) as spool:
        spool.note(**{SNAPSHOT: True})


def note_snapshot(folder: Path) -> None:
    """Make the capture into `folder`, of this machine, take a snapshot. Raises InvalidArgument if there is none."""
    if not (folder / FILE).exists():
        raise _nothing(folder.name)
    with Spool(folder) as spool:
        spool.note(**{SNAPSHOT: True})


def _nothing(group: str) -> InvalidArgument:
    return InvalidArgument(f"nothing was captured for the consumer group {group!r}: start its flow first")


def is_loss(error: Exception) -> bool:
    """Return whether a capture that ended with `error` can continue only with a new snapshot."""
    if isinstance(error, CaptureLost):
        return True
    said = str(error).lower()
    return isinstance(error, CaptureEnded) and (any(words in said for words in _LOST) or bool(_NO_SLOT.search(said)))


class _Taking:
    """The position of a running engine, if it continues only after whole transactions."""

    def __init__(self, now: Standing, database: Database) -> None:
        self._database = database
        self.whole = database.whole_transactions
        self.begun = False
        """Whether a batch was stored."""
        self.again = now.next - now.high if self.whole and now.complete else 0
        """Changes in the spool that will be repeated: they belong to a partly read transaction."""
        self._open = self.again > 0
        """Whether the spool ends inside a transaction."""
        self._partition, self._offset = now.partition, now.offset

    def ends(self, event: Event, name: str, marked: int, count: int) -> bool:
        """Process the end of a transaction; return whether it has changes, or changes do not matter.

        `marked` of the batch's changes, `count` so far, are before its newest mark. Raises CaptureLost if the
        transaction has fewer changes than were read of it before.
        """
        if self.again:
            raise CaptureLost(f"{name}: a transaction that was read in part now has {self.again} fewer changes")
        self.at(event)
        found = not self.whole or self._open or count > marked
        self._open = False
        return found

    def at(self, event: Event) -> None:
        """Note that no transaction is open after an event."""
        if self.whole and event.offset is not None:
            self._partition, self._offset = event.partition, self._database.offset(event.offset)

    def place(self, last: Event, behind: int) -> tuple[Any, Any]:
        """Return the position from which the engine continues after a batch with `behind` changes after its newest
        mark."""
        self.begun = True
        self._open |= behind > 0
        return (self._partition, self._offset) if self.whole else (last.partition, last.offset)


def _history_key(record: str) -> str:
    """Return a key that is equal for two records of one statement at one position of the log."""
    found = json.loads(record)
    position = {name: value for name, value in found.get("position", {}).items() if name != "ts_sec"}
    changes = [each.get("id") for each in found.get("tableChanges", ())]
    return json.dumps([position, found.get("databaseName"), found.get("ddl"), changes], sort_keys=True)
