"""A published table: a plain Delta table that any engine reads, whose rows lie in files of another table below it.

The table's log names data files below ROWS_FOLDER, which the collection's rows table owns, and masks rows of them by
deletion vectors. Each version has the tick that its rows are of. Data files are never written here. Files elsewhere in
the folder are the published table's own. :meth:`PublishedTable.expire` deletes those, and says which files of the rows
table no version needs any more.

A commit writes at most one vector file and then the version's JSON file, by put-if-absent:

1. Under the store's lease, check that the handle's version still exists: the name after a version that was trimmed is
   free, but no part of the table.
2. Write the vector file. Nothing names it yet.
3. Put the JSON file. If the name is taken, another committer was first: the commit is fenced, and its vector file is
   deleted.
4. If the put fails without an answer, read the file back. It is this commit's, or another's, or does not exist; then
   the same bytes are put again. A vector file that a commit may name is never deleted.

Foreign writers refuse the table, because of the feature ``millrace.published``. They still read it.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import unquote

import pyarrow as pa
from deltalake import QueryBuilder
from deltalake.exceptions import DeltaError

from millrace.base.backoff import Backoff
from millrace.base.deadline import Deadline
from millrace.base.errors import CommitFenced, InvalidArgument, TableDamaged, TablesMoved, TableUnavailable
from millrace.base.failpoint import hit
from millrace.base.package import VERSION
from millrace.storage.deletion_vectors import (
    NO_POSITIONS,
    Positions,
    Vector,
    check_positions,
    read_vector,
    write_vectors,
)
from millrace.storage.delta_log import (
    CLOSED,
    COMMIT_INFO_KEY,
    LAST_CHECKPOINT_FILE,
    LOG_FOLDER,
    boot_seconds,
    checkpoint_file,
    commit_file,
    first_commit,
    last_checkpoint_version,
    trim_log,
)
from millrace.storage.local import DRAFT
from millrace.storage.published_log import (
    LogState,
    PublishedFile,
    decode_schema,
    encode_schema,
    follow,
    load_state,
    parse_commit,
    physical_names,
    protocol_of,
)
from millrace.storage.store import ConditionalStore, TableStore, commit_tries, conditional
from millrace.storage.table import DEFAULT_TOMBSTONES, TOMBSTONES, LogMaintenance

ROWS_FOLDER: Final = "_rows"
"""Folder of the rows table, below the published one. Engines leave folders with ``_`` alone when they list files."""
VECTOR_FOLDER: Final = f"{ROWS_FOLDER}/_vectors"
"""Folder of the deletion vectors. Neither table's VACUUM looks into it."""
CONVERTED: Final = "_converted"
"""Folder of converted files, the published table's own; below it one folder for each set of converted columns."""
APP_ID: Final = "millrace/published"
"""App id whose version is the tick of the published rows."""
VECTOR_BYTES: Final = "vectorBytes"
"""Key of a commit's info: the size of the deletion vectors that it wrote."""
COMMIT_SECONDS: Final = 60.0
EXPIRE_LIMIT: Final = 256
"""Versions whose removed files one call of :meth:`PublishedTable.expire` looks at."""

_MARK: Final = "millraceCommit"
_PROPERTIES: Final = {"delta.enableDeletionVectors": "true", "delta.enableInCommitTimestamps": "true"}
_COLLECTION: Final = "millrace.collectionId"
_TICK_BITS: Final = 18
"""A tick is Unix milliseconds, shifted left by this many bits, plus a counter."""
_UNNAMED: Final = "millraceUnnamedVectors"
"""Key of the commit's info: vector files that the previous version names and this one does not."""
_PAUSE: Final = (0.01, 1.0)
"""First and largest pause in seconds after a put without an answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file that a commit adds."""

    path: str
    """Relative to the published table, as it is on disk: not percent-encoded."""
    size: int
    """Bytes on disk."""
    rows: int
    """Rows in the file, including masked ones."""
    stats: str | None = None
    """Bounds and null counts in Delta's form; those of columns that the published table lacks are left out."""
    masked: Positions = field(default_factory=lambda: NO_POSITIONS)
    modified_ms: int = 0
    """Unix milliseconds; 0: now."""


