"""Moves the tables of a running deployment to another place: a disk, or an object store.

The log stays where it is, so producers notice nothing. What pauses is what writes tables: node, flusher, publisher,
operations and flows, from the moment in which the tables are closed until their processes have started again.

1. **Claim.** The target must be empty. `_moving.json` there, put if absent, says whose it is.
2. **Copy**, while everything runs: each table at a version, by the code of backups, and again what came meanwhile,
   until little comes. Every file is read back and compared by SHA-256 (millrace.operations.move.files).
3. **Close.** `_moved.json` in the old place and the record say that nothing is written there any more. Then each table
   is closed, in the order of a backup (millrace.storage.closing), and copied at its last version; journals of lanes are
   claimed and copied; staged files of loads that were appended before are copied.
4. **Switch.** The record names the target (millrace.base.settings.place). One write, so the tables are at one place or
   the other.

A move that was killed is run again and continues. The record names the run that makes the move; the lock of the machine
excludes no run on another one. A run whose name is no longer there stops, whatever it slept through: it looks before
each table that it closes, before a file if the last look is a second ago, and before it removes anything. The switch is
conditional. Since a table is closed by a commit, the target holds all that was ever committed to it, even if
a run was suspended meanwhile. Nothing of the old place is removed before a person asks (`remove_old`).

Failpoints: ``move.claimed``, ``move.file`` before each file, ``move.pass`` after each pass, ``move.closing``,
``move.closed`` after each table, ``move.copied``, ``move.switched``, ``move.removing``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from millrace.base.errors import BackupBusy, MoveRefused, TableDamaged
from millrace.base.failpoint import hit
from millrace.base.files import make_folder
from millrace.base.scratch_folder import ScratchFolder
from millrace.base.settings import Settings
from millrace.base.settings.place import TablesPlace
from millrace.coord.clock import SystemClock
from millrace.coord.cluster_file import is_cluster
from millrace.coord.cluster_level import require_level
from millrace.coord.machine.settings import COPY_SECONDS
from millrace.coord.machine.tables_place import change_place, reading_place
from millrace.coord.store_factory import open_cluster_store
from millrace.flows.sinks.collection.lane import LANES, close_lane
from millrace.flows.sources.capture.shared_spool import FOLDER as SPOOLS
from millrace.flows.sources.capture.shared_spool import move_spools
from millrace.flows.spark_host.incarnations import streams_below
from millrace.node.retention.removal_lock import removals_blocked
from millrace.operations.backup.deployment_id import ensure_deployment_id
from millrace.operations.backup.files import FileGone, exclusive_lock
from millrace.operations.backup.run import STAGED, WAIT_SECONDS, take_staged_files
from millrace.operations.backup.table_pins import PinnedTable, pin_tables, tables_to_pin
from millrace.operations.coverage import Coverage
from millrace.operations.move.declaration import MoveParams
from millrace.operations.move.files import MovedFiles, MoveJournal
from millrace.operations.operation import OperationReport, counted, mebibytes
from millrace.operations.roots import (
    check_uri_within,
    check_within,
    move_root_names,
    move_roots,
    started_by_launcher,
)
from millrace.runtime.progress import Progress
from millrace.storage.closing import MOVED_MARK, close_table, reopen_table
from millrace.storage.delta_log import LOG_FOLDER, boot_seconds, log_files, version_of
from millrace.storage.local import LocalStore
from millrace.storage.pins import TablePins
from millrace.storage.published import PublishedTable
from millrace.storage.store import TableStore, conditional, list_below, require_conditional_puts, store_at
from millrace.storage.table import open_table
from millrace.tables.collections.layout import (
    has_earlier_layout,
    published_name,
    record_layout,
    stored_collection_ids,
)

DEPLOYMENT_MARK: Final = "_deployment.json"
"""File at a place that tables were moved to. It says whose they are."""
MOVING_MARK: Final = "_moving.json"
"""File at the target of a move until it ends. It says whose it is."""
LOCK: Final = ".move.lock"
JOURNAL: Final = "move.jsonl"
LOG_LIST: Final = "log"
"""Folder of the list of the log's backends (millrace.log.generations.shared_list)."""
CLOSE_BYTES: Final = 16 << 20
"""Bytes that came during a pass, up to which the next one closes the tables."""
PASSES: Final = 8
"""Passes while everything runs. After them the tables are closed, however much comes."""
_ATTEMPTS: Final = 5
"""Tries of a pass in which a file was removed meanwhile."""
_LOOK_SECONDS: Final = 1.0
"""Seconds for which a run that was named by the record needs not look again."""
_THREADS: Final = 4
_PINS: Final = "pins"
TABLE_FOLDERS: Final = (
    "bases", "checkpoints", SPOOLS, "deletes", "derived", LANES, "pipelines", "pipelines-out", _PINS, "quality",
    "recovery_checkpoints", "segments", STAGED, "tables", "wal", "wal_trims",
)  # fmt: skip
"""Folders of a data folder in which tables lie, beside other files."""


