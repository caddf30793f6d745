"""The log of a published table: its state at a version, read from a Delta checkpoint and the commits after it.

delta-rs' Python interface shows no deletion vectors, so the log is read here, as Delta's PROTOCOL.md defines it. Two
rules matter. In a commit, all removes come before all adds, whatever their order in the file: a changed vector is a
remove and an add of one path. A checkpoint's adds are the live files, whatever its removes say: they name older
vectors of paths that are live.

Opening reads the newest checkpoint and the commits after it, without listing the log, so it costs neither older entries
nor removed files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import Schema

from millrace.base.errors import TableDamaged, UnsupportedVersion
from millrace.storage.commit import has_timestamp_ntz
from millrace.storage.deletion_vectors import Vector
from millrace.storage.delta_log import (
    CLOSED,
    checkpoint_file,
    commit_file,
    is_checkpoint,
    last_checkpoint_version,
    log_files,
    version_of,
)
from millrace.storage.store import TableStore
from millrace.storage.table import plain_field
from millrace.storage.torn_log import quarantine_torn_files

FEATURE: Final = "millrace.published"
"""Writer feature without a meaning to readers: writers that do not know it refuse the table."""
PHYSICAL_NAME: Final = "delta.columnMapping.physicalName"
"""Metadata key of a field: its name in the data files, where that is another."""
CHANGE_FEED: Final = "delta.enableChangeDataFeed"
"""Property with which Spark reads the changes between versions, from the vectors: nothing more is written."""

_COLUMN_ID: Final = "delta.columnMapping.id"
_MAX_COLUMN_ID: Final = "delta.columnMapping.maxColumnId"
_MAPPING_MODE: Final = "delta.columnMapping.mode"
_READER_FEATURES: Final = frozenset({"deletionVectors", "timestampNtz", "columnMapping"})
_WRITER_FEATURES: Final = _READER_FEATURES | {"inCommitTimestamp", "invariants", "changeDataFeed", FEATURE, CLOSED}
_ADD_COLUMNS: Final = ("add.path", "add.size", "add.stats", "add.modificationTime", "add.deletionVector")
_LOOKS: Final = 5
"""Attempts to read a log that is trimmed meanwhile."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One live file of a published table."""

    path: str
    """Relative to the table."""
    size: int
    """Bytes on disk."""
    rows: int
    """Rows in the file, including masked ones."""
    stats: str | None
    """Statistics in Delta's form."""
    modified_ms: int
    """Unix milliseconds."""
    vector: Vector | None = None
    """The masked rows; None if there are none."""

    @property
    def live_rows(self) -> int:
        """Rows that are not masked."""
        return self.rows if self.vector is None else self.rows - self.vector.cardinality


@dataclass(slots=True)
class LogState:
    """The state of a published table at one version."""

    version: int
    protocol: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    apps: dict[str, int] = field(default_factory=dict)
    files: dict[str, PublishedFile] = field(default_factory=dict)
    commit_info: dict[str, Any] = field(default_factory=dict)
    """The info of this version's commit."""
    row_count: int = 0
    """Rows of the live files that are not masked."""
    vectors: Counter[str] = field(default_factory=Counter)
    """For each vector file, the number of live files with a vector in it."""

    def apply(self, version: int, actions: Sequence[Mapping[str, Any]]) -> None:
        """Go to the next `version` by the actions of its commit. Raises UnsupportedVersion, and then stays as it is."""
        for action in actions:
            if "protocol" in action:
                _check_features(action["protocol"])
        self.version, self.commit_info = version, {}
        adds = []
        for action in actions:
            if "remove" in action:
                self.remove(unquote(action["remove"]["path"]))
            elif "add" in action:
                adds.append(action["add"])
            else:
                self._apply_other(action)
        for add in adds:
            self.add(file_of(add))

    def add(self, file: PublishedFile) -> None:
        """Add a file, or replace it by the same file with another vector."""
        self.remove(file.path)
        self.files[file.path] = file
        self.row_count += file.live_rows
        if file.vector is not None:
            self.vectors[file.vector.file] += 1

    def remove(self, path: str) -> None:
        """Remove a file, if it is live."""
        found = self.files.pop(path, None)
        if found is None:
            return
        self.row_count -= found.live_rows
        if found.vector is not None:
            name = found.vector.file
            self.vectors[name] -= 1
            if not self.vectors[name]:
                del self.vectors[name]

    def unnamed_without(self, files: Iterable[PublishedFile]) -> list[str]:
        """Return the vector files that no live file would name if these live `files` were removed."""
        left = Counter(each.vector.file for each in files if each.vector is not None)
        return [name for name, count in left.items() if count == self.vectors[name]]

    def _apply_other(self, action: Mapping[str, Any]) -> None:
        if action.get("commitInfo") is not None:
            self.commit_info = dict(action["commitInfo"])
        elif action.get("txn") is not None:
            self.apps[action["txn"]["appId"]] = int(action["txn"]["version"])
        elif action.get("metaData") is not None:
            # A checkpoint has every field and Arrow's maps, which are lists of pairs. A commit has neither.
            found = {name: value for name, value in action["metaData"].items() if value is not None}
            found["configuration"] = dict(found.get("configuration") or {})
            self.metadata = {**found, "format": {"provider": "parquet", "options": {}}}
        elif action.get("protocol") is not None:
            self.protocol = {name: value for name, value in action["protocol"].items() if value is not None}


