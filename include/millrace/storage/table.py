"""A handle on one Delta table at one version; opening and creating tables; maintenance of their logs after commits.

A handle accumulates what it has seen since it was opened, and a refresh costs as much as the commits since the last
Delta checkpoint. :func:`maintain_log` writes a checkpoint from time to time, trims the log (millrace.storage.delta_log)
and reopens the handle.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Field, PostCommitHookProperties, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from millrace.base.errors import TableDamaged, TableNotFound, TableUnavailable
from millrace.base.failpoint import hit
from millrace.storage.delta_log import (
    LAST_CHECKPOINT_FILE,
    LOG_FOLDER,
    checkpoint_file,
    commit_file,
    last_checkpoint_version,
    log_files,
    read_actions,
    read_app_versions,
    trim_log,
)
from millrace.storage.local import LocalStore
from millrace.storage.log_mirror import LogMirror, announce, announced, is_mirrored, mirror_of
from millrace.storage.parquet_file import (
    RowGroupFilter,
    dataset,
    open_file,
    read_file,
    read_filtered,
    read_rows,
    scan_rows,
    take_rows,
)
from millrace.storage.store import TableStore, store_at
from millrace.storage.torn_log import quarantine_torn_files

NO_COMMIT_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
""":func:`maintain_log` writes checkpoints and cleans up by its own rules."""

_SPILL_BYTES: Final = 1 << 30
"""Memory of a Z-order, beyond which it spills to disk."""
_APP_COMMITS: Final = 16
"""Commits from which a handle reads app versions one by one, before it asks delta-rs for each again."""

TOMBSTONES: Final = "delta.deletedFileRetentionDuration"
"""Table property: how long Delta checkpoints name a removed file. Each checkpoint, and so each opening, costs them all.

They serve VACUUM alone, which spares a file that was removed just now.
"""
DEFAULT_TOMBSTONES: Final = "interval 1 hours"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveFile:
    """One live file of a table as the Delta log describes it."""

    path: str
    size: int
    """Bytes on disk."""
    rows: int
    partition: Mapping[str, str]
    """Values of the partition columns, in the table's order."""
    low: Mapping[str, Any] = field(default_factory=dict)
    """Lower bounds of the requested columns. None if the log lacks one."""
    high: Mapping[str, Any] = field(default_factory=dict)
    """Upper bounds of the requested columns. None if the log lacks one."""