class MoveReport(OperationReport):
    """Tables that were moved, or would be."""

    source: str = Field(description="Where the tables were.")
    target: str = Field(description="Where they are now.")
    dry_run: bool
    tables: int
    files: int
    bytes: int
    passes: int = Field(default=0, description="Times that the tables were looked through; the last time closed.")
    closed_seconds: float = Field(
        default=0.0, description="Time from closing the first table to the switch. Nothing was flushed in it."
    )
    digest: str = Field(
        default="",
        description="SHA-256 over name, size and SHA-256 of every file: equal in the old place and in the new one.",
    )
    removed_files: int = Field(default=0, description="Files that were removed from earlier places, or would be.")
    seconds: float

    @property
    def sentence(self) -> str:
        if self.removed_files:
            verb = "would be" if self.dry_run else "were"
            return f"{counted(self.removed_files, 'file')} {verb} removed from where the tables were."
        what = f"{counted(self.tables, 'table')} in {counted(self.files, 'file')}, {mebibytes(self.bytes)}"
        if self.dry_run:
            return f"A move to {self.target} would copy {what}."
        if not self.passes:
            return f"The tables are at {self.target}."
        return f"{what} are at {self.target} now. Nothing was flushed for {self.closed_seconds:.1f} s."


def run(settings: Settings, params: MoveParams, progress: Progress) -> MoveReport:
    """Run the operation.

    Raises:
    - MoveRefused if the target has files, belongs to another deployment, or lacks space, or another move is unfinished
    - StoreCannotPublish if the target cannot put a file only if its name is free
    - BackupBusy if another move, or a backup, runs on this machine
    - TableUnavailable, and what the stores raise: run it again
    """
    started = time.monotonic()
    make_folder(settings.run_path)
    busy = "another move of these tables is under way on this machine: wait until it is done"
    with exclusive_lock(settings.run_path / LOCK, busy=busy), reading_place(settings) as read:
        place = read()
        settings = replace(settings, tables=place.uri)
        if params.remove_old:
            report = _remove_old(settings, place, params, progress)
        elif params.cancel:
            report = _cancel(settings, place, _Mover(settings, read), params)
        else:
            to = _target(settings, place, params)
            report = _Move(settings, place, to, _Mover(settings, read), progress).run(dry_run=params.dry_run)
    return report.model_copy(update={"seconds": round(time.monotonic() - started, 3)})


def _target(settings: Settings, place: TablesPlace, params: MoveParams) -> str:
    """Return the value of the setting `tables` that the parameters name. Raises MoveRefused."""
    if not params.to:
        if place.target is None:
            raise MoveRefused("there is no unfinished move: name the target of the tables (to)")
        return place.target
    to = "" if store_at(params.to).uri == store_at(settings.data_dir).uri else params.to.removeprefix("file://")
    if place.target not in (None, to):
        raise MoveRefused(
            f"a move to {_named(settings, place.target)} is unfinished: run that again, or give it up (--cancel)"
        )
    if to == place.uri:
        return to
    here, there = f"{settings.tables_uri}/", f"{to or settings.data_dir}/"
    if to and place.uri and (here.startswith(there) or there.startswith(here)):
        raise MoveRefused(f"{to} and the tables at {settings.tables_uri} lie in each other: choose another place")
    if to.startswith("/") and f"{to}/".startswith(f"{settings.data_dir}/"):
        raise MoveRefused(f"{to} lies in the data folder: name the data folder itself, or a place outside of it")
    if to and started_by_launcher():
        if "://" in to:
            check_uri_within(to, move_root_names(settings), setting="move_roots")
        else:
            check_within(to, move_roots(settings), setting="move_roots")
    return to