def _check_features(protocol: Mapping[str, Any]) -> None:
    unknown = {*(protocol.get("readerFeatures") or ()), *(protocol.get("writerFeatures") or ())} - _WRITER_FEATURES
    if unknown:
        raise UnsupportedVersion(
            f"a published table has the features {', '.join(sorted(unknown))}, which this build does not know: run the "
            "build that wrote it, or a newer one"
        )


def file_of(add: Mapping[str, Any]) -> PublishedFile:
    """Return the file that an add action describes."""
    stats = add.get("stats")
    return PublishedFile(
        unquote(add["path"]),
        int(add["size"]),
        int(json.loads(stats)["numRecords"]) if stats else 0,
        stats,
        int(add["modificationTime"]),
        Vector.from_action(add.get("deletionVector")),
    )


def parse_commit(store: TableStore, version: int) -> list[dict[str, Any]] | None:
    """Return the actions of a commit; None if the log does not have it. Raises TableDamaged."""
    data = store.read(commit_file(version))
    return None if data is None else _parse(store, version, data)


def _parse(store: TableStore, version: int, data: bytes) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in data.splitlines() if line.strip()]
    except ValueError as error:
        raise TableDamaged(
            f"cannot read {store.uri}/{commit_file(version)} ({error}): remove the published table, and it is "
            "published again"
        ) from error


def load_state(store: TableStore, version: int | None = None) -> LogState | None:
    """Return the newest state, or that of `version`; None if the log does not have it.

    Raises TableDamaged, UnsupportedVersion.
    """
    for look in range(_LOOKS):
        base = _base(store, version, listed=version is not None or look > 0)
        state = LogState(-1) if base is None else _read_checkpoint(store, base)
        if state is None:
            continue
        follow(store, state, version)
        if state.version < 0:
            if (base is None and look > 0) or not log_files(store):
                return None
            continue
        # Entries are removed oldest first: if the first one is still there, none of the others was missing.
        if store.size(commit_file(max(base or 0, 0))) is not None:
            return state if version is None or state.version == version else None
    raise TableDamaged(f"the log of {store.uri} has gaps: remove the published table, and it is published again")


def follow(store: TableStore, state: LogState, version: int | None = None) -> None:
    """Apply the commits after `state`, at most up to `version`."""
    while version is None or state.version < version:
        actions = parse_commit(store, state.version + 1)
        if actions is None:
            return
        state.apply(state.version + 1, actions)


def _base(store: TableStore, version: int | None, *, listed: bool) -> int | None:
    """Return the version of the checkpoint to start from; None to start from the first commit."""
    if not listed:
        return last_checkpoint_version(store) or None
    found = (version_of(name) for name in log_files(store) if is_checkpoint(name))
    return max((each for each in found if version is None or each <= version), default=None)


