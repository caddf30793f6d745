"""Run the engine beside a flow's tasks, put what it reads into the spool, and restart it after growing pauses."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import CaptureEnded, CaptureLost, DeadlineExceeded, MillraceError
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.sources.capture.engine import Batch, Columns, Engine, Event, History
from millrace.flows.sources.capture.spool import Mark, Spool, Standing
from millrace.runtime.supervisor import RestartBackoff

CHANGES: Final = frozenset("cudrt")
_COMPLETED: Final = frozenset({"Initial Snapshot: COMPLETED", "Initial Snapshot: SKIPPED"})
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_FULL_PAUSE: Final = 0.2
_LOST: Final = (
    "no longer available on the server",
    "purged",
    "could not find first log file",
    "replication slot",
    "replica identity full",
)
"""Words of an engine whose database has removed what comes after its offset."""

_logger: Final = logging.getLogger(__name__)


class Database:
    """What a feeder asks about the database of its engine. This one leaves everything to the engine."""

    whole_transactions = False
    """Whether the engine continues after a whole transaction only, and so reads the last part of one again."""

    def before_engine(self, now: Standing) -> Mapping[str, str]:
        """Called before each start of the engine; without an offset, the engine begins a snapshot.

        Returns properties of this start, besides those of all.
        Raises CaptureLost if the database does not have the changes after the offset any more, InvalidSettings,
        LogUnavailable.
        """
        return {}

    def before_change(self, now: Standing) -> None:
        """Called with the engine's first batch after a start, before it is taken. Raises as `before_engine`."""

    def offset(self, offset: Any) -> Any:
        """Return what the engine continues from, made of the offset after a whole transaction."""
        return offset


