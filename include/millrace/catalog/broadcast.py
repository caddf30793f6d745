"""Broadcasts of messages: what a caller submits, its limits, and its JSON form for the wire and the ledger.

A broadcast is one message for each of several VChannels. All of them get theirs, or none does.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from millrace.base.errors import EntryTooLarge, InvalidArgument
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType

MESSAGE_KIND: Final = "message"
"""The kind of a broadcast that has no callbacks."""
BROADCAST_TYPES: Final = (MessageType.INSERT, MessageType.UPSERT, MessageType.DELETE, MessageType.MANUAL_FLUSH)
"""Types of messages that may be broadcast. DDL has calls of its own."""
MAX_MESSAGES: Final = 1024
"""Messages, and so VChannels, of one broadcast."""
MAX_MESSAGE_BYTES: Final = 256 * 1024
"""Bytes of all payloads of one broadcast, which is stored as one record of the catalog."""
MAX_DATA_BYTES: Final = 16 * 1024
"""Bytes of a broadcast's `data`, as JSON."""

_KIND: Final = re.compile(r"[a-z][0-9a-z_-]{0,63}")
_FIELDS: Final = ("vchannel", "collection_id", "partition_id", "schema_version", "rows")


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """A broadcast that every VChannel has."""

    id: int
    """Grows from broadcast to broadcast of a VChannel."""
    ticks: dict[str, int]
    """Time tick of each VChannel's message; 0 for a flush of a VChannel that had nothing to flush."""


def check_kind_name(name: object) -> str:
    """Return the name of a kind of broadcast. Raises InvalidArgument."""
    if not isinstance(name, str) or not _KIND.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is not a kind of broadcast: a kind has a small letter, then small letters, digits, - and _"
        )
    return name


def check_messages(messages: Sequence[MutableMessage]) -> None:
    """Raises InvalidArgument or EntryTooLarge if `messages` cannot be one broadcast."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidArgument(f"a broadcast has 1 to {MAX_MESSAGES:,} messages, not {len(messages):,}")
    seen: set[str] = set()
    for each in messages:
        if each.type not in BROADCAST_TYPES:
            known = ", ".join(kind.name for kind in BROADCAST_TYPES)
            name = MessageType(each.type).name
            raise InvalidArgument(f"a message of type {name} cannot be broadcast; types are {known}")
        if each.vchannel in seen:
            raise InvalidArgument(
                f"a broadcast has one message for each VChannel, and two for {each.vchannel!r}: send the other as"
                " another broadcast"
            )
        seen.add(each.vchannel)
        if each.txn_id or each.producer_id:
            raise InvalidArgument(
                "a message of a broadcast is in no transaction and has no producer: the coordinator numbers it"
            )
    size = sum(len(each.payload) for each in messages)
    if size > MAX_MESSAGE_BYTES:
        raise EntryTooLarge(
            f"the messages of a broadcast take {size:,} bytes, {MAX_MESSAGE_BYTES:,} are allowed: split it, or load"
            " the rows from files"
        )


def check_data(data: object) -> dict[str, Any]:
    """Return the `data` of a broadcast, a JSON object. Raises InvalidArgument."""
    if data is None:
        return {}
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the data of a broadcast is a JSON object: {error}") from None
    if not isinstance(data, dict) or len(text) > MAX_DATA_BYTES:
        raise InvalidArgument(f"the data of a broadcast is a JSON object of at most {MAX_DATA_BYTES:,} bytes")
    found: dict[str, Any] = json.loads(text)
    return found


def message_to_json(message: MutableMessage) -> dict[str, Any]:
    """Return a message without its term and producer."""
    found: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS}
    payload = base64.b64encode(bytes(message.payload)).decode()
    return found | {"type": MessageType(message.type).name, "payload": payload}


def message_from_json(value: Mapping[str, Any]) -> MutableMessage:
    """Invert :func:`message_to_json`. Raises InvalidArgument."""
    try:
        numbers = {name: int(value[name]) for name in _FIELDS[1:]}
        if not isinstance(value["vchannel"], str) or any(not 0 <= each < 1 << 63 for each in numbers.values()):
            raise ValueError("a field is out of range")
        payload = base64.b64decode(value["payload"], validate=True)
        return MutableMessage(
            type=MessageType[value["type"]], vchannel=value["vchannel"], term=0, payload=payload, **numbers
        )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InvalidArgument(f"this is not a message of a broadcast: {error!r}") from None


def content_digest(messages: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> str:
    """Return a digest by which a repeated request is recognised as the same broadcast."""
    return xxhash.xxh3_128_hexdigest(json.dumps([list(messages), data], sort_keys=True).encode())
