"""Files and commits of Delta tables without a JVM: Parquet that is durable before it is named, and the fenced commit.

:class:`FileSink` writes attempt-unique Parquet files (millrace.tables.parquet_file) and describes each as a
:class:`FileAction` (plain data, which crosses from a task to the driver). :func:`commit` is the one way the flusher
commits: for each app id it checks that the table still stands at the version the work was planned from, and commits from
that same snapshot; on a conflict it refreshes and checks again; an app id that moved is CommitFenced, and nothing of the
call is in the table then.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, RemoveAction, Transaction

from millrace.errors import CommitFenced, DeadlineExceeded, TableDamaged
from millrace.failpoint import hit
from millrace.tables.delta_log import TABLE_COMMITS, commit_lease, last_checkpoint, trim
from millrace.tables.fsync import make_folder, sync
from millrace.tables.parquet_file import REPAIR, ParquetFile, Written

COMPRESSION: Final = "snappy"
MAX_FILE_BYTES: Final = 256 << 20
"""A file is closed once it holds about this many bytes of Arrow columns."""

MAX_STAT_CHARACTERS: Final = 64
"""Longer strings stay out of the log: a cut maximum would prune what is there."""

ATTEMPTS: Final = 200
"""Conflicts that one commit bears; each means that another writer got through."""

CHECKPOINT_COMMITS: Final = 50
"""Commits between two Delta checkpoints: what opening and refreshing a table costs grows with the commits since."""

_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Checkpoints and clean-up are done here, under rules of our own (millrace.tables.delta_log)."""


@dataclass(frozen=True, slots=True)
class FileAction:
    """One durable Parquet file that waits for its commit."""

    path: str
    """Relative to the table."""
    size: int
    rows: int
    partition: dict[str, str]
    stats: str
    written_ms: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        return cls(**value)

    def add_action(self, *, data_change: bool = True) -> AddAction:
        return AddAction(self.path, self.size, self.partition, self.written_ms, data_change, self.stats)


@dataclass(slots=True)
class FileSink:
    """Writes rows of one table into files named for this attempt, one at a time for each set of partition values."""

    table_path: Path
    schema: pa.Schema
    """Columns of the files: those of the table without its partition columns."""
    stats_columns: tuple[str, ...]
    """Columns whose min and max go into the Delta log, so that readers prune by them."""
    actions: list[FileAction] = field(default_factory=list)
    _open: dict[tuple[tuple[str, str], ...], _OpenFile] = field(default_factory=dict)

    def write(self, rows: pa.Table, partition: Mapping[str, str]) -> None:
        """Add `rows` (of ``schema``) to the partition's file."""
        key = tuple(partition.items())
        file = self._open.get(key)
        if file is None:
            file = self._open[key] = _OpenFile.create(self.table_path, self.schema, partition)
        file.file.write(rows)
        file.bytes += rows.nbytes
        if file.bytes >= MAX_FILE_BYTES:
            self.actions.append(self._open.pop(key).close(self.stats_columns))

    def finish(self) -> list[FileAction]:
        """Close and fsync what is open; the actions of all files."""
        for file in self._open.values():
            self.actions.append(file.close(self.stats_columns))
        self._open.clear()
        return self.actions

    def abort(self) -> None:
        """Remove what was written."""
        for file in self._open.values():
            file.file.discard()
        self._open.clear()
        drop_files(self.table_path, self.actions)
        self.actions.clear()


@dataclass(slots=True)
class _OpenFile:
    relative: str
    partition: dict[str, str]
    file: ParquetFile
    bytes: int = 0

    @classmethod
    def create(cls, table_path: Path, schema: pa.Schema, partition: Mapping[str, str]) -> Self:
        folder = "/".join(f"{name}={value}" for name, value in partition.items())
        relative = f"{folder}/part-{uuid.uuid4()}.parquet" if folder else f"part-{uuid.uuid4()}.parquet"
        file = ParquetFile(table_path / relative, schema, options={"compression": COMPRESSION})
        return cls(relative, dict(partition), file)

    def close(self, stats_columns: Sequence[str]) -> FileAction:
        made = self.file.close()
        rows = made.footer.num_rows
        return FileAction(self.relative, made.size, rows, self.partition, _stats(made, stats_columns), made.written_ms)