@dataclass(frozen=True, slots=True)
class _Copied:
    """Findings of one pass, and the files it sent."""

    tables: int
    files: int
    bytes: int
    sent_bytes: int
    digest: str


class _Mover:
    """The run that the record names: of several on different machines, the last one that took the move over."""

    def __init__(self, settings: Settings, read: Callable[[], TablesPlace]) -> None:
        self._settings = settings
        self._read = read
        self._name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._looked = 0.0

    def take_over(self, check: Callable[[TablesPlace], TablesPlace]) -> TablesPlace:
        """Name this run in the record that `check` returns for the one that is there; `check` may raise."""
        return change_place(self._settings, lambda place: replace(check(place), mover=self._name))

    def change(self, change: Callable[[TablesPlace], TablesPlace]) -> TablesPlace:
        """Change the record. Raises MoveRefused if it names another run by now."""

        def checked(place: TablesPlace) -> TablesPlace:
            self._require_named(place)
            return change(place)

        return change_place(self._settings, checked)

    def check(self, *, within: float = 0.0) -> None:
        """Raise MoveRefused if the record names another run; do not look if it was looked at `within` seconds, by a
        clock that counts the time for which the machine slept. Thread-safe.
        """
        with self._lock:
            begun = boot_seconds()
            if begun - self._looked >= within:
                self._require_named(self._read())
                self._looked = begun

    def is_cancelled(self) -> bool:
        """Return whether no move is under way any more, and the tables are where they were."""
        place = self._read()
        return place.target is None and place.uri == self._settings.tables

    def _require_named(self, place: TablesPlace) -> None:
        if place.mover != self._name:
            raise MoveRefused(
                "a run on another machine has continued or cancelled this move, so this run stops: see what that one"
                " reports"
            )