def _read_checkpoint(store: TableStore, version: int) -> LogState | None:
    """Return the state that a checkpoint has; None if it is gone or was torn. Raises TableDamaged."""
    state = LogState(version)
    try:
        with pq.ParquetFile(checkpoint_file(version), filesystem=store.filesystem) as checkpoint:
            names = checkpoint.schema_arrow.names
            for kind in ("protocol", "metaData", "txn"):
                column = checkpoint.read(columns=[kind])[kind] if kind in names else pa.chunked_array([], pa.null())
                for value in column.drop_null().to_pylist():
                    state.apply(version, [{kind: value}])
            adds = checkpoint.read(columns=list(_ADD_COLUMNS))["add"].drop_null() if "add" in names else None
    except FileNotFoundError:
        return None
    except pa.ArrowException as error:
        if quarantine_torn_files(store):
            return None
        raise TableDamaged(
            f"cannot read {store.uri}/{checkpoint_file(version)} ({error}): remove the published table, and it is "
            "published again"
        ) from error
    for add in adds.to_pylist() if adds is not None else ():
        state.add(file_of(add))
    # The commit info is the first action (in-commit timestamps require that). The others are in the checkpoint.
    first = (store.read(commit_file(version)) or b"").partition(b"\n")[0]
    for action in _parse(store, version, first):
        state.commit_info = action.get("commitInfo", {})
    return state


def encode_schema(schema: pa.Schema, known: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return a schema in Delta's form, and the table properties that it needs.

    Columns are mapped if the metadata of a field has PHYSICAL_NAME. `known` is the table's metadata so far: a mapped
    column keeps its id.
    """
    found = json.loads(Schema.from_arrow(pa.schema([plain_field(each) for each in schema])).to_json())
    physical = physical_names(schema)
    if all(name == each for name, each in physical.items()) and _MAPPING_MODE not in known.get("configuration", {}):
        return json.dumps(found), {}
    ids = _column_ids(json.loads(known["schemaString"])) if known else {}
    last = max([int(known.get("configuration", {}).get(_MAX_COLUMN_ID) or 0), *ids.values()])

    def assign(fields: list[dict[str, Any]], above: tuple[str, ...]) -> None:
        nonlocal last
        for each in fields:
            name = each["name"] if above else physical[each["name"]]
            path = (*above, name)
            if path not in ids:
                last += 1
                ids[path] = last
            each["metadata"] = {_COLUMN_ID: ids[path], PHYSICAL_NAME: name}
            for below in _structs(each["type"]):
                assign(below, path)

    assign(found["fields"], ())
    return json.dumps(found), {_MAPPING_MODE: "name", _MAX_COLUMN_ID: str(last)}


def _column_ids(schema: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for each in schema["fields"]:
        path = (*above, each["metadata"].get(PHYSICAL_NAME, each["name"]))
        if _COLUMN_ID in each["metadata"]:
            found[path] = int(each["metadata"][_COLUMN_ID])
        for below in _structs(each["type"]):
            found |= _column_ids({"fields": below}, path)
    return found


def _structs(kind: Any) -> Iterable[list[dict[str, Any]]]:
    """Yield the fields of the outermost structs in a type of Delta's form."""
    if not isinstance(kind, dict):
        return
    if kind["type"] == "struct":
        yield kind["fields"]
    for inner in ("elementType", "keyType", "valueType"):
        if inner in kind:
            yield from _structs(kind[inner])


def physical_names(schema: pa.Schema) -> dict[str, str]:
    """Return, for each column, its name in the data files."""
    key = PHYSICAL_NAME.encode()
    return {each.name: ((each.metadata or {}).get(key) or each.name.encode()).decode() for each in schema}


def decode_schema(text: str) -> pa.Schema:
    """Return the columns of a schema in Delta's form. A field has PHYSICAL_NAME where that is another name."""
    found = json.loads(text)
    mapped = {each["name"]: each["metadata"].get(PHYSICAL_NAME, each["name"]) for each in found["fields"]}
    fields = [plain_field(each) for each in pa.schema(Schema.from_json(text).to_arrow())]
    return pa.schema(
        [
            each if mapped[each.name] == each.name else each.with_metadata({PHYSICAL_NAME: mapped[each.name]})
            for each in fields
        ]
    )


def protocol_of(schema: pa.Schema, properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the protocol that a published table with `schema` and `properties` needs."""
    readers = ["deletionVectors"]
    if any(has_timestamp_ntz(each.type) for each in schema):
        readers.append("timestampNtz")
    if _MAPPING_MODE in properties:
        readers.append("columnMapping")
    writers = [*readers, "inCommitTimestamp", FEATURE]
    if any(not each.nullable for each in schema):
        writers.append("invariants")  # else Spark refuses a column that is not nullable
    if properties.get(CHANGE_FEED) == "true":
        writers.append("changeDataFeed")
    return {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": readers, "writerFeatures": writers}
