"""Bodies of control messages: small canonical JSON objects, one shape per type (docs/wire-form.md, "Bodies").

:func:`parse_body` accepts any bytes and returns the type's object or raises Malformed, in bounded time. Its error text
is the same on every host: the text of a rejection is stored, and law 1 covers it. :func:`encode_body` is canonical
(sorted keys, no spaces, UTF-8), so equal objects have equal bytes. The chain judges what the values mean; the config's
keys and bounds, for example, are not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NotRequired, Protocol, TypedDict, cast, overload

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import MessageType

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace.message.schema_changes import SchemaChange  # only programs that change schemas need it

MAX_BODY_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 8
MAX_NAME_BYTES: Final = 255

_NOT_JSON: Final = f"the body is no JSON object (UTF-8, integers of 64 bits, at most {MAX_DEPTH} levels, no key twice)"
_INT64_DIGITS: Final = 20
MAX_PATH_BYTES: Final = 1024
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class EmptyBody(TypedDict):
    """The body of a type whose header says everything: no bytes."""


class TermOpeningBody(TypedDict):
    """TERM_OPENING."""

    chain_version: int
    config: dict[str, int]


class CreateCollectionBody(TypedDict):
    """CREATE_COLLECTION. ``vchannels`` are all of the collection's, ``partitions`` maps names to ids."""

    name: str
    vchannels: list[str]
    schema: CollectionSchema
    partitions: dict[str, int]


class CreatePartitionBody(TypedDict):
    """CREATE_PARTITION; the id is in the header."""

    name: str


class SchemaChangeBody(TypedDict):
    """SCHEMA_CHANGE: the changes that make the next schema version, in order."""

    changes: list[SchemaChange]


class BeginTxnBody(TypedDict):
    """BEGIN_TXN; without ``keepalive_ms`` the chain's default lease applies."""

    keepalive_ms: NotRequired[int]


class ManualFlushBody(TypedDict):
    """MANUAL_FLUSH; without ``segment_id`` all growing segments."""

    segment_id: NotRequired[int]


class AlterWalBody(TypedDict):
    """ALTER_WAL: the generation in which the log continues, and that backend's URL for people to read."""

    generation: int
    log: str


class ImportFile(TypedDict):
    """A staged Parquet file of an IMPORT, with rows of one partition and of the message's VChannel."""

    path: str
    """Relative to ``<data folder>/staged``, with "/" as separator; never outside of it."""
    partition_id: int
    rows: int
    bytes: int
    """The file's size."""
    digest: str
    """The SHA-256 of the file, as 64 lower-case hexadecimal digits."""


class ImportBody(TypedDict):
    """IMPORT: the staged files whose rows the collection gets; ``replace`` removes its previous rows first."""

    import_id: str
    files: list[ImportFile]
    replace: bool


class VChannelImport(NamedTuple):
    """An Import into one VChannel, from its message and the catalog at its tick."""

    vchannel: str
    tick: int
    files: Sequence[ImportFile]
    schema: CollectionSchema
    """The schema of its rows."""
    vchannels: Sequence[str]
    """All VChannels of the collection."""