class _Move:
    """One run of a move, from the beginning or from where a killed one ended."""

    def __init__(self, settings: Settings, place: TablesPlace, to: str, mover: _Mover, progress: Progress) -> None:
        self._source, self._place, self._to, self._mover, self._progress = settings, place, to, mover, progress
        self._target = replace(settings, tables=to)
        self._from = store_at(settings.tables_uri)
        self._there = store_at(self._target.tables_uri)
        self._is_data_folder = not to
        self._deployment = ""

    def run(self, *, dry_run: bool) -> MoveReport:
        if self._to == self._place.uri:
            self._clean_up()
            return self._report(_Copied(0, 0, 0, 0, ""))
        if has_earlier_layout(self._source):
            raise MoveRefused(
                f"the tables of {self._source.tables_uri} have the layout of an earlier build: restore a backup of it"
                " into a new place, and move that"
            )
        self._progress.update("looking at the tables")
        planned = self._plan()
        self._deployment = ensure_deployment_id(self._source)
        claimed = self._place.target == self._to or self._there.read(MOVING_MARK) == self._mark
        if not claimed:
            self._check_target()
        self._check_space(planned.bytes)
        if dry_run:
            return self._report(planned, dry_run=True)
        require_level(self._source, 2, "moves of the tables")
        self._claim()
        journal = MoveJournal(_journal_path(self._source), self._target.tables_uri)
        with journal:
            if not self._is_data_folder:
                journal.seed(set(list_below(self._there)) - {MOVING_MARK, DEPLOYMENT_MARK})
            passes = self._copy(journal)
            closed = time.monotonic()
            self._close()
            copied = self._pass(journal, closing=True)
            hit("move.copied")
            self._switch()
            seconds = time.monotonic() - closed
        hit("move.switched")
        self._clean_up()
        return self._report(copied, passes=passes + 1, closed_seconds=round(seconds, 3))

    def _report(self, copied: _Copied, **more: Any) -> MoveReport:
        return MoveReport(
            source=self._source.tables_uri,
            target=self._target.tables_uri,
            tables=copied.tables,
            files=copied.files,
            bytes=copied.bytes,
            digest=copied.digest,
            seconds=0.0,
            **{"dry_run": False, **more},
        )

    def _plan(self) -> _Copied:
        pinned = pin_tables(self._source, None, _uncovered(self._source))
        sizes = [size for each in pinned.values() for size in each.files.values()]
        published = sum(1 for _ in _published_stores(self._source))
        return _Copied(len(pinned) + published, len(sizes), sum(sizes), 0, "")

    # --- the target --------------------------------------------------------------------------------------------------

    @property
    def _mark(self) -> bytes:
        return json.dumps({"deployment": self._deployment, "from": self._place.uri, "to": self._to}).encode()

    def _check_target(self) -> None:
        """Raise MoveRefused unless the target is free, and StoreCannotPublish unless it has conditional puts."""
        owner = _deployment_at(self._there)
        if owner not in ("", self._deployment):
            raise MoveRefused(f"{self._there.uri} has the tables of another deployment ({owner}): choose another place")
        if self._is_data_folder:
            used = [*tables_to_pin(self._target), *(name for name, _ in _published_stores(self._target))]
        else:
            used = [*self._there.folders(), *self._there.list("")]
        if owner and used == [MOVING_MARK]:
            return  # a claim of this deployment that was killed before the record named the place
        if MOVED_MARK in used or (owner and used):
            raise MoveRefused(
                f"{self._there.uri} still has the tables that an earlier move left there: remove them first"
                " (millrace operations move --remove-old)"
            )
        if used:
            raise MoveRefused(f"{self._there.uri} has files ({', '.join(used[:3])}): choose a place that is empty")
        require_conditional_puts(self._there)

    def _check_space(self, size: int) -> None:
        if not isinstance(self._there, LocalStore):
            return
        folder = next(each for each in (self._there.folder, *self._there.folder.parents) if each.exists())
        copied = {} if self._is_data_folder else list_below(self._there)
        free = shutil.disk_usage(folder).free + sum(copied.values())
        if free < size:
            raise MoveRefused(
                f"{self._there.uri} has room for {mebibytes(free)}, but the tables have {mebibytes(size)}: make room,"
                " or choose another place"
            )

    def _claim(self) -> None:
        if not conditional(self._there).put_if_absent(MOVING_MARK, self._mark):
            found = self._there.read(MOVING_MARK)
            if _deployment_at(self._there) != self._deployment:
                raise MoveRefused(
                    f"another move to {self._there.uri} is unfinished ({(found or b'').decode()}): choose another place"
                )
            if found != self._mark:
                self._there.replace(MOVING_MARK, self._mark)

        def begin(place: TablesPlace) -> TablesPlace:
            if place.uri != self._place.uri or place.target not in (None, self._to):
                raise MoveRefused("another move of these tables began meanwhile: look at it first")
            return replace(place, target=self._to)

        self._mover.take_over(begin)
        hit("move.claimed")

    def _clean_up(self) -> None:
        self._there.delete([MOVING_MARK])
        _journal_path(self._source).unlink(missing_ok=True)

    # --- copying -----------------------------------------------------------------------------------------------------

    def _copy(self, journal: MoveJournal) -> int:
        """Copy what there is until little comes, while everything runs. Returns the number of passes."""
        passes = 0
        while not self._place.closed and passes < PASSES:
            copied = self._pass(journal, closing=False)
            passes += 1
            hit("move.pass")
            if copied.sent_bytes <= CLOSE_BYTES:
                break
        return passes

    def _pass(self, journal: MoveJournal, *, closing: bool) -> _Copied:
        for attempt in range(_ATTEMPTS):
            scratch = ScratchFolder(self._source.run_path / "moves" / uuid.uuid4().hex, pattern="[0-9a-f]{32}")
            files = MovedFiles(scratch.path, target=self._there, journal=journal)
            try:
                if closing:
                    with removals_blocked(self._source, deadline=WAIT_SECONDS):
                        return self._last(files)
                return self._take(files, close=lambda store, published: None)
            except FileGone:
                if attempt + 1 == _ATTEMPTS:
                    raise
            finally:
                scratch.discard()
        raise AssertionError

    def _last(self, files: MovedFiles) -> _Copied:
        """Close the tables and copy what they hold then. Nothing else is at the target afterwards."""

        def close(store: TableStore, published: bool) -> int | None:
            self._mover.check()
            version = close_table(store, published=published)
            hit("move.closed")
            return version

        copied = self._take(files, close=close, lanes=True)
        surplus = files.surplus()
        # After the tables were read: what is missing there was not removed by another run that has switched meanwhile.
        self._mover.check()
        self._there.delete(surplus)
        files.journal.forget(surplus)
        if isinstance(self._there, LocalStore):
            record_layout(self._target)
        self._there.replace(DEPLOYMENT_MARK, json.dumps({"deployment": self._deployment}).encode())
        return copied

    def _take(
        self, files: MovedFiles, *, close: Callable[[TableStore, bool], int | None], lanes: bool = False
    ) -> _Copied:
        wanted: dict[str, Callable[[], object]] = {}
        published: dict[str, PublishedTable] = {}
        for name, store in _published_stores(self._source):
            with store.lease():
                table = PublishedTable.open(store, version=close(store, True))
                if table is None:
                    continue
                published[name] = table
                for part in log_files(store):
                    if version_of(part) <= table.version:
                        files.copy_table_file(store, part, name)
                for file, live in table.named_files().items():
                    wanted[f"{name}/{file}"] = partial(files.take_file, store, file, name, required=live)
        pinned = pin_tables(self._source, files, _uncovered(self._source), at=lambda uri: close(store_at(uri), False))
        for each in pinned.values():
            store = store_at(each.uri)
            take = partial(files.link_table_file, store)
            wanted |= {f"{each.name}/{file}": partial(take, file, each.name, size) for file, size in each.files.items()}
        self._send(files, list(wanted.values()))
        files.flush()
        take_staged_files(self._source, files, outside=store_at(self._target.staged_uri).uri)
        files.flush()
        if lanes:
            self._take_lanes(files)
            self._take_spools(files)
            self._take_log_list(files)
            self._compare(pinned, published)
        return _Copied(
            len(pinned) + len(published),
            len(files.stored),
            sum(each.size for each in files.stored.values()),
            files.sent_bytes,
            _digest(files),
        )

    def _send(self, files: MovedFiles, wanted: list[Callable[[], object]]) -> None:
        def take(each: Callable[[], object]) -> None:
            self._mover.check(within=_LOOK_SECONDS)
            each()

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="move") as pool:
            for number, _ in enumerate(pool.map(take, wanted)):
                if number % 100 == 0:
                    self._progress.step("copying the tables", number, len(wanted), bytes=files.sent_bytes)

    def _take_lanes(self, files: MovedFiles) -> None:
        """Claim the journal of each lane of a flow, so that its worker sends nothing that is not copied here."""
        for flow in store_at(self._source.table_uri(LANES)).folders():
            store = conditional(store_at(self._source.table_uri(f"{LANES}/{flow}")))
            for lane in store.folders():
                newest = close_lane(store, lane)
                if newest is not None:
                    files.take_file(store, f"{lane}/{newest}", f"{LANES}/{flow}")

    def _take_spools(self, files: MovedFiles) -> None:
        """Copy the spools of captures that machines share. `_close` took them from their owners."""
        for group in store_at(self._source.table_uri(SPOOLS)).folders():
            store = store_at(self._source.table_uri(f"{SPOOLS}/{group}"))
            for name in store.list(""):
                files.take_file(store, name, f"{SPOOLS}/{group}")

    def _take_log_list(self, files: MovedFiles) -> None:
        """Copy the list of the log's backends, which lies beside tables in an object store."""
        if not isinstance(self._from, LocalStore) and not isinstance(self._there, LocalStore):
            for name in list_below(self._from, LOG_LIST):
                files.take_file(self._from, name, "")

    def _compare(self, pinned: Mapping[str, PinnedTable], published: Mapping[str, PublishedTable]) -> None:
        """Open each table at the target: it must be at the version of its source, with the same files."""
        for name, table in published.items():
            there = PublishedTable.open(store_at(self._target.table_uri(name)))
            if there is None or there.version != table.version or dict(there.files) != dict(table.files):
                raise TableDamaged(f"the copy of {table.uri} is not at version {table.version}: run the move again")
        for each in pinned.values():
            copy = open_table(self._target.table_uri(each.name))
            if copy is None or copy.version != each.version or copy.live_files() != each.files:
                raise TableDamaged(f"the copy of {each.uri} is not at version {each.version}: run the move again")

    # --- the switch --------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._progress.update("closing the tables")
        self._mover.check()
        mark = {"deployment": self._deployment, "to": self._to, "at": datetime.now(UTC).isoformat()}
        self._from.replace(MOVED_MARK, json.dumps(mark).encode())
        try:
            self._mover.change(lambda place: replace(place, closed=True))
        except MoveRefused:
            if self._mover.is_cancelled():
                self._from.delete([MOVED_MARK])
            raise
        if self._source.meta_store:
            with open_cluster_store(self._source, SystemClock()) as meta:
                move_spools(meta, self._source.tables_uri, self._target.tables_uri)
        hit("move.closing")
        if is_cluster(self._source):
            time.sleep(2 * COPY_SECONDS)  # until the other machines know it, and begin no load

    def _switch(self) -> None:
        self._progress.update("switching")

        def switched(place: TablesPlace) -> TablesPlace:
            earlier = [each for each in place.earlier if each not in (self._to, place.uri)]
            return TablesPlace(self._to, (*earlier, self._place.uri))

        self._mover.change(switched)