class TableHandle:
    """A table at one version. Not thread-safe, except reads of that version (:meth:`actions`, :meth:`app_version`)."""

    def __init__(self, store: TableStore, delta: DeltaTable, *, mirror: LogMirror | None = None) -> None:
        self.store = store
        self.delta = delta
        self._mirror = mirror
        """The log that `delta` is opened from, if that is not the store's own."""
        self._opened = self.version
        self._checkpointed: int | None = None
        self.replaced_from: int | None = None
        """First version whose replaced files may still be on disk, if that is known: the log keeps its entries from
        there on.
        """
        self._apps: tuple[int, dict[str, int | None]] = (-1, {})
        """A version of the table, and the app versions read at it so far."""
        self._actions: tuple[int, pa.Table] | None = None
        """A version of the table, and its live files."""

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def version(self) -> int:
        return int(self.delta.version())

    @property
    def partition_columns(self) -> list[str]:
        return self.delta.metadata().partition_columns

    @property
    def columns(self) -> list[str]:
        return [field.name for field in self.delta.schema().fields]

    @property
    def schema(self) -> pa.Schema:
        """The columns, including partition columns, with the types of our files (delta-rs returns view types)."""
        return pa.schema([plain_field(each) for each in pa.schema(self.delta.schema().to_arrow())])

    @property
    def configuration(self) -> dict[str, Any]:
        """The table's properties."""
        return self.delta.metadata().configuration

    def app_version(self, app_id: str) -> int:
        """Return the version of the last app transaction of `app_id`; 0 if there was none."""
        return self.find_app_version(app_id) or 0

    def find_app_version(self, app_id: str) -> int | None:
        """Return the version of the last app transaction of `app_id`; None if there was none.

        What is known is kept and moved on by the commits since, because delta-rs replays its log for each call.
        """
        version, (seen, known) = self.version, self._apps
        if seen != version:
            known = self._moved_apps(known, seen, version)
            self._apps = version, known
        if app_id not in known:
            known[app_id] = self.delta.transaction_version(app_id)
        return known[app_id]

    def _moved_apps(self, known: Mapping[str, int | None], seen: int, version: int) -> dict[str, int | None]:
        """Return the app versions at `version`, from those `known` at `seen`; none if that takes many commits."""
        found = dict(known)
        if not known or not seen < version <= seen + _APP_COMMITS:
            return {}
        for each in range(seen + 1, version + 1):
            moves = read_app_versions(self.store if self._mirror is None else self._mirror.log, each)
            if moves is None:
                return {}
            found |= moves
        return found

    def actions(self) -> pa.Table:
        """Return the live files: path, size_bytes, num_records, partition.* and min.*/max.* columns, as far as the log
        has them.

        Bounds with a character beyond the basic plane are left out. Any writer may write them as escaped surrogate
        pairs, which delta-rs (1.6) misreads (U+20000 as U+10000), so that a file with matching rows would be pruned.
        """
        known = self._actions
        if known is not None and known[0] == self.version:
            return known[1]
        version = self.version
        found = pa.table(self.delta.get_add_actions(flatten=True))
        for place, name in enumerate(found.column_names):
            if name.startswith(("min.", "max.")) and pa.types.is_string(found.schema.field(name).type):
                doubtful = pc.match_substring_regex(found[name], r"[\x{10000}-\x{10FFFF}]")
                found = found.set_column(place, name, pc.if_else(doubtful, None, found[name]))
        self._actions = version, found
        return found

    def live_files(self) -> dict[str, int]:
        """Return the live files, relative to the table, with their sizes in bytes."""
        actions = pa.table(self.delta.get_add_actions())
        return dict(zip(map(unquote, actions["path"].to_pylist()), actions["size_bytes"].to_pylist(), strict=True))

    def describe_files(self, bounds: Sequence[str] = ()) -> list[LiveFile]:
        """Return the live files, with the bounds of the columns `bounds`. Their order is the log's."""
        actions = self.actions()
        names = set(actions.column_names)

        def column(name: str) -> list[Any]:
            return actions[name].to_pylist() if name in names else [None] * actions.num_rows

        partition = {name: map(str, column(f"partition.{name}")) for name in self.partition_columns}
        partitions = zip(*partition.values(), strict=True) if partition else itertools.repeat(())
        lows = zip(*(column(f"min.{name}") for name in bounds), strict=True) if bounds else itertools.repeat(())
        highs = zip(*(column(f"max.{name}") for name in bounds), strict=True) if bounds else itertools.repeat(())
        return [
            LiveFile(
                path,
                size,
                self._count_rows(path) if rows is None else rows,
                dict(zip(partition, values, strict=True)),
                dict(zip(bounds, low, strict=True)),
                dict(zip(bounds, high, strict=True)),
            )
            for path, size, rows, values, low, high in zip(
                column("path"), column("size_bytes"), column("num_records"), partitions, lows, highs, strict=False
            )
        ]

    def _count_rows(self, name: str) -> int:
        with self.open_file(name) as parquet:
            return int(parquet.metadata.num_rows)

    def history(self, limit: int) -> list[dict[str, Any]]:
        """Return the commit infos of the last `limit` commits, newest first."""
        delta = self.delta if self._mirror is None else self.store.delta(self.version)  # a mirror may lack old ones
        return delta.history(limit)

    def dataset(self) -> ds.Dataset:
        """Return the table's rows as a dataset for pyarrow and DuckDB.

        delta-rs' own dataset treats a column without bounds as null throughout.
        """
        schema, partitions = self.schema, set(self.partition_columns)
        folders = pa.schema([each for each in schema if each.name in partitions])
        return dataset(self.store, self.live_files(), schema, partitioning=ds.partitioning(folders, flavor="hive"))

    def file_uris(self, predicate: str | None = None) -> list[str]:
        """Return URIs as :meth:`files` does, for readers that know nothing of the table."""
        uris = self.delta.file_uris(file_pruning_predicate=predicate)
        return uris if self._mirror is None else [f"{self.uri}/{name}" for name in self._relative(uris)]

    def files(self, predicate: str) -> list[str]:
        """Return live files that `predicate` (SQL over partition columns and bounds) does not exclude, relative to the
        table.
        """
        return self._relative(self.delta.file_uris(file_pruning_predicate=predicate))

    def _relative(self, uris: Iterable[str]) -> list[str]:
        root = self.delta.table_uri.removeprefix("file://").rstrip("/") + "/"
        return [unquote(uri.removeprefix("file://").removeprefix(root)) for uri in uris]

    def not_live(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are not live files."""
        wanted = list(names)
        if not wanted:
            return []
        paths = pa.table(self.delta.get_add_actions())["path"]
        found = pc.is_in(pa.array(wanted, pa.utf8()), paths.cast(pa.utf8())).to_pylist()
        if all(found):
            return []
        live = self.live_files()
        return [name for name in wanted if name not in live]

    def open_file(
        self, name: str, *, read_dictionary: Sequence[str] | None = None
    ) -> AbstractContextManager[pq.ParquetFile]:
        """Open one of its files for reading. Raises TableDamaged."""
        return open_file(self.store, name, read_dictionary=read_dictionary)

    def read(self, name: str) -> pa.Table:
        """Return all rows of one of its files. Raises TableDamaged."""
        return read_file(self.store, name)

    def take_rows(self, name: str, positions: npt.NDArray[np.int64], *, columns: Sequence[str]) -> tuple[pa.Table, int]:
        """Return the rows at `positions` (ascending) of one of its files, and the number of rows that were read.

        Reads only the row groups that have some of them. Raises TableDamaged.
        """
        return take_rows(self.store, name, positions, columns=columns)

    def read_rows(
        self,
        names: Iterable[str],
        schema: pa.Schema,
        *,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        groups: RowGroupFilter | None = None,
    ) -> pa.Table:
        """Return rows of some of its files, with the columns of `schema`. Raises TableDamaged."""
        return read_rows(self.store, names, schema, columns=columns, where=where, groups=groups)

    def read_filtered(
        self,
        names: Iterable[str],
        schema: pa.Schema,
        *,
        columns: Sequence[str],
        filter_columns: Sequence[str],
        keep: Callable[[pa.Table], npt.NDArray[np.bool_]],
    ) -> pa.Table:
        """Return the rows of some of its files that `kept` accepts by the columns `looked_at`. Raises TableDamaged."""
        return read_filtered(self.store, names, schema, columns=columns, filter_columns=filter_columns, keep=keep)

    def scan_rows(
        self,
        names: Iterable[str],
        schema: pa.Schema,
        *,
        columns: Sequence[str],
        where: pc.Expression | None,
        batch_rows: int,
        groups: RowGroupFilter | None = None,
        hidden: Mapping[str, npt.NDArray[np.int64]] = MappingProxyType({}),
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of some of its files, batch by batch, except those at `hidden` positions. Raises TableDamaged."""
        return scan_rows(
            self.store,
            names,
            schema,
            columns=columns,
            where=where,
            batch_rows=batch_rows,
            groups=groups,
            hidden=hidden,
        )

    def is_newest(self) -> bool:
        """Return whether this is the newest version and still exists."""
        return self.store.size(commit_file(self.version + 1)) is None and self.follows()

    def missing_columns(self, wanted: pa.Schema) -> tuple[list[Field], dict[str, tuple[str, str]]]:
        """Return the columns of `wanted` that the table lacks, or has as non-nullable where `wanted` is nullable.

        Also returns, by name, (type here, type wanted) of columns whose type differs.
        """
        there = self.delta.schema().fields
        have = {field.name: field.type for field in there}
        strict = {field.name for field in there if not field.nullable}
        fields = Schema.from_arrow(wanted).fields
        differing = {
            field.name: (str(have[field.name]), str(field.type))
            for field in fields
            if have.get(field.name, field.type) != field.type
        }
        lacking = [each for each in fields if each.name not in have or (each.nullable and each.name in strict)]
        return lacking, differing

    def unnamed_files(self, hours: int, *, full: bool) -> list[str]:
        """Return the files that no version of the last `hours` names. `full`: also those that no log ever named."""
        with _answering(self.uri):
            return self._own_delta().vacuum(hours, dry_run=True, enforce_retention_duration=False, full=full)

    def vacuum(self, hours: int, *, full: bool, spare: Set[str] = frozenset()) -> list[str]:
        """Delete the :meth:`unnamed_files` that are not in `spare`. Returns their names."""
        with _answering(self.uri), self.store.lease():
            self.refresh()
            if spare:  # delta-rs has no option for it
                doomed = [name for name in self.unnamed_files(hours, full=full) if name not in spare]
                self.store.delete(doomed)
                return doomed
            found = self._own_delta().vacuum(
                hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=full,
                post_commithook_properties=NO_COMMIT_HOOKS,
            )
            self._announce()
            self.refresh()
            return found

    def zorder(self, columns: Sequence[str]) -> None:
        """Order the whole table by columns. Raises TableUnavailable if another writer interfered."""
        with _answering(self.uri), self.store.lease():
            self.refresh()
            delta = self._own_delta()
            delta.optimize.z_order(
                list(columns), max_spill_size=_SPILL_BYTES, post_commithook_properties=NO_COMMIT_HOOKS
            )
            self._announce()
            self.refresh()

    def _announce(self) -> None:
        """Tell the processes of this machine of a commit that delta-rs made by itself."""
        if self._mirror is not None:
            announce(self.uri)

    def compact(self, partitions: list[tuple[str, str, Any]]) -> None:
        """Compact small files. Raises TableUnavailable if another writer interfered."""
        with _answering(self.uri), self.store.lease():
            self.refresh()
            delta = self._own_delta()
            delta.optimize.compact(partition_filters=partitions, post_commithook_properties=NO_COMMIT_HOOKS)
            self._announce()
            self.refresh()

    def _own_delta(self) -> DeltaTable:
        """Return the table at this version as delta-rs opens it in the store, for operations on its data files."""
        return self.delta if self._mirror is None else self.store.delta(self.version)

    def refresh(self) -> None:
        """Go to the newest version. Nearly free if this is it, since versions have no gaps."""
        with _answering(self.uri):
            if self._mirror is None:
                if not self.is_newest():
                    self.delta.update_incremental()
                return
            newest = self._mirror.pull(self.version)
            if newest is None:
                self.delta = self._mirror.load()
                self._opened = self.version
            elif newest != self.version:
                self.delta.update_incremental()

    def poll(self) -> None:
        """Go to the newest version that a commit of this machine announced, for callers that look again and again.

        On an object store, commits of machines that are not heard are seen within a tenth of the time since the last
        one, at most millrace.storage.log_mirror.IDLE_SECONDS, or HEARD_SECONDS. Elsewhere the same as :meth:`refresh`.
        """
        if self._mirror is None or self._mirror.has_news(self.version):
            self.refresh()

    def follows(self) -> bool:
        """Return whether the log still has this version, so that a commit from it can take only the next one.

        Costs no request if it was the newest a moment ago, on a store that keeps each entry for longer than that.
        """
        return (self._mirror is not None and self._mirror.seen_newest()) or self.version_exists()

    def write(self, attempt: Callable[[], None]) -> None:
        """Run `attempt`, which commits the version after this one with delta-rs.

        Raises DeltaError, OSError: it may have been committed, unless another's commit took the version.
        """
        if self._mirror is None:
            attempt()
            return
        version = self.version
        committed = False
        try:
            attempt()  # writes the entry into the mirror
            committed = self._mirror.push(version + 1)
            if not committed:
                raise CommitFailedError(f"version {version + 1} of {self.uri} is taken")
        finally:
            if not committed:  # the handle may have moved to the version that it wrote
                self.delta = self._mirror.reload(version)

    def advance(self) -> None:
        """Go to the version that :meth:`write` just committed, or a newer one."""
        if self._mirror is None:
            self.refresh()
            return
        with _answering(self.uri):
            self.delta.update_incremental()

    def last_checkpoint(self) -> int:
        """Return the version of the newest Delta checkpoint that is known; 0 if there is none."""
        return last_checkpoint_version(self.store) if self._mirror is None else self._mirror.base

    def write_checkpoint(self) -> None:
        """Write a Delta checkpoint of this version. Raises DeltaError, OSError."""
        self.delta.create_checkpoint()
        if self._mirror is not None:
            self._mirror.push_checkpoint(self.version)
        self.store.sync([checkpoint_file(self.version), LAST_CHECKPOINT_FILE])

    def version_exists(self) -> bool:
        """Return whether the log still has this version. Under the lease, a commit from it can then take only the next
        one.
        """
        return self.store.size(commit_file(self.version)) is not None

    def reopen(self) -> None:
        """Go to the newest version through the last Delta checkpoint, dropping what the handle has accumulated."""
        with _answering(self.uri):
            self.delta = self.store.delta() if self._mirror is None else self._mirror.load()
        self._opened = self.version


@contextmanager
def _answering(uri: str) -> Iterator[None]:
    """Translate errors of delta-rs and of the store."""
    try:
        yield
    except (DeltaError, OSError) as error:
        raise TableUnavailable(f"cannot reach the table {uri} ({error}): retry") from error


@contextmanager
def _reaching(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TableUnavailable(f"cannot reach the table {uri} ({error}): retry") from error


def plain_field(item: pa.Field) -> pa.Field:
    return pa.field(item.name, _plain_type(item.type), nullable=item.nullable)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.utf8()
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([plain_field(kind.field(place)) for place in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(plain_field(kind.value_field))
    return kind


def open_table(uri: object, *, version: int | None = None) -> TableHandle | None:
    """Open the table at `uri`, pinned to `version` or at its newest one; None if it does not exist.

    Moves aside what a power loss tore at the end of its log. Raises TableDamaged.
    """
    store = store_at(uri)
    mirror = mirror_of(store)
    try:
        if mirror is not None:
            with _reaching(store.uri):
                return TableHandle(store, mirror.load(version), mirror=mirror)
        return TableHandle(store, _delta(store, version))
    except TableNotFoundError:
        return None
    except DeltaError as error:
        if version is not None:
            raise TableUnavailable(f"cannot open version {version} of the table {store.uri} ({error})") from error
        raise TableDamaged(
            f"cannot read the log of the table {store.uri} ({error}): restore it from a backup, or remove a "
            "collection's table and run the operation recovery, which rebuilds it"
        ) from error


def _delta(store: TableStore, version: int | None) -> DeltaTable:
    try:
        return store.delta(version)
    except TableNotFoundError:
        raise
    except DeltaError:
        if not quarantine_torn_files(store):
            raise
        return store.delta(version)


class ChangeMark(NamedTuple):
    """A table's log as seen from outside, without opening it."""

    text: str
    """Differs after each commit."""
    settled: bool
    """Whether a commit from now on changes `text` for certain. Clocks of file systems tick every few milliseconds."""
    at: float
    """Time of the log's last change, in Unix seconds; the current time if the store does not say."""


SETTLE_SECONDS: Final = 2.0
"""Time after which the next change of a folder gets another timestamp, on file systems that store whole seconds too."""


def change_mark(uri: object) -> ChangeMark | None:
    """Return the mark of the table at `uri`, or None if there is none. Costs one look at its log's folder.

    Take it before the table is opened: a commit in between leaves an older mark, and the table counts as changed.
    """
    store = store_at(uri)
    if isinstance(store, LocalStore):
        found = store.folder_mark(LOG_FOLDER)
        return None if found is None else ChangeMark(found[0], time.time() - found[1] >= SETTLE_SECONDS, found[1])
    names = log_files(store)
    return ChangeMark(names[-1], settled=True, at=time.time()) if names else None


def announcement(uri: object) -> bytes | None:
    """Return a text that differs after a commit of this machine to the table at `uri`; None if none is announced.

    They are on object stores alone, where a look costs a request.
    """
    store = store_at(uri)
    return announced(store.uri) if is_mirrored(store) else None


def table_exists(uri: object) -> bool:
    """Return whether there is a table at `uri`."""
    return store_at(uri).exists()


def table_at(uri: object, *, version: int | None = None) -> TableHandle:
    """Open the table at `uri`, at its newest version or at `version`. Raises TableNotFound, TableDamaged."""
    table = open_table(uri, version=version)
    if table is None:
        raise TableNotFound(f"there is no table at {uri}")
    return table


def create_table(
    uri: object,
    schema: pa.Schema,
    *,
    partition_by: Sequence[str],
    configuration: Mapping[str, str] | None = None,
    name: str | None = None,
    description: str | None = None,
) -> TableHandle:
    """Open the table at `uri`, creating it if needed. Of several concurrent creators, all get the winner's table."""
    table = open_table(uri)
    if table is not None:
        return table
    store = store_at(uri)
    failed: DeltaError | None = None
    try:
        store.create(
            schema=schema,
            mode="ignore",
            partition_by=list(partition_by),
            configuration={TOMBSTONES: DEFAULT_TOMBSTONES, **(configuration or {})},
            name=name,
            description=description,
            raise_if_key_not_exists=False,
            # With a retry, the loser of a race would write its own metadata as version 1.
            commit_properties=CommitProperties(max_commit_retries=0),
        )
    except DeltaError as error:
        failed = error  # usually another process was first: version 0 exists once
    table = open_table(uri)
    if table is None:
        raise failed or TableNotFound(f"there is no table at {uri}")
    store.sync([commit_file(0), LOG_FOLDER])
    return table


@dataclass(frozen=True, slots=True)
class LogMaintenance:
    """The rules that keep a table's log short."""

    checkpoint_commits: int = 50
    """Commits between two Delta checkpoints: opening and refreshing cost as much as the commits since."""
    keep_commits: int = 1000
    """Versions to keep at least."""


def maintain_log(table: TableHandle, maintenance: LogMaintenance) -> None:
    """Write a checkpoint if one is due, and trim the log. A failure is retried by the next commit."""
    every, version = maintenance.checkpoint_commits, table.version
    if table._checkpointed is None or version - table._checkpointed >= every:
        table._checkpointed = table.last_checkpoint()
    try:
        if version - table._checkpointed >= every:
            table.write_checkpoint()
            table._checkpointed = version
            hit("checkpoint.written")
            trim_log(table.store, keep=maintenance.keep_commits, keep_from=table.replaced_from)
            table.reopen()
        elif version - table._opened >= every:
            table.reopen()
    except (DeltaError, OSError):
        _log.exception("maintenance of the log of %s failed; the next commit retries it", table.uri)


def sync_table(table: TableHandle, known: int | None) -> int:
    """Sync what was committed after the version `known` (None: all live files). Returns the number of files synced.

    Our writers sync what they commit. Other writers may not, and the truncation of a log relies on durable tables.
    """
    if known == table.version:
        return 0
    found = None if known is None or known > table.version else _added(table, known)
    if found is None:  # the start is unknown, or some log entries are gone
        names = [
            *table.live_files(),
            *(f"{LOG_FOLDER}/{name}" for name in table.store.list(LOG_FOLDER) if name.endswith(".json")),
        ]
    else:
        names = [*found, *(commit_file(version) for version in range((known or 0) + 1, table.version + 1))]
    count = sum(_sync(table, name) for name in names)
    for folder in {*_folders(names)}:
        _sync(table, folder)
    return count


def _added(table: TableHandle, known: int) -> list[str] | None:
    """Return the files that the commits after `known` added. Files removed since are included (and skipped if gone)."""
    found: list[str] = []
    for version in range(known + 1, table.version + 1):
        actions = read_actions(table.store, version)
        if actions is None:
            return None
        found += [unquote(action["add"]["path"]) for action in actions if "add" in action]
    return found


def _folders(names: Iterable[str]) -> Iterator[str]:
    """Yield the folders of each file up to the table; each is an entry of its parent."""
    for name in names:
        while "/" in name:
            name = name.rpartition("/")[0]
            yield name


def _sync(table: TableHandle, name: str) -> int:
    """Sync one file; return 0 if it no longer exists."""
    try:
        table.store.sync([name])
    except FileNotFoundError:
        return 0
    return 1
