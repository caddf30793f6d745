"""Copies the ingress log into a backup, from the entry that the pinned tables need to its end.

The ends are read at a moment without DDL under way: the coordinator's file takes no writes, and is copied then. The
copy thus knows all DDL, terms and producer epochs of the log before its end, since they are stored before they are
appended. And whatever the copy calls acknowledged lies before that end. A restored coordinator and a restored log
therefore match.

Logs in the data folder are copied. For a log on brokers or in another folder, the backup only records where it ended.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.base.errors import LogBusy
from millrace.base.log_backends import is_in_data_folder
from millrace.base.settings import Settings
from millrace.client.consume.positions import FilePositions, reset_file_id
from millrace.coord.catalog.database import detach_from_shared
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.consumer_positions import read_group_positions
from millrace.log.generations.generation_file import FILE, GenerationFile, Generations, span_of
from millrace.log.generations.log import backend_position
from millrace.log.protocol import LogService
from millrace.log.rocksmq.channel_copy import plan_copy, verify_copy, write_copy_manifest
from millrace.log.rocksmq.manifest import encode_file_name
from millrace.message.ids import LogId
from millrace.node.retention.truncation import truncation_limit
from millrace.operations.backup.files import BackupFiles
from millrace.operations.backup.manifest import BackedUpChannel
from millrace.operations.backup.table_pins import PinnedTable
from millrace.storage.table import open_table, table_at
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.table import WalPosition, WalTable

COORDINATOR_DB: Final = "coord/coord.db"
CONSUMERS_DB: Final = "coord/consumers.db"


@dataclass(frozen=True, slots=True)
class CopiedLog:
    """What a backup contains of the log."""

    channels: dict[str, BackedUpChannel]
    incarnations: dict[str, int]
    included: bool


def copy_log(
    settings: Settings,
    service: LogService,
    pinned: Mapping[str, PinnedTable],
    files: BackupFiles,
    *,
    at_ends: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> CopiedLog:
    """Copy the coordinator's file, the consumers' positions and the log. The caller must prevent removals.

    The ends are read inside of `at_ends`.

    Raises LogBusy while the log's backend is being switched, and what the log raises.
    """
    log, folder = settings.log_path, settings.log_path.relative_to(settings.data_dir)
    generations = _settled(GenerationFile(log, settings.log))
    # Copy positions before reading the ends: the log then has everything that a consumer has read.
    copy_consumers(settings, files)
    _take_groups(log, folder, generations, files)
    _ends(service)  # start the server and open all logs before the coordinator has to wait
    with at_ends():
        ends = _cut(settings, service, files)
    if _settled(GenerationFile(log, settings.log)) != generations:
        raise LogBusy("the log was switched to another backend during the backup: make the backup again")
    if (log / FILE).exists():
        files.copy(log / FILE, f"{folder}/{FILE}")
    positions, checkpoints = _positions(pinned)
    channels, incarnations, included = {}, {}, True
    for name, end in ends.items():
        position = positions.get(name, WalPosition(0, name))
        checkpoint = checkpoints.get(name)
        needed = truncation_limit(position, checkpoint)
        for place, begin, stop in _spans(log, generations, name, needed, end):
            if place is None:
                included = False
                continue
            target = place.relative_to(settings.data_dir) / "channels" / encode_file_name(name)
            incarnations[str(target)] = _take_channel(
                place / "channels" / encode_file_name(name), str(target), begin, stop, files
            )
        channels[name] = BackedUpChannel(
            tick=position.last_tick,
            flushed_tick=0 if checkpoint is None else checkpoint.time_tick,
            position="" if position.position is None else str(position.position),
            begin="" if needed is None else str(needed),
            end=str(end),
        )
    return CopiedLog(channels, incarnations, included)


def copy_consumers(settings: Settings, files: BackupFiles) -> None:
    """Copy the consumers' positions, always in the file format of a single node.

    A restored deployment reads that file (millrace.coord.consumer_positions).
    """
    if not settings.meta_store:
        copy_database(settings.data_dir / CONSUMERS_DB, CONSUMERS_DB, files, changed=reset_file_id)
        return
    groups = read_group_positions(settings)
    with tempfile.TemporaryDirectory() as folder:
        with closing(FilePositions(Path(folder))) as file:
            for group, ticks in groups.items():
                file.move(group, ticks)
        copy_database(Path(folder) / Path(CONSUMERS_DB).name, CONSUMERS_DB, files)


def copy_database(
    source: Path, name: str, files: BackupFiles, *, changed: Callable[[sqlite3.Connection], None] = lambda db: None
) -> None:
    """Copy an SQLite file that others write to, as of one moment, and apply `changed` to the copy.

    Does nothing if there is no such file.
    """
    if not source.exists():
        return
    target = files.prepare_path(name)
    place = f"{source.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(place, uri=True)) as read, closing(sqlite3.connect(target)) as write:
        read.backup(write)
        changed(write)
        write.execute("pragma journal_mode=delete")  # a single file, without a journal beside it
    files.add_written(name)


def _settled(file: GenerationFile) -> Generations:
    found = file.generations
    if any(not item.closed for item in found.items[:-1]):
        raise LogBusy(
            "the log is being switched to another backend: finish that (millrace log switch), then make the backup"
        )
    return found


def _ends(service: LogService) -> dict[str, LogId]:
    found = {}
    for name in service.names():
        log = service.open(name)
        try:
            found[name] = log.describe().end
        finally:
            log.close()
    return found


def _cut(settings: Settings, service: LogService, files: BackupFiles) -> dict[str, LogId]:
    """Return the end of each log. The coordinator's file is copied meanwhile and takes no writes."""
    path = settings.data_dir / COORDINATOR_DB
    if not path.exists():
        return _ends(service)
    store = CatalogStore(path)
    try:
        with store.transaction():
            ends = _ends(service)
            copy_database(path, COORDINATOR_DB, files, changed=detach_from_shared)
    finally:
        store.close()
    return ends