class Feeder(Closeable):
    """Feeds the spool in `folder` until it is closed. Raises StreamBusy if another process does."""

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
    ) -> None:
        self._settings, self._folder = settings, folder
        self._database = database or Database()
        self._tables, self._properties = frozenset(tables), properties
        self._name = ", ".join(tables) if len(tables) < 4 else f"{tables[0]} and {len(tables) - 1} more"
        self._max_bytes, self._again = max_bytes, snapshot_again
        self._spool = Spool(folder, write=True)
        self._stop = threading.Event()
        self._engine: Engine | None = None
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    @property
    def engine_pid(self) -> int | None:
        """The engine's process; None between two of them."""
        with self._guard:
            return None if self._engine is None else self._engine.pid

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._stop.set()
        with self._guard:
            engine = self._engine
        if engine is not None:
            engine.close()
        self._thread.join()
        self._spool.close()

    def wait_complete(self, seconds: float) -> None:
        """Wait for the end of the snapshot. Raises DeadlineExceeded, which has the engine's last error."""
        end = Deadline.after(seconds)
        with Spool(self._folder) as spool:
            while not spool.standing().complete:
                if not end.pause(0.1):
                    error = spool.standing().error
                    raise DeadlineExceeded(f"the snapshot of {self._name} did not end within {seconds:.0f} s. {error}")

    def _run(self) -> None:
        backoff = RestartBackoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not self._stop.is_set():
            try:
                self._capture()
            except (MillraceError, OSError, sqlite3.Error, msgspec.MsgspecError) as error:
                if self._stop.is_set():
                    return
                with suppress(sqlite3.Error):  # a full disk stores no reason either; the log has it
                    self._spool.note(error=str(error))
                lost = isinstance(error, CaptureLost) or (
                    isinstance(error, CaptureEnded) and any(words in str(error).lower() for words in _LOST)
                )
                if lost and self._again:
                    _logger.warning("%s: %s; a new snapshot begins", self._name, error)
                    self._spool.begin_epoch()
                    continue
                backoff.record_failure(str(error))
                pause = backoff.remaining_pause()
                words = "declare on_loss: snapshot, to read the table anew" if lost else f"again in {pause:.0f} s"
                _logger.warning("%s: %s (%s)", self._name, error, words)
                self._stop.wait(pause)

    def _capture(self) -> None:
        """Run the engine until it ends or this is closed. Raises what the engine does."""
        now = self._spool.standing()
        if now.offset is None or not now.complete:
            self._spool.begin_epoch()  # the engine cannot continue a snapshot
            now = self._spool.standing()
        engine = Engine(
            self._settings,
            {**self._properties, **self._database.before_engine(now)},
            log_file=self._folder / "engine.log",
            partition=now.partition,
            offset=now.offset,
            history=self._spool.history(),
        )
        with self._guard:
            self._engine = engine  # closed by `close` from now on; before, by the loop's condition
        replaces = now.epoch > 1 and not now.complete
        history: list[str] = []
        columns: list[Columns] = []
        complete = now.complete
        taking = _Taking(now, self._database)
        try:
            while not self._stop.is_set():
                match engine.read():
                    case History(record):
                        history.append(record)
                    case Columns() as description:
                        columns.append(description)
                    case batch:
                        if not taking.begun:
                            self._database.before_change(now)
                        self._wait_for_room(complete)
                        complete |= self._take(batch, taking, history, columns, replaces=replaces, complete=complete)
                        replaces = False
                        history, columns = [], []
                        hit("capture.spooled")
                        engine.acknowledge()
        finally:
            with self._guard:
                self._engine = None
            engine.close()

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
        changes: list[tuple[str, bytes]] = []
        if replaces:  # what an earlier snapshot gave
            changes += [(table, b'{"o":"t"}') for table in sorted(self._tables)]
        marks: list[Mark] = []
        described: list[tuple[str, dict[str, Any], int]] = []
        waiting = iter(columns)
        moment = 0
        for line, event in zip(batch.lines, batch.events, strict=True):
            if event.described:
                found = next(waiting)
                if found.table in self._tables:
                    described.append((found.table, found.description, len(changes)))
            if event.operation in CHANGES and event.table in self._tables:
                moment = event.milliseconds
                if taking.again:
                    taking.again -= 1
                    continue
                changes.append((event.table, line))
                if event.operation == "t" and not taking.whole:  # DDL commits by itself
                    marks.append(Mark(len(changes), event.transaction or "", moment))
            elif event.operation == "END":
                if taking.ends(event, self._name, marks[-1].number if marks else 0, len(changes)):
                    marks.append(Mark(len(changes), event.transaction or "", event.milliseconds or moment))
            elif event.operation == "BEGIN" and not taking.whole and (not marks or marks[-1].number < len(changes)):
                marks.append(Mark(len(changes), "", moment))
            elif event.notification in _COMPLETED and not complete:
                complete = True
                marks.append(Mark(len(changes), "", moment))
                taking.at(event)
        partition, offset = taking.place(batch.events[-1], len(changes) - marks[-1].number if marks else len(changes))
        self._spool.append(
            changes,
            marks,
            partition=partition,
            offset=offset,
            history=history,
            columns=described,
            complete=complete,
            moment=moment,
        )
        return complete

    def _wait_for_room(self, complete: bool) -> None:
        """Wait while the spool is full. A snapshot has no bound: nothing of it leaves the spool before it is whole."""
        while complete and not self._stop.is_set() and self._spool.standing().bytes > self._max_bytes:
            self._stop.wait(_FULL_PAUSE)


class _Taking:
    """The place of a running engine, if it continues after whole transactions only."""

    def __init__(self, now: Standing, database: Database) -> None:
        self._database = database
        self.whole = database.whole_transactions
        self.begun = False
        """Whether a batch was taken."""
        self.again = now.next - now.high if self.whole and now.complete else 0
        """Changes that are in the spool and come again: they are of a transaction that was taken in part."""
        self._open = self.again > 0
        """Whether the spool ends inside of a transaction."""
        self._partition, self._offset = now.partition, now.offset

    def ends(self, event: Event, name: str, marked: int, count: int) -> bool:
        """Note the end of a transaction; return whether it has changes, or changes do not matter.

        `marked` of the batch's changes, `count` until now, are before its newest mark. Raises CaptureLost if the
        transaction has fewer changes than were taken of it.
        """
        if self.again:
            raise CaptureLost(f"{name}: a transaction that was read in part has {self.again} changes fewer now")
        self.at(event)
        found = not self.whole or self._open or count > marked
        self._open = False
        return found

    def at(self, event: Event) -> None:
        """Note that no transaction is open after an event."""
        if self.whole and event.offset is not None:
            self._partition, self._offset = event.partition, self._database.offset(event.offset)

    def place(self, last: Event, behind: int) -> tuple[Any, Any]:
        """Return from where the engine continues after a batch that has `behind` changes after its newest mark."""
        self.begun = True
        self._open |= behind > 0
        return (self._partition, self._offset) if self.whole else (last.partition, last.offset)