def _cancel(settings: Settings, place: TablesPlace, mover: _Mover, params: MoveParams) -> MoveReport:
    """Let the tables stay where they are. Raises MoveRefused if no move is unfinished."""

    def unfinished(found: TablesPlace) -> TablesPlace:
        if found.target is None or found.uri != place.uri:
            raise MoveRefused("no move is unfinished: there is nothing to cancel")
        return found

    unfinished(place)
    if not params.dry_run:
        place = mover.take_over(unfinished)  # a run on another machine stops
    assert place.target is not None
    target = replace(settings, tables=place.target)
    there, journal = store_at(target.tables_uri), _journal_path(settings)
    with MoveJournal(journal, target.tables_uri) as copied:
        if place.target:
            copied.seed(list_below(there))
        names = sorted({*copied.files, MOVING_MARK, DEPLOYMENT_MARK})
        if not params.dry_run:
            for _, store in _published_stores(settings):
                reopen_table(store, published=True)
            for name in tables_to_pin(settings):
                reopen_table(store_at(settings.table_uri(name)), published=False)
            if settings.meta_store:
                with open_cluster_store(settings, SystemClock()) as meta:
                    move_spools(meta, target.tables_uri, settings.tables_uri)
            store_at(settings.tables_uri).delete([MOVED_MARK])
            mover.change(lambda found: replace(found, closed=False))
            hit("move.cancelled")
            copied.withdraw(names)
            there.delete(names)
            mover.change(lambda found: replace(found, target=None, mover=""))
            journal.unlink(missing_ok=True)
    return MoveReport(
        source=settings.tables_uri, target=settings.tables_uri, dry_run=params.dry_run, tables=0, files=0, bytes=0,
        removed_files=len(names), seconds=0.0,
    )  # fmt: skip