@dataclass(frozen=True, slots=True)
class PublishedChange:
    """The changes of one commit."""

    tick: int
    """Tick that the rows are of after the commit."""
    schema_version: int
    schema: pa.Schema | None = None
    """New columns; None if they stay. Metadata PHYSICAL_NAME of a field maps it to its name in the files."""
    add: Sequence[AddedFile] = ()
    remove: Sequence[str] = ()
    mask: Mapping[str, Positions] = field(default_factory=dict)
    """For each live file, all its masked positions from now on, not only the new ones."""
    rewrites: frozenset[str] = frozenset()
    """Added and removed files of a rewrite: together, they show the same rows as before."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Table properties to set. The others stay."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the commit's info."""


def inner_path(path: str) -> str:
    """Return the file of the rows table, relative to it, whose rows a published file has."""
    return path.split("/", 2)[2] if path.startswith(f"{CONVERTED}/") else path.removeprefix(f"{ROWS_FOLDER}/")


class PublishedTable:
    """A handle on a published table, at one version. Not thread-safe."""

    def __init__(self, store: TableStore, state: LogState) -> None:
        self.store = store
        self._state = state
        self._checkpointed: int | None = None
        self._unexpired: int | None = None
        """First version whose removed files may still be there; None if that is unknown."""
        self._schema: tuple[str, pa.Schema] = ("", pa.schema([]))

    @classmethod
    def open(cls, store: TableStore, *, version: int | None = None) -> Self | None:
        """Open the table at its newest version, or at `version`; None if there is none, or not any more.

        Raises TableDamaged, UnsupportedVersion.
        """
        state = load_state(store, version)
        return None if state is None else cls(store, state)

    @classmethod
    def create(
        cls,
        store: TableStore,
        schema: pa.Schema,
        *,
        collection_id: int,
        properties: Mapping[str, str] | None = None,
        tick: int = 0,
        schema_version: int = 0,
    ) -> Self:
        """Create the table without files, as version 0, and open it.

        If it exists, it is only opened: compare its schema. Raises StoreCannotPublish, TableUnavailable.
        """
        text, mapping = encode_schema(schema, {})
        configuration = {
            TOMBSTONES: DEFAULT_TOMBSTONES,
            **(properties or {}),
            **_PROPERTIES,
            **mapping,
            _COLLECTION: str(collection_id),
        }
        metadata = {
            "id": str(uuid.uuid4()),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": text,
            "partitionColumns": [],
            "configuration": configuration,
            "createdTime": _now_ms(),
        }
        said = {"tick": tick, "schemaVersion": schema_version, "collectionId": collection_id, "rows": 0}
        actions = [
            _commit_info("CREATE TABLE", max(1, tick >> _TICK_BITS), said, uuid.uuid4().hex),
            {"protocol": protocol_of(schema, configuration)},
            {"metaData": metadata},
            {"txn": {"appId": APP_ID, "version": tick, "lastUpdated": _now_ms()}},
        ]
        target = conditional(store)
        try:
            target.put_if_absent(commit_file(0), _encode(actions))
        except OSError as error:
            if store.read(commit_file(0)) is None:
                raise TableUnavailable(f"cannot create the published table {store.uri} ({error}): retry") from error
        table = cls.open(store)
        if table is None:
            raise TableUnavailable(f"the published table {store.uri} was created and is gone: retry")
        return table

    def read_by_delta_rs(self) -> Iterator[pa.Table]:
        """Yield the rows of this version as delta-rs reads them, an engine that knows nothing of Millrace.

        Texts and binaries may have view types. Raises TableDamaged.
        """
        try:
            delta = self.store.delta()
            delta.load_as_version(self.version)
            found = QueryBuilder().register("published", delta).execute("SELECT * FROM published")
            for batch in pa.RecordBatchReader.from_stream(found):
                yield pa.Table.from_batches([batch])
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise TableDamaged(f"delta-rs cannot read version {self.version} of {self.uri} ({error})") from error

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def tick(self) -> int:
        """Tick that the rows are of; 0 before the first."""
        return self._state.apps.get(APP_ID, 0)

    @property
    def schema(self) -> pa.Schema:
        """The columns, with the types of our files. A field has PHYSICAL_NAME where the files have another name."""
        text = self._state.metadata["schemaString"]
        if self._schema[0] != text:
            self._schema = text, decode_schema(text)
        return self._schema[1]

    @property
    def schema_version(self) -> int:
        """Version of the collection's schema that the columns are of."""
        return int(self.commit_info.get("schemaVersion") or 0)

    @property
    def properties(self) -> Mapping[str, str]:
        """The table's properties."""
        return MappingProxyType(self._state.metadata["configuration"])

    @property
    def collection_id(self) -> int:
        return int(self.properties[_COLLECTION])

    @property
    def protocol(self) -> Mapping[str, Any]:
        """The protocol of this version, as the log has it."""
        return MappingProxyType(self._state.protocol)

    @property
    def commit_info(self) -> Mapping[str, Any]:
        """Information of this version's commit: tick, schemaVersion, collectionId, rows, and the entries of its
        change."""
        said = self._state.commit_info.get(COMMIT_INFO_KEY) or {}
        return MappingProxyType(json.loads(said) if isinstance(said, str) else said)

    @property
    def files(self) -> Mapping[str, PublishedFile]:
        """The live files by path: a view that follows the handle."""
        return MappingProxyType(self._state.files)

    @property
    def row_count(self) -> int:
        """Rows that readers of this version see."""
        return self._state.row_count

    def masked(self, path: str) -> Positions:
        """Return the masked positions of a live file. Raises KeyError, TableDamaged."""
        vector = self._state.files[path].vector
        return NO_POSITIONS if vector is None else read_vector(self.store, vector)

    def bounds(self, path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the least and the greatest values of a live file's columns, as Delta's statistics have them.

        By the columns' names in the files. Columns without bounds are not there. Raises KeyError.
        """
        found = json.loads(self._state.files[path].stats or "{}")
        return found.get("minValues") or {}, found.get("maxValues") or {}

    def refresh(self) -> None:
        """Go to the newest version. Costs what the commits since cost. Raises TableDamaged, TableUnavailable."""
        follow(self.store, self._state)
        if self.store.size(commit_file(self.version)) is None:
            state = load_state(self.store)
            if state is None:
                raise TableUnavailable(f"the published table {self.uri} is gone: create it again")
            self._state = state

    def commit(
        self,
        change: PublishedChange,
        *,
        deadline: float = COMMIT_SECONDS,
        maintenance: LogMaintenance = LogMaintenance(),  # noqa: B008 - a value
    ) -> int:
        """Commit `change` as the version after the handle's. Returns that version, at which the handle then is.

        Raises CommitFenced if another committer was first or the log was trimmed past this version (refresh, and plan
        again), TableUnavailable if the storage fails (the commit may have taken effect), InvalidArgument for a change
        that does not fit this version, and StoreCannotPublish.
        """
        store = conditional(self.store)
        if CLOSED in (self.protocol.get("writerFeatures") or ()):
            raise TablesMoved(f"{self.uri} was moved to another place: this continues there when started again")
        self._check(change)
        ends, begun = Deadline.after(deadline), boot_seconds()
        with store.lease():
            if store.size(commit_file(self.version)) is None:
                raise CommitFenced(f"version {self.version} of {self.uri} was trimmed: refresh and plan again")
            if store.size(commit_file(self.version + 1)) is not None:
                raise self._fenced()
            name, vectors = self._write_vectors(store, change)
            mark = uuid.uuid4().hex
            actions = self._actions(change, vectors, mark)
            hit("publish.checked")
            if not self._put(store, _encode(actions), mark, ends):
                # The name is taken for good, so no attempt of this commit can still succeed.
                store.delete([name] if name else [])
                raise self._fenced()
            if boot_seconds() - begun > store.log_seconds / 2:
                # So late that the name may have been free again, and the commit no part of the table.
                raise TableUnavailable(f"a commit to {self.uri} took too long: refresh and plan again")
        hit("publish.committed")
        self._state.apply(self.version + 1, actions)
        self._maintain(maintenance)
        return self.version

    def _fenced(self) -> CommitFenced:
        return CommitFenced(f"another committer published {self.uri} first, as version {self.version + 1}: plan again")

    def _check(self, change: PublishedChange) -> None:
        live = self._state.files
        removed = set(change.remove)
        added = {each.path for each in change.add}
        if change.tick < self.tick:
            raise InvalidArgument(f"tick {change.tick} is before tick {self.tick}, which {self.uri} has")
        for path in (*removed, *change.mask):
            if path not in live:
                raise InvalidArgument(f"{path} is not a live file of {self.uri} at version {self.version}")
        doubled = len(added) < len(change.add) or any(path in live for path in added)
        if doubled or not removed.isdisjoint(change.mask):
            raise InvalidArgument(f"a change of {self.uri} has a file twice, or adds a live file")
        for each in change.add:
            if unquote(each.path) != each.path:
                raise InvalidArgument(f"{each.path} is percent-encoded: engines would look for another name")
            check_positions(each.path, each.masked, each.rows)
        for path, positions in change.mask.items():
            check_positions(path, positions, live[path].rows)

    def _write_vectors(self, store: ConditionalStore, change: PublishedChange) -> tuple[str | None, dict[str, Vector]]:
        masks = {each.path: each.masked for each in change.add if len(each.masked)}
        masks |= {path: positions for path, positions in change.mask.items() if len(positions)}
        if not masks:
            return None, {}
        try:
            name, vectors = write_vectors(store, VECTOR_FOLDER, masks)
        except OSError as error:
            raise TableUnavailable(f"cannot write deletion vectors of {self.uri} ({error}): retry") from error
        hit("publish.vectors")
        return name, vectors

    def _actions(self, change: PublishedChange, vectors: Mapping[str, Vector], mark: str) -> list[dict[str, Any]]:
        now = _now_ms()
        schema = self.schema if change.schema is None else change.schema
        columns = frozenset(physical_names(schema).values())
        files = [_added(each, columns, vectors.get(each.path), now) for each in change.add]
        dropped = [self._state.files[path] for path in change.remove]
        for path in change.mask:
            old, vector = self._state.files[path], vectors.get(path)
            if old.vector is None and vector is None:
                continue  # a remove and an add of the very same file would be a remove to some readers
            dropped.append(old)
            files.append(replace(old, stats=_statistics(old.stats, old.rows, columns, vector), vector=vector))
        rows = self.row_count + sum(each.live_rows for each in files) - sum(each.live_rows for each in dropped)
        said = {
            **change.info,
            "tick": change.tick,
            "schemaVersion": change.schema_version,
            "collectionId": self.collection_id,
            "rows": rows,
            VECTOR_BYTES: sum(each.size_in_bytes for each in vectors.values()),
        }
        stamp = max(change.tick >> _TICK_BITS, int(self._state.commit_info["inCommitTimestamp"]) + 1)
        actions = [_commit_info("WRITE", stamp, said, mark, self._state.unnamed_without(dropped))]
        actions += self._metadata_actions(change)
        actions.append({"txn": {"appId": APP_ID, "version": change.tick, "lastUpdated": now}})
        # Removes first: a reader that takes the actions one by one would otherwise lose the file again.
        actions += [_remove_action(each, now, each.path not in change.rewrites) for each in dropped]
        actions += [_add_action(each, each.path not in change.rewrites) for each in files]
        return actions

    def _metadata_actions(self, change: PublishedChange) -> Iterator[dict[str, Any]]:
        known = self._state.metadata
        metadata = {**known, "configuration": {**known["configuration"], **change.properties}}
        if change.schema is not None:
            metadata["schemaString"], mapping = encode_schema(change.schema, known)
            metadata["configuration"] |= mapping
        if metadata == known:
            return
        protocol = protocol_of(self.schema if change.schema is None else change.schema, metadata["configuration"])
        for kind in ("readerFeatures", "writerFeatures"):  # a feature, once there, stays: older files may need it
            protocol[kind] += [each for each in self._state.protocol[kind] if each not in protocol[kind]]
        if any(set(protocol[kind]) != set(self._state.protocol[kind]) for kind in ("readerFeatures", "writerFeatures")):
            yield {"protocol": protocol}
        yield {"metaData": metadata}

    def _put(self, store: ConditionalStore, data: bytes, mark: str, ends: Deadline) -> bool:
        """Put the next version's file. Returns False if another commit has its name. Raises TableUnavailable."""
        name = commit_file(self.version + 1)
        backoff = Backoff(*_PAUSE)
        idle = 0
        while True:
            failure: OSError | None = None
            try:
                if store.put_if_absent(name, data):
                    return True
            except OSError as error:
                failure = error
            # Read also after a refusal: an earlier put without an answer may have taken the name.
            try:
                found = store.read(name)
                if found is not None:
                    if mark not in _marks(found):
                        return False
                    store.sync([name])  # the put may have failed in its last step
                    return True
            except OSError as error:
                failure = error
            idle += 1
            if idle > commit_tries(store) or ends.expired():
                raise TableUnavailable(
                    f"{self.uri} accepts no commit ({failure}); this one may have been committed: refresh and plan "
                    "again"
                ) from failure
            ends.pause(backoff.next_delay())

    def _maintain(self, maintenance: LogMaintenance) -> None:
        """Write a checkpoint if one is due, and trim the log. A failure is retried by the next commit."""
        every, version = maintenance.checkpoint_commits, self.version
        if self._checkpointed is None or version - self._checkpointed >= every:
            self._checkpointed = last_checkpoint_version(self.store)
        if version - self._checkpointed < every:
            return
        try:
            delta = self.store.delta(version)
            delta.create_checkpoint()
            self.store.sync([checkpoint_file(version), LAST_CHECKPOINT_FILE])
            self._checkpointed = version
            hit("checkpoint.written")
            trim_log(self.store, keep=maintenance.keep_commits, keep_from=self._unexpired or 0)
            with self.store.alone() as free:
                drafts = [f"{LOG_FOLDER}/{name}" for name in self.store.list(LOG_FOLDER) if name.startswith(DRAFT)]
                self.store.delete(drafts if free else [])
        except (DeltaError, OSError):
            _log.exception("maintenance of the log of %s failed; the next commit retries it", self.uri)

    def expire(self, *, before_ms: int, keep: int = 0, limit: int = EXPIRE_LIMIT) -> list[str]:
        """Delete vector files, and data files of the table's own, that only versions older than `before_ms` need.

        Returns data files below ROWS_FOLDER that only such versions need: they belong to the rows table, which may
        need them too. A version is older if the next one was committed before that Unix time. The last `keep` versions
        stay. Commits trim the log only up to where this handle has expired it. Costs what the expired versions
        removed, of at most `limit` versions.
        """
        version = first_commit(self.store) if self._unexpired is None else self._unexpired
        last = min(self.version - keep, version + limit - 1)
        released: list[str] = []
        while version <= last:
            actions = parse_commit(self.store, version)
            if actions is not None:  # else another process has expired it, and trimmed the log
                info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
                if int(info["timestamp"]) > before_ms:
                    break
                left = {action["add"]["path"] for action in actions if "add" in action}
                removed = (action["remove"]["path"] for action in actions if "remove" in action)
                gone = [path for path in removed if path not in left and path not in self._state.files]
                own = [path for path in gone if not path.startswith(f"{ROWS_FOLDER}/")]
                self.store.delete([*info.get(_UNNAMED, ()), *own])
                hit("publish.expired")
                released += [path for path in gone if path.startswith(f"{ROWS_FOLDER}/")]
            version += 1
        self._unexpired = version
        return list(dict.fromkeys(released))

    def needed_files(self, *, since_ms: int) -> set[str]:
        """Return the data files of every version that was the newest at Unix time `since_ms` or later."""
        return {path for path, _ in self._named(since_ms)}

    def sweep_vectors(self) -> list[str]:
        """Delete vector files that no version in the log names: those of commits that failed. Returns their names.

        Does nothing while another committer works. Costs the log and the folder.
        """
        with self.store.alone() as free:
            age = 0.0 if free else self.store.log_seconds
            if age == math.inf:
                return []
            found = [f"{VECTOR_FOLDER}/{name}" for name in self.store.list(VECTOR_FOLDER, age=age)]
            self.refresh()
            named = {vector.file for _, vector in self._named(None) if vector is not None}
            doomed = [name for name in found if name not in named]
            self.store.delete(doomed)
        return doomed

    def named_files(self) -> dict[str, bool]:
        """Return the data and vector files of every version in the log, relative to the table, and whether they are of
        this one. Files of earlier versions may be gone (:meth:`expire`).
        """
        live = self._state.files
        found: dict[str, bool] = {}
        for path, vector in self._named(None):
            found[path] = path in live
            if vector is not None:
                found[vector.file] = found.get(vector.file, False) or (path in live and live[path].vector == vector)
        return found

    def _named(self, since_ms: int | None) -> Iterator[tuple[str, Vector | None]]:
        """Yield the files of the newest version, and those that commits after `since_ms` removed, newest first."""
        for each in self._state.files.values():
            yield each.path, each.vector
        for version in range(self.version, -1, -1):
            actions = parse_commit(self.store, version)
            if actions is None:
                return
            for action in actions:
                if since_ms is not None and int(action.get("commitInfo", {}).get("timestamp", since_ms)) < since_ms:
                    return
                if "remove" in action:
                    yield action["remove"]["path"], Vector.from_action(action["remove"].get("deletionVector"))

    def version_at(self, tick: int) -> int | None:
        """Return the newest version up to this one whose rows are of `tick` or before; None if the log has none."""
        low, high = first_commit(self.store), self.version
        if high < low or _tick_of(parse_commit(self.store, low)) > tick:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if _tick_of(parse_commit(self.store, middle)) > tick else (middle, high)
        return low


def _tick_of(actions: list[dict[str, Any]] | None) -> int:
    """Return the tick of a commit. A commit that was trimmed meanwhile counts as one of the first tick."""
    moves = [action["txn"] for action in actions or () if "txn" in action]
    return next((int(each["version"]) for each in moves if each["appId"] == APP_ID), 0)


def _commit_info(
    operation: str, stamp: int, said: Mapping[str, Any], mark: str, unnamed: Sequence[str] = ()
) -> dict[str, Any]:
    info: dict[str, Any] = {
        # Readers that know in-commit timestamps take the tick's time; the other one is the clock's, for retention.
        "inCommitTimestamp": stamp,
        "timestamp": _now_ms(),
        "operation": operation,
        "operationParameters": {},
        "isBlindAppend": False,
        "engineInfo": f"millrace/{VERSION}",
        _MARK: mark,
        COMMIT_INFO_KEY: dict(said),
    }
    if unnamed:
        info[_UNNAMED] = list(unnamed)
    return {"commitInfo": info}


def _marks(data: bytes) -> set[str]:
    """Return the marks of a commit's infos. Raises OSError if the file cannot be parsed."""
    try:
        actions = [json.loads(line) for line in data.splitlines() if b"commitInfo" in line]
    except ValueError as error:
        raise OSError(f"a commit cannot be parsed: {error}") from error
    return {action.get("commitInfo", {}).get(_MARK, "") for action in actions}


def _added(file: AddedFile, columns: frozenset[str], vector: Vector | None, now: int) -> PublishedFile:
    stats = _statistics(file.stats, file.rows, columns, vector)
    return PublishedFile(file.path, file.size, file.rows, stats, file.modified_ms or now, vector)


def _statistics(stats: str | None, rows: int, columns: frozenset[str], vector: Vector | None) -> str:
    """Return the statistics of a file: its physical rows, and the bounds and null counts of `columns`.

    With a vector the bounds still hold, but are no longer tight, not even when the vector is gone again.
    """
    found = json.loads(stats) if stats else {}
    bounds = {
        kind: {name: value for name, value in found.get(kind, {}).items() if name in columns}
        for kind in ("minValues", "maxValues", "nullCount")
    }
    tight = vector is None and found.get("tightBounds", True)
    said = {"numRecords": rows, **bounds, "tightBounds": tight}
    return json.dumps(said, ensure_ascii=False)  # delta-rs (1.6) misreads escaped surrogate pairs


def _add_action(file: PublishedFile, data_change: bool) -> dict[str, Any]:
    action: dict[str, Any] = {
        "path": file.path,
        "partitionValues": {},
        "size": file.size,
        "modificationTime": file.modified_ms,
        "dataChange": data_change,
        "stats": file.stats,
    }
    if file.vector is not None:
        action["deletionVector"] = file.vector.to_action()
    return {"add": action}


def _remove_action(file: PublishedFile, now: int, data_change: bool) -> dict[str, Any]:
    action: dict[str, Any] = {
        "path": file.path,
        "deletionTimestamp": now,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": file.size,
    }
    if file.vector is not None:
        action["deletionVector"] = file.vector.to_action()
    return {"remove": action}


def _encode(actions: Iterable[Mapping[str, Any]]) -> bytes:
    # No newline at the end, as delta-rs has it: one would look like the beginning of a torn action.
    return "\n".join(json.dumps(each, ensure_ascii=False) for each in actions).encode()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