def _positions(pinned: Mapping[str, PinnedTable]) -> tuple[dict[str, WalPosition], dict[str, Checkpoint]]:
    """Return the positions of WAL and flusher in the pinned versions, by PChannel."""
    positions: dict[str, WalPosition] = {}
    checkpoints: dict[str, Checkpoint] = {}
    if "wal" in pinned:
        wal = WalTable(table_at(pinned["wal"].uri, version=pinned["wal"].version))
        positions = wal.positions(wal.pchannels())
    if "checkpoints" in pinned:
        found = pinned["checkpoints"]
        checkpoints = read_checkpoints(open_table(found.uri, version=found.version))
    return positions, checkpoints


def _spans(
    log: Path, generations: Generations, pchannel: str, needed: LogId | None, end: LogId
) -> list[tuple[Path | None, int | None, int]]:
    """Return a span per generation: (folder, first entry, end).

    The folder is None unless an embedded log in the data folder. The first entry is None if the span starts at its
    first.
    """
    span = span_of(generations, pchannel, found=generations.newest)
    first = span.first if needed is None else max(span.first, needed.generation)
    found = []
    for number in range(first, span.current + 1):
        place = embedded_folder(log, generations.items[number].url, number)
        stop = backend_position(end) if number == span.current else span.ends[number]
        begin = backend_position(needed).entry if needed is not None and needed.generation == number else None
        found.append((place, begin, stop.entry))
    return found


def embedded_folder(log: Path, url: str, generation: int) -> Path | None:
    """Return the folder of a generation's embedded log if it lies in the data folder, or None."""
    if not is_in_data_folder(url):
        return None
    return log if generation == 0 else log / f"generation-{generation}"


def _take_groups(log: Path, folder: Path, generations: Generations, files: BackupFiles) -> None:
    """Copy the positions of the log's own consumer groups.

    Each is a 1 KB file with two slots, of which a torn copy leaves one valid.
    """
    for number, item in enumerate(generations.items):
        place = embedded_folder(log, item.url, number)
        if place is None or not (place / "groups").is_dir():
            continue
        for path in sorted((place / "groups").glob("*/*")):
            files.copy(path, str(folder / path.relative_to(log)))


def _take_channel(source: Path, name: str, begin: int | None, end: int, files: BackupFiles) -> int:
    """Copy one channel and return its incarnation."""
    plan = plan_copy(source, begin=begin, end=end)
    same = (
        files.earlier_manifest is not None
        and files.earlier_manifest.incarnations.get(name) == plan.manifest.incarnation
    )
    for part in plan.files:
        target = f"{name}/{part.path.name}"
        # In the same incarnation of the channel, the bytes up to here never change.
        if not (same and files.reuse_here(target, part.bytes)):
            files.copy(part.path, target, size=part.bytes)
    directory = files.prepare_path(f"{name}/manifest").parent
    verify_copy(directory, plan)
    write_copy_manifest(directory, plan)
    files.add_written(f"{name}/manifest")
    files.flush()
    return plan.manifest.incarnation