def _remove_old(settings: Settings, place: TablesPlace, params: MoveParams, progress: Progress) -> MoveReport:
    """Remove the tables from earlier places, the oldest first.

    Raises MoveRefused while a move is unfinished, a place is not known to be this deployment's, or a stream has its
    checkpoint there, and BackupBusy while somebody reads there.
    """
    if place.target is not None:
        raise MoveRefused("a move is unfinished: run it again, or give it up (--cancel)")
    deployment, removed = ensure_deployment_id(settings), 0
    for uri in place.earlier:
        old = replace(settings, tables=uri)
        root = store_at(old.tables_uri)
        _check_marker(root, deployment, empty=not any(_files_to_remove(old, root)))
        if TablePins(old.pins_uri).oldest() is not None:
            raise BackupBusy(f"a reader or an operation still uses the tables at {root.uri}: try again when it is done")
        if left := streams_below(settings, old.tables_uri):
            raise MoveRefused(
                f"the checkpoints of streams lie at {root.uri}: {', '.join(left)}. A stream takes its own along when it"
                " starts: start each once, then try again"
            )
        progress.update(f"removing the tables at {root.uri}")
        for names in _files_to_remove(old, root):
            removed += len(names)
            if not params.dry_run:
                root.delete(names)
                hit("move.removing")
        if not params.dry_run:
            if isinstance(root, LocalStore):
                _remove_empty_folders(root.folder, keep=not uri)
            root.delete([DEPLOYMENT_MARK, MOVED_MARK])
            change_place(settings, partial(_without, uri))
    return MoveReport(
        source=settings.tables_uri, target=settings.tables_uri, dry_run=params.dry_run, tables=0, files=0, bytes=0,
        removed_files=removed, seconds=0.0,
    )  # fmt: skip