class ImportSource(Protocol):
    """The source of imported rows: the staged files, or a server that has them."""

    def rows(self, named: VChannelImport) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (partition id, rows of ``named.schema.arrow()``) in the order of the files.

        Raises StagedFileDamaged.
        """
        ...


class FlushBody(TypedDict):
    """FLUSH, which the chain emits: the seal policy that ended the segment."""

    policy: str


_Empty = Literal[
    MessageType.DROP_COLLECTION,
    MessageType.DROP_PARTITION,
    MessageType.FLUSH_ALL,
    MessageType.COMMIT_TXN,
    MessageType.ROLLBACK_TXN,
    MessageType.KEEP_ALIVE,
    MessageType.TIME_TICK,
    MessageType.CREATE_SEGMENT,
]


def encode_body(value: Mapping[str, object]) -> bytes:
    """Encode `value` as canonical JSON.

    Raises InvalidArgument above 1 MiB, or if JSON cannot represent it.
    """
    try:
        data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
            "utf-8"
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"not a message body: {error}") from None
    if len(data) > MAX_BODY_BYTES:
        raise InvalidArgument(f"a message body has at most {MAX_BODY_BYTES} bytes, not {len(data)}")
    return data


@overload
def parse_body(type: Literal[MessageType.TERM_OPENING], payload: bytes) -> TermOpeningBody: ...
@overload
def parse_body(type: Literal[MessageType.CONFIG], payload: bytes) -> dict[str, int]: ...
@overload
def parse_body(type: Literal[MessageType.CREATE_COLLECTION], payload: bytes) -> CreateCollectionBody: ...
@overload
def parse_body(type: Literal[MessageType.CREATE_PARTITION], payload: bytes) -> CreatePartitionBody: ...
@overload
def parse_body(type: Literal[MessageType.SCHEMA_CHANGE], payload: bytes) -> SchemaChangeBody: ...
@overload
def parse_body(type: Literal[MessageType.BEGIN_TXN], payload: bytes) -> BeginTxnBody: ...
@overload
def parse_body(type: Literal[MessageType.MANUAL_FLUSH], payload: bytes) -> ManualFlushBody: ...
@overload
def parse_body(type: Literal[MessageType.FLUSH], payload: bytes) -> FlushBody: ...
@overload
def parse_body(type: Literal[MessageType.ALTER_WAL], payload: bytes) -> AlterWalBody: ...
@overload
def parse_body(type: Literal[MessageType.IMPORT], payload: bytes) -> ImportBody: ...
@overload
def parse_body(type: _Empty, payload: bytes) -> EmptyBody: ...
@overload
def parse_body(type: MessageType, payload: bytes) -> Any: ...


def parse_body(type: MessageType, payload: bytes) -> Any:
    """Parse and check the body of a control message.

    Raises Malformed if it does not have the type's shape.
    Raises InvalidArgument if the type has no body (INSERT, DELETE) or no behaviour.
    """
    parse = _PARSERS.get(type)
    if parse is None:
        raise InvalidArgument(f"the payload of {type.name} is no JSON body")
    if len(payload) > MAX_BODY_BYTES:
        raise Malformed(f"a message body has at most {MAX_BODY_BYTES} bytes, not {len(payload)}")
    return parse(payload)


def _load(payload: bytes) -> dict[str, Any]:
    # One message for all errors: the depth at which json gives up depends on the host's stack.
    try:
        value = json.loads(
            payload.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_int=_integer,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
        if not isinstance(value, dict) or _too_deep(value, MAX_DEPTH):
            raise ValueError
        # Escapes can encode a lone surrogate, which UTF-8 cannot.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise Malformed(_NOT_JSON) from None
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError
    return value


def _integer(digits: str) -> int:
    if len(digits) > _INT64_DIGITS:
        raise ValueError
    value = int(digits)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError
    return value


def _refuse(text: str) -> object:
    raise ValueError


def _too_deep(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        return levels == 0 or any(_too_deep(item, levels - 1) for item in value.values())
    if isinstance(value, list):
        return levels == 0 or any(_too_deep(item, levels - 1) for item in value)
    return False


def _object(payload: bytes, required: frozenset[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    return _keyed(_load(payload), required, optional)


def _keyed(value: dict[str, Any], required: frozenset[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    if not required <= set(value) <= required | optional:
        keys = ", ".join(sorted(required | optional)) or "no keys"
        raise Malformed(f"the body is an object of {keys}, not of others")
    return value


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not value or len(value.encode("utf-8")) > MAX_NAME_BYTES:
        raise Malformed(f"{what} is a string of 1 to {MAX_NAME_BYTES} bytes")
    return value


def _int(value: object, what: str, *, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Malformed(f"{what} is an integer of at least {least}")
    return value


def _integers(value: object, what: str) -> dict[str, int]:
    if not isinstance(value, dict) or not all(
        isinstance(item, int) and not isinstance(item, bool) for item in value.values()
    ):
        raise Malformed(f"{what} is an object of integers")
    return cast(dict[str, int], value)


def _empty(payload: bytes) -> EmptyBody:
    if payload:
        raise Malformed("a message of this type has no body")
    return {}


def _term_opening(payload: bytes) -> TermOpeningBody:
    value = _object(payload, frozenset({"chain_version", "config"}))
    return {
        "chain_version": _int(value["chain_version"], "chain_version", least=1),
        "config": _integers(value["config"], "config"),
    }


def _config(payload: bytes) -> dict[str, int]:
    return _integers(_load(payload), "the body")


def _create_collection(payload: bytes) -> CreateCollectionBody:
    value = _object(payload, frozenset({"name", "vchannels", "schema", "partitions"}))
    vchannels, partitions = value["vchannels"], _integers(value["partitions"], "partitions")
    if not isinstance(vchannels, list) or not vchannels:
        raise Malformed("vchannels is a list of one name or more")
    names = [_name(name, "a VChannel's name") for name in vchannels]
    if len(set(names)) != len(names):
        raise Malformed("vchannels has a name twice")
    for name, partition_id in partitions.items():
        _name(name, "a partition's name")
        _int(partition_id, "a partition's id", least=1)
    if len(set(partitions.values())) != len(partitions):
        raise Malformed("partitions has an id twice")
    try:
        schema = CollectionSchema.from_json(value["schema"], declared=True)
    except InvalidArgument as error:
        raise Malformed(str(error)) from None
    return {
        "name": _name(value["name"], "a collection's name"),
        "vchannels": names,
        "schema": schema,
        "partitions": partitions,
    }


def _create_partition(payload: bytes) -> CreatePartitionBody:
    return {"name": _name(_object(payload, frozenset({"name"}))["name"], "a partition's name")}


def _schema_change(payload: bytes) -> SchemaChangeBody:
    from millrace.message.schema_changes import MAX_CHANGES, AddField, change_from_json

    value = _load(payload)
    try:
        if "changes" not in value:
            added = _keyed(value, frozenset({"add"}))["add"]
            return {"changes": [AddField(FieldSpec.from_json(added, declared=True))]}
        changes = _keyed(value, frozenset({"changes"}))["changes"]
        if not isinstance(changes, list) or not 1 <= len(changes) <= MAX_CHANGES:
            raise Malformed(f"changes are a list of 1 to {MAX_CHANGES}")
        return {"changes": [change_from_json(each) for each in changes]}
    except InvalidArgument as error:
        raise Malformed(str(error)) from None


def check_schema_change_before_v4(payload: bytes) -> None:
    """Check a schema change for chains before version 4, which know added fields only.

    Raises Malformed with the text of those chains.
    """
    if len(payload) <= MAX_BODY_BYTES:
        _object(payload, frozenset({"add"}))


def _begin_txn(payload: bytes) -> BeginTxnBody:
    if not payload:
        return {}
    value = _object(payload, frozenset(), frozenset({"keepalive_ms"}))
    return {"keepalive_ms": _int(value["keepalive_ms"], "keepalive_ms")} if value else {}


def _manual_flush(payload: bytes) -> ManualFlushBody:
    if not payload:
        return {}
    value = _object(payload, frozenset(), frozenset({"segment_id"}))
    return {"segment_id": _int(value["segment_id"], "segment_id")} if value else {}


def _flush(payload: bytes) -> FlushBody:
    return {"policy": _name(_object(payload, frozenset({"policy"}))["policy"], "a seal policy")}


def _alter_wal(payload: bytes) -> AlterWalBody:
    value = _object(payload, frozenset({"generation", "log"}))
    if not isinstance(value["log"], str):
        raise Malformed("log is a string")
    return {"generation": _int(value["generation"], "generation", least=1), "log": value["log"]}


def _import(payload: bytes) -> ImportBody:
    value = _object(payload, frozenset({"import_id", "files", "replace"}))
    import_id = _name(value["import_id"], "import_id")
    files, replace = value["files"], value["replace"]
    if not isinstance(replace, bool):
        raise Malformed("replace is true or false")
    if not isinstance(files, list):
        raise Malformed("files is a list")
    if not files and not replace:
        raise Malformed("an import names one file or more, or replaces what is there")
    found = [_import_file(each) for each in files]
    if len({each["path"] for each in found}) != len(found):
        raise Malformed("files has a path twice")
    return {"import_id": import_id, "files": found, "replace": replace}


def import_partitions(body: ImportBody) -> list[int]:
    """Return the partitions that an Import adds rows to, in the order in which the chain creates their segments."""
    return sorted({each["partition_id"] for each in body["files"]})


def _import_file(value: object) -> ImportFile:
    keys = {"path", "partition_id", "rows", "bytes", "digest"}
    if not isinstance(value, dict) or set(value) != keys:
        raise Malformed(f"a file is an object of {', '.join(sorted(keys))}, not of others")
    path, digest = value["path"], value["digest"]
    if not isinstance(path, str) or not _inside(path):
        raise Malformed(
            f"a file's path is relative to the staged folder: names with / between them, none of them empty or hidden"
            " (.x), "
            f"at most {MAX_PATH_BYTES} bytes"
        )
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise Malformed("a file's digest is its sha256 as 64 lower-case hexadecimal digits")
    return {
        "path": path,
        "partition_id": _int(value["partition_id"], "a file's partition_id", least=1),
        "rows": _int(value["rows"], "a file's rows", least=1),
        "bytes": _int(value["bytes"], "a file's bytes", least=1),
        "digest": digest,
    }


def _inside(path: str) -> bool:
    """Return whether `path` stays in its base folder on any host and names nothing hidden."""
    if len(path.encode("utf-8")) > MAX_PATH_BYTES or "\\" in path or any(ord(each) < 32 for each in path):
        return False
    return all(name and not name.startswith(".") for name in path.split("/"))


_PARSERS: Final[dict[MessageType, Any]] = {
    MessageType.TERM_OPENING: _term_opening,
    MessageType.CONFIG: _config,
    MessageType.CREATE_COLLECTION: _create_collection,
    MessageType.DROP_COLLECTION: _empty,
    MessageType.CREATE_PARTITION: _create_partition,
    MessageType.DROP_PARTITION: _empty,
    MessageType.SCHEMA_CHANGE: _schema_change,
    MessageType.MANUAL_FLUSH: _manual_flush,
    MessageType.FLUSH_ALL: _empty,
    MessageType.BEGIN_TXN: _begin_txn,
    MessageType.COMMIT_TXN: _empty,
    MessageType.ROLLBACK_TXN: _empty,
    MessageType.KEEP_ALIVE: _empty,
    MessageType.TIME_TICK: _empty,
    MessageType.CREATE_SEGMENT: _empty,
    MessageType.FLUSH: _flush,
    MessageType.ALTER_WAL: _alter_wal,
    MessageType.IMPORT: _import,
}
