"""The chain for a few plain messages, without columns: the interceptors' verdicts at a fraction of their cost.

A server that answers single appends runs the chain over one entry or a few at a time, and most of them hold one message
that changes rows and breaks no rule. The interceptors judge such a message with about two hundred operations on arrays
of one value, each as dear as one on thousands. Here the same rules are comparisons of numbers. A message that is not
plain, or that sets anything in motion besides its own rows (a rejection, a new segment, a seal, a timer), is left to
the interceptors: :func:`accept_plain` then returns None and nothing has happened.

A plain message is the only one of its entry, changes rows outside any transaction, and follows its producer's last.
tests/wal/test_fast_path.py holds this equal to the interceptors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import crc32c
import pyarrow as pa

from millrace.base.errors import MillraceError
from millrace.message.ids import LOGICAL_BITS, LogId
from millrace.message.keys import key_column, key_hash, vchannel_index
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema
from millrace.message.types import DML, MIN_CHAIN_VERSION, ROW_CARRYING_TYPES, MessageType
from millrace.message.wire.layout import (
    ABSENT,
    COLUMNS,
    COLUMNS_START,
    CONSTANT,
    CRC_START,
    MAGIC,
    PREFIX,
    TAGS_START,
    VERSION,
)
from millrace.wal.message_run import DecidedMessage
from millrace.wal.state import ChannelState, VChannelState

FEW: Final = 32
"""Maximum entries that are judged here: about 0.2 ms each, where the interceptors take 3 ms and 0.1 ms each."""

MAX_BARRIER_AHEAD_MS: Final = 86_400_000
"""Milliseconds that a barrier tick may lie ahead of the log."""

_NAMES: Final = 1024
"""Tag patterns and dictionaries that are cached: writers use a handful, and other bytes must not fill the memory."""

_TYPES: Final = {kind.value: (kind, MIN_CHAIN_VERSION.get(kind, 1)) for kind in DML}
_MAX: Final = tuple(column.max_value for column in COLUMNS)


class _Header(NamedTuple):
    """The header columns of one message, in the order of the wire form."""

    type: int
    vchannel: int
    term: int
    collection_id: int
    partition_id: int
    schema_version: int
    rows: int
    txn_id: int
    producer_id: int
    epoch: int
    sequence: int
    barrier_tick: int
    payload_length: int


assert _Header._fields == tuple(column.name for column in COLUMNS)


@dataclass(frozen=True, slots=True)
class PlainOutcome:
    """Accepted messages in log order, one for each entry, and the state after them."""

    messages: list[DecidedMessage]
    state: ChannelState


def accept_plain(
    state: ChannelState,
    entries: pa.RecordBatch,
    evolve: Callable[[ChannelState, DecidedMessage], None],
) -> PlainOutcome | None:
    """Accept `entries` (ENTRY_SCHEMA) after `state`, or return None if one of them is not plain.

    `evolve` applies an accepted message to a state. `state` is not changed; what is not changed is shared.
    """
    if not 0 < entries.num_rows <= FEW or not state.term:
        return None
    ledgers, numbers, stamps = (entries.column(place).to_pylist() for place in range(3))
    if (ledgers[0], numbers[0]) < state.position:
        return None
    values = entries.column(3)
    _, offsets, data = values.buffers()
    bounds = struct.unpack_from(f"<{len(values) + 1}q", offsets, values.offset * 8)
    whole = memoryview(data)
    after = replace(state, vchannels=dict(state.vchannels))
    copied: set[str] = set()
    messages: list[DecidedMessage] = []
    for place, (ledger, number, stamp) in enumerate(zip(ledgers, numbers, stamps, strict=True)):
        found = _parsed(whole[bounds[place] : bounds[place + 1]])
        if found is None:
            return None
        header, vchannel, payload = found
        channel = after.vchannels.get(vchannel)
        if channel is None or not _is_plain(after, channel, header, stamp):
            return None
        tick = max(after.next_tick(stamp), header.barrier_tick + 1)
        if after.next_deadline() <= after.next_tick(stamp):
            return None
        kind = _judge_rows(channel, header, payload)
        if kind is None:
            return None
        segment = channel.growing.get(header.partition_id) if kind in ROW_CARRYING_TYPES else None
        if segment is None and kind in ROW_CARRYING_TYPES:
            return None
        if vchannel not in copied:
            copied.add(vchannel)
            channel = after.vchannels[vchannel] = channel.copy()
        message = DecidedMessage(
            kind,
            vchannel,
            *header[2:11],
            0,
            ledger,
            number,
            0,
            tick,
            0,
            0 if segment is None else segment.id,
            header.payload_length,
            None,
            b"",
        )
        evolve(after, message)
        if any(not sealed.txns for sealed in channel.sealed.values()):
            return None  # a segment is full: its Flush follows this message
        messages.append(message)
    after.last_entry = LogId(ledgers[-1], numbers[-1])
    after.last_entry_crc = int(crc32c.crc32c(whole[bounds[-2] : bounds[-1]]))
    return PlainOutcome(messages, after)


def _is_plain(state: ChannelState, channel: VChannelState, header: _Header, stamp: int) -> bool:
    """Return whether a message breaks no rule about its header."""
    known = _TYPES.get(header.type)
    if (
        known is None
        or known[1] > state.chain_version
        or header.term != state.term
        or header.txn_id
        or header.collection_id != channel.collection_id
        or not 1 <= header.schema_version <= len(channel.schemas)
        or header.payload_length > state.config.max_message_bytes
        or (header.barrier_tick >> LOGICAL_BITS) > stamp + MAX_BARRIER_AHEAD_MS
    ):
        return False
    if header.partition_id not in channel.partitions and (header.partition_id or known[0] is not MessageType.DELETE):
        return False
    if not header.producer_id:
        return True
    producer = channel.producers.get(header.producer_id)
    return producer is not None and (producer.epoch, producer.next_sequence) == (header.epoch, header.sequence)


def _judge_rows(channel: VChannelState, header: _Header, payload: memoryview) -> MessageType | None:
    """Return the type as which a message is accepted, or None if a rule about its rows is not certainly kept."""
    kind = _TYPES[header.type][0]
    schema = channel.schemas[header.schema_version - 1]
    carries = kind in ROW_CARRYING_TYPES
    if carries and channel.schemas[-1].has_row_rules:
        return None
    try:
        # A copy is aligned. One error or another, the interceptors find it again and word it.
        rows = decode_rows(pa.py_buffer(bytes(payload)), schema.arrow() if carries else schema.key_arrow())
    except MillraceError:
        return None
    if rows.num_rows != header.rows:
        return None
    if kind is MessageType.INSERT and schema.replaces_duplicates:
        kind = MessageType.UPSERT
    once = kind is MessageType.UPSERT and rows.num_rows > 1
    if (len(channel.vchannels) > 1 or once) and not _keys_belong(channel, schema, rows, once=once):
        return None
    return kind


def _keys_belong(channel: VChannelState, schema: CollectionSchema, rows: pa.RecordBatch, *, once: bool) -> bool:
    """Return whether all keys hash to the VChannel, and, with `once`, each is there once."""
    keys = key_column(rows, schema.key_names)
    if once and len(keys.unique()) < len(keys):
        return False
    count = len(channel.vchannels)
    if count == 1:
        return True
    if len(keys) == 1:
        return key_hash(keys[0].as_py()) % count == channel.number
    return bool((vchannel_index(keys, count) == channel.number).all())


# --- the wire form of one message (docs/wire-form.md), as far as it needs no arrays -----------------------------------

_layouts: dict[bytes, tuple[struct.Struct, tuple[int, ...]] | None] = {}
_dictionaries: dict[bytes, str | None] = {}


def _parsed(entry: memoryview) -> tuple[_Header, str, memoryview] | None:
    """Return header, VChannel and payload of an entry's only message; None if the entry is anything else."""
    if len(entry) < COLUMNS_START:
        return None
    magic, crc, version, flags, reserved, count, columns, names, body = PREFIX.unpack_from(entry)
    if magic != MAGIC or version != VERSION or flags or reserved or count != 1:
        return None
    tags = bytes(entry[TAGS_START:COLUMNS_START])
    layout = _layouts.get(tags)
    if layout is None:
        layout = _layout(tags)
        if layout is None:
            return None
        if len(_layouts) < _NAMES:
            _layouts[tags] = layout
    form, places = layout
    names_at = COLUMNS_START + columns
    body_at = names_at + names
    if form.size != columns or body_at + body != len(entry) or crc != crc32c.crc32c(entry[CRC_START:]):
        return None
    fields = [0] * len(COLUMNS)
    for place, value in zip(places, form.unpack_from(entry, COLUMNS_START), strict=True):
        if not 0 <= value <= _MAX[place]:
            return None
        fields[place] = value
    header = _Header._make(fields)
    if header.vchannel or header.payload_length != body:
        return None
    section = bytes(entry[names_at:body_at])
    vchannel = _dictionaries.get(section)
    if vchannel is None:
        vchannel = _only_name(section)
        if vchannel is None:
            return None
        if len(_dictionaries) < _NAMES:
            _dictionaries[section] = vchannel
    return header, vchannel, entry[body_at:]


def _layout(tags: bytes) -> tuple[struct.Struct, tuple[int, ...]] | None:
    """Return how the columns that are there lie one after the other; None for columns that are arrays."""
    if any(tag not in (ABSENT, CONSTANT) for tag in tags):
        return None
    places = tuple(place for place, tag in enumerate(tags) if tag)
    return struct.Struct("<" + "".join(COLUMNS[place].code for place in places)), places


def _only_name(section: bytes) -> str | None:
    """Return the name of a dictionary with one name."""
    if section[:2] != b"\x01\x00" or len(section) < 4 or len(section) != 4 + int.from_bytes(section[2:4], "little"):
        return None
    try:
        return section[4:].decode("utf-8")
    except UnicodeDecodeError:
        return None