def _without(uri: str, place: TablesPlace) -> TablesPlace:
    return replace(place, earlier=tuple(each for each in place.earlier if each != uri))


def _check_marker(root: TableStore, deployment: str, *, empty: bool) -> None:
    """Raise MoveRefused unless a move of this deployment left the place."""
    if empty and root.size(MOVED_MARK) is None:
        return  # a removal that was killed before the record forgot the place
    try:
        owner = json.loads(root.read(MOVED_MARK) or b"{}").get("deployment", "")
    except ValueError:
        owner = ""
    if owner != deployment:
        raise MoveRefused(
            f"{root.uri} has no {MOVED_MARK} of this deployment ({deployment}), so nothing is removed there: remove it"
            " by hand, and put that file there to let the deployment forget the place"
        )


def _files_to_remove(old: Settings, root: TableStore) -> Iterator[list[str]]:
    """Yield the files of each table, its log last: a removal that was killed finds the rest again."""
    seen: set[str] = set()
    names = [*tables_to_pin(old), *(name for name, _ in _published_stores(old))]
    for name in sorted(set(names), key=len, reverse=True):  # the rows of a published table lie below it
        found = [each for each in list_below(root, name) if _is_of_table(each) and each not in seen]
        seen.update(found)
        yield [each for each in found if f"/{LOG_FOLDER}/" not in each]
        yield [each for each in found if f"/{LOG_FOLDER}/" in each]
    for name in (STAGED, LANES, SPOOLS, _PINS) if not old.tables else ("",):
        yield [each for each in list_below(root, name) if each not in {DEPLOYMENT_MARK, MOVED_MARK, *seen}]


def _is_of_table(name: str) -> bool:
    """Return whether a file below a table's folder is the table's: in a data folder, others lie there too."""
    last = name.rpartition("/")[2]
    return f"/{LOG_FOLDER}/" in name or "/_vectors/" in name or last.endswith(".parquet") or last == "_commits.lock"


def _remove_empty_folders(folder: Path, *, keep: bool) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        inside = Path(path).relative_to(folder).parts
        if not keep or (inside and inside[0] in TABLE_FOLDERS):
            with suppress(OSError):
                os.rmdir(path)


def _deployment_at(root: TableStore) -> str:
    """Return the id of the deployment whose tables lie there since a move; "" if unknown."""
    for mark in (DEPLOYMENT_MARK, MOVING_MARK, MOVED_MARK):
        with suppress(ValueError, AttributeError):
            if found := json.loads(root.read(mark) or b"{}").get("deployment"):
                return str(found)
    return ""


def _published_stores(settings: Settings) -> Iterator[tuple[str, TableStore]]:
    """Yield name and store of each published table."""
    for number in stored_collection_ids(settings, "rows"):
        name = published_name(settings, number)
        store = store_at(settings.table_uri(name))
        if store.exists():
            yield name, store


def _journal_path(settings: Settings) -> Path:
    return settings.data_dir / "coord" / JOURNAL


def _uncovered(settings: Settings) -> Coverage:
    return Coverage.load(settings, "move", ignore=True)


def _digest(files: MovedFiles) -> str:
    found = hashlib.sha256()
    for name, stored in sorted(files.stored.items()):
        found.update(f"{name}\0{stored.size}\0{stored.sha256}\n".encode())
    return found.hexdigest()


def _named(settings: Settings, tables: str | None) -> str:
    return tables or str(settings.data_dir)