def _stats(made: Written, columns: Sequence[str]) -> str:
    """The Delta statistics of a file: rows, min and max of `columns` where its footer has them."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for name, (low, high) in made.bounds(columns).items():
        if not isinstance(high, str) or max(len(low), len(high)) <= MAX_STAT_CHARACTERS:
            least[name], most[name] = low, high
    return json.dumps({"numRecords": made.footer.num_rows, "minValues": least, "maxValues": most, "nullCount": {}})


def drop_files(table_path: Path, actions: Sequence[FileAction]) -> None:
    """Remove files that no commit will ever name. Only the attempt that wrote them may, and only if it was fenced."""
    for action in actions:
        (table_path / action.path).unlink(missing_ok=True)


def open_table(path: Path, *, version: int | None = None) -> DeltaTable | None:
    """The table at `path` (pinned to `version`, or as it is now); None where there is none. Raises TableDamaged."""
    try:
        return DeltaTable(str(path), version=version)
    except TableNotFoundError:
        return None
    except DeltaError as error:
        if version is not None:
            raise
        raise TableDamaged(
            f"the log of the table {path} does not read ({error}): restore it from a backup, or remove a collection's table"
            " and run the operation recovery, which makes it anew"
        ) from error


def create_table(
    path: Path, schema: pa.Schema, *, partition_by: Sequence[str], configuration: Mapping[str, str] | None = None
) -> DeltaTable:
    """The table at `path`, created if there is none; of several creators at once, all get the one that won."""
    table = open_table(path)
    if table is not None:
        return table
    make_folder(path)
    try:
        DeltaTable.create(
            str(path),
            schema,
            mode="ignore",
            partition_by=list(partition_by),
            configuration=configuration,
            raise_if_key_not_exists=False,
        )
    except CommitFailedError:
        # Another process created it in between; its table is as good as ours.
        pass
    return DeltaTable(str(path))


@dataclass(frozen=True, slots=True)
class AppMove:
    """One app transaction of a commit: the version the work was planned from (None: none yet), and the new one."""

    base: int | None
    version: int


class Fenced(CommitFenced):
    """Which app ids moved (or which files went); and whether a commit that names the new files was tried: they may stand."""

    def __init__(self, app_ids: Sequence[str], *, attempted: bool) -> None:
        super().__init__(f"{', '.join(app_ids)} moved since this was planned: another writer committed; plan anew")
        self.app_ids = tuple(app_ids)
        self.attempted = attempted


def commit(
    table: DeltaTable,
    actions: Sequence[FileAction],
    *,
    moves: Mapping[str, AppMove],
    removes: Sequence[RemoveAction] = (),
    data_change: bool = True,
    seam: Callable[[str], None] = hit,
) -> int:
    """Commit `actions`, `removes` and `moves` as one, made durable; the table's version. `table` is then at that version.

    Without `data_change` the added files hold the rows of the removed ones again. Raises Fenced where an app id is not at
    its base, or a file of `removes` is no longer part of the table: nothing of this call is in the table then. Each refresh
    is followed by the check; none stands between check and commit, and delta-rs is allowed no retry of its own.
    """
    path = Path(table.table_uri.removeprefix("file://"))
    adds = [action.add_action(data_change=data_change) for action in actions]
    with commit_lease(path):
        table.update_incremental()
        version = _commit(table, path, adds, moves, removes, seam)
    if version - last_checkpoint(path) >= CHECKPOINT_COMMITS:
        table.create_checkpoint()
        seam("flush.checkpointed")
        trim(path, keep=TABLE_COMMITS)
    return version


def _commit(
    table: DeltaTable,
    path: Path,
    adds: Sequence[AddAction],
    moves: Mapping[str, AppMove],
    removes: Sequence[RemoveAction],
    seam: Callable[[str], None],
) -> int:
    for attempt in range(ATTEMPTS):
        moved = [app_id for app_id, move in moves.items() if table.transaction_version(app_id) != move.base]
        moved += _gone(table, removes)
        if moved:
            if attempt and adds and _holds(table, adds):
                return int(table.version())  # the attempt that seemed to fail did not
            raise Fenced(moved, attempted=attempt > 0)
        checked = int(table.version())
        seam("flush.checked")
        try:
            table.create_write_transaction(
                [*adds, *removes],
                "append",
                table.schema(),
                partition_by=table.metadata().partition_columns,
                commit_properties=CommitProperties(
                    max_commit_retries=0,
                    app_transactions=[Transaction(app_id, move.version) for app_id, move in moves.items()],
                ),
                post_commithook_properties=_HOOKS,
            )
        except CommitFailedError:
            table.update_incremental()
            if int(table.version()) == checked:
                raise  # nobody was first: it is the storage, or the commit itself
            continue
        sync(path / "_delta_log" / f"{checked + 1:020d}.json")
        sync(path / "_delta_log")
        table.update_incremental()
        return int(table.version())
    raise DeadlineExceeded(
        f"{ATTEMPTS} commits to {table.table_uri} met another writer's; its files stay where they are"
    )


def _holds(table: DeltaTable, adds: Sequence[AddAction]) -> bool:
    live = live_files(table)
    return all(add.path in live for add in adds)


def _gone(table: DeltaTable, removes: Sequence[RemoveAction]) -> list[str]:
    if not removes:
        return []
    live = live_files(table)
    return [remove.path for remove in removes if remove.path not in live]


def live_files(table: DeltaTable) -> dict[str, int]:
    """Live files at the version of `table`, relative to it, with their sizes in bytes."""
    actions = pa.table(table.get_add_actions())
    return dict(zip(map(unquote, actions["path"].to_pylist()), actions["size_bytes"].to_pylist(), strict=True))


def require_files(table: DeltaTable, path: Path) -> None:
    """Raises TableDamaged where a live file of `table`, which lies at `path`, is missing."""
    missing = [name for name in live_files(table) if not (path / name).exists()]
    if missing:
        raise TableDamaged(
            f"{len(missing)} files of the table {path} are missing, one is {missing[0]}: {REPAIR}", missing=True
        )
