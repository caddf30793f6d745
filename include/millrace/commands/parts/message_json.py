"""Messages of the WAL and of the log as JSON objects, with the rows of their payloads if requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import pyarrow as pa

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import read_collections_by_id
from millrace.commands.parts.command_line import iso_time
from millrace.message.bodies import parse_body
from millrace.message.header import HEADER
from millrace.message.model import ImmutableMessage
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema
from millrace.message.types import DML, ROW_CARRYING_TYPES, MessageType
from millrace.message.wire.decode import decode_entries
from millrace.wal.scanner import ImmutableTxn

_NUMBERS: Final = ("segment_id", *(name for name in HEADER if name not in ("type", "vchannel")))
"""Header fields that are shown unless they are 0."""

PayloadDecoder = Callable[[int, int, int, bytes], Any]
"""(type, collection id, schema version, payload) -> its JSON value."""


def payload_decoder(settings: Settings) -> PayloadDecoder:
    """Return a decoder of payloads: rows become objects, an unreadable payload becomes its error."""

    @cache
    def schemas(collection_id: int) -> tuple[CollectionSchema, ...]:
        found = read_collections_by_id(settings.data_dir, [collection_id]).get(collection_id)
        return () if found is None else found.schemas

    def read(number: int, collection_id: int, version: int, payload: bytes) -> Any:
        try:
            kind = MessageType(number)
            if kind not in DML:
                return parse_body(kind, payload)
            versions = schemas(collection_id)
            if not 1 <= version <= len(versions):  # it may be newer than the answer that is cached
                schemas.cache_clear()
                versions = schemas(collection_id)
            if not 1 <= version <= len(versions):
                return {"error": f"no schema version {version} of collection {collection_id} is known here"}
            return decode_rows(payload, _columns(versions[version - 1], kind)).to_pylist()
        except (MillraceError, ValueError) as error:
            return {"error": str(error)}

    return read


def _columns(schema: CollectionSchema, kind: MessageType) -> pa.Schema:
    return schema.arrow() if kind in ROW_CARRYING_TYPES else schema.key_arrow()


def principals_of(unit: ImmutableMessage | ImmutableTxn) -> set[str]:
    """Return who appended a unit of a scan: one name, or those of a transaction's messages."""
    messages = (unit.commit, *unit.bodies) if isinstance(unit, ImmutableTxn) else (unit,)
    return {message.principal for message in messages}


def unit_json(unit: ImmutableMessage | ImmutableTxn, payload: PayloadDecoder | None) -> dict[str, Any]:
    """Return a unit of a scan as JSON: a message, or a transaction with its messages in `messages`."""
    if isinstance(unit, ImmutableTxn):
        return {
            "type": "TXN",
            "id": str(unit.id),
            "time_tick": unit.time_tick,
            "time": iso_time(unit.commit.physical_ms),
            "vchannel": unit.vchannel,
            "txn_id": unit.txn_id,
            "last_confirmed": str(unit.last_confirmed),
            "messages": [_message_json(each, payload) for each in unit.bodies],
        }
    return _message_json(unit, payload)


def _message_json(message: ImmutableMessage, payload: PayloadDecoder | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": MessageType(message.type).name,
        "id": str(message.id),
        "time_tick": message.time_tick,
        "time": iso_time(message.physical_ms),
        "vchannel": message.vchannel,
        "term": message.term,
        "last_confirmed": str(message.last_confirmed),
        "bytes": len(message.payload),
    }
    found |= {name: value for name in _NUMBERS if (value := getattr(message, name))}
    if message.principal:
        found["principal"] = message.principal
    if payload is not None and message.payload:
        found["payload"] = payload(message.type, message.collection_id, message.schema_version, message.payload)
    return found


def log_json(entries: pa.RecordBatch, payload: PayloadDecoder | None) -> Iterator[dict[str, Any]]:
    """Yield the messages of log entries (ENTRY_SCHEMA) as they were appended, before the chain."""
    for row in decode_entries(entries).to_pylist():
        number = row["type"]
        found: dict[str, Any] = {
            "type": MessageType(number).name if number in set(MessageType) else number,
            "id": f"{row['ledger']}:{row['entry']}:{row['index']}",
            "time": iso_time(row["physical_ms"]),
            "vchannel": row["vchannel"],
            "term": row["term"],
            "bytes": len(row["payload"]),
        }
        found |= {name: row[name] for name in _NUMBERS if row.get(name)}
        if row["principal"] is not None:
            found["principal"] = row["principal"]
        if row["detail"] is not None:
            found["error"] = row["detail"]
        elif payload is not None and row["payload"]:
            found["payload"] = payload(number, row["collection_id"], row["schema_version"], row["payload"])
        yield found
