"""The chain for a few plain messages, without columns: the interceptors' verdicts at a fraction of their cost.

A server that answers small appends runs the chain over one message or a few at a time, and most of them change rows and
break no rule. The interceptors judge such a message with about two hundred operations on arrays of one value, each as
dear as one on thousands. Here the same rules are comparisons of numbers. A message that is not plain, or that sets
anything in motion besides its own rows (a rejection, a new segment, a seal, a timer), is left to the interceptors:
:func:`accept_plain` then returns None and nothing has happened.

A plain message changes rows outside any transaction, and follows its producer's last or begins an epoch.
tests/wal/test_fast_path.py holds this equal to the interceptors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import crc32c
import pyarrow as pa

from millrace.base.errors import MillraceError
from millrace.message.ids import LOGICAL_BITS, LogId
from millrace.message.keys import key_column, key_hash, vchannel_index
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema
from millrace.message.types import DML, MIN_CHAIN_VERSION, ROW_CARRYING_TYPES, MessageType
from millrace.message.wire.decode import parse_names, principal_of
from millrace.message.wire.layout import (
    ABSENT,
    ARRAY,
    ASSERTED,
    BYTES_PER_MESSAGE,
    COLUMNS,
    COLUMNS_START,
    CRC_START,
    MAGIC,
    MAX_STAMP_BYTES,
    PREFIX,
    RAMP,
    STAMPED,
    TAGS_START,
    UNSTAMPED,
)
from millrace.wal.interceptors.timetick.interceptor import MAX_BARRIER_AHEAD_MS
from millrace.wal.message_run import DecidedMessage
from millrace.wal.segments import NEVER
from millrace.wal.state import ChannelState, VChannelState

FEW: Final = 32
"""Maximum messages that are judged here: about 0.1 ms each, where the interceptors take 3 ms and 0.1 ms each."""

_CACHED: Final = 1024
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
    """Accepted messages in log order, and the state after them."""

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
    after = state.copy()
    messages: list[DecidedMessage] = []
    for place, (ledger, number, stamp) in enumerate(zip(ledgers, numbers, stamps, strict=True)):
        found = _parsed(whole[bounds[place] : bounds[place + 1]])
        if found is None or len(messages) + len(found) > FEW:
            return None
        for index, (header, vchannel, payload) in enumerate(found):
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
            message = DecidedMessage(
                kind,
                vchannel,
                *header[2:11],
                0,
                ledger,
                number,
                index,
                tick,
                0,
                0 if segment is None else segment.id,
                header.payload_length,
                None,
                b"",
            )
            evolve(after, message)
            if after.vchannels[vchannel].open_work(after.config).ready != NEVER:
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
    if producer is not None and producer.epoch == header.epoch:
        return producer.next_sequence == header.sequence
    if header.sequence:
        return False
    if producer is not None:
        return producer.epoch < header.epoch
    return not 0 < header.barrier_tick < channel.forgotten


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


# --- the wire form of few messages (docs/wire-form.md), as far as it needs no arrays ----------------------------------


class _Layout(NamedTuple):
    """The header columns of entries with the same tags and number of messages."""

    form: struct.Struct
    columns: tuple[tuple[int, int], ...]
    """Place and tag of each column that is there."""


_layouts: dict[tuple[bytes, int], _Layout] = {}
_dictionaries: dict[bytes, tuple[str, ...]] = {}
_stamps: set[bytes] = set()


def _parsed(entry: memoryview) -> list[tuple[_Header, str, memoryview]] | None:
    """Return header, VChannel and payload of an entry's messages; None if they are many, or the entry is not valid."""
    if len(entry) < COLUMNS_START:
        return None
    magic, crc, version, flags, stamp, count, columns, names, body = PREFIX.unpack_from(entry)
    if magic != MAGIC or not 1 <= count <= FEW:
        return None
    if version == STAMPED:
        if flags > ASSERTED or not 1 <= stamp <= MAX_STAMP_BYTES or not _is_name(bytes(entry[-stamp:])):
            return None
    elif version != UNSTAMPED or flags or stamp:
        return None
    layout = _layout(bytes(entry[TAGS_START:COLUMNS_START]), count)
    names_at = COLUMNS_START + columns
    body_at = names_at + names
    if (
        layout is None
        or layout.form.size != columns
        or body_at + body + stamp != len(entry)
        or count * BYTES_PER_MESSAGE > len(entry)
        or crc != crc32c.crc32c(entry[CRC_START:])
    ):
        return None
    headers = _headers(layout, layout.form.unpack_from(entry, COLUMNS_START), count)
    dictionary = _names_of(bytes(entry[names_at:body_at]))
    if headers is None or dictionary is None or sum(each.payload_length for each in headers) != body:
        return None
    found = []
    for header in headers:
        if header.vchannel >= len(dictionary):
            return None
        end = body_at + header.payload_length
        found.append((header, dictionary[header.vchannel], entry[body_at:end]))
        body_at = end
    return found


def _headers(layout: _Layout, values: tuple[int, ...], count: int) -> list[_Header] | None:
    columns: list[Sequence[int]] = [(0,) * count] * len(COLUMNS)
    at = 0
    for place, tag in layout.columns:
        given: Sequence[int]
        if tag == ARRAY:
            given = values[at : at + count]
            at += count
        else:
            first = values[at]
            given = range(first, first + count) if tag == RAMP else (first,) * count
            at += 1
        if min(given) < 0 or max(given) > _MAX[place]:
            return None
        columns[place] = given
    return list(map(_Header._make, zip(*columns, strict=True)))


def _layout(tags: bytes, count: int) -> _Layout | None:
    found = _layouts.get((tags, count))
    if found is None:
        if max(tags) > RAMP:
            return None
        columns = tuple((place, tag) for place, tag in enumerate(tags) if tag != ABSENT)
        codes = (COLUMNS[place].code if tag != ARRAY else f"{count}{COLUMNS[place].code}" for place, tag in columns)
        found = _Layout(struct.Struct("<" + "".join(codes)), columns)
        if len(_layouts) < _CACHED:
            _layouts[tags, count] = found
    return found


def _is_name(stamp: bytes) -> bool:
    """Return whether a stamp is the name of a principal."""
    if stamp not in _stamps:
        if principal_of(stamp, 0) is None:
            return False
        if len(_stamps) < _CACHED:
            _stamps.add(stamp)
    return True


def _names_of(section: bytes) -> tuple[str, ...] | None:
    """Return the names of a dictionary; None if it is not valid."""
    found = _dictionaries.get(section)
    if found is None:
        names = parse_names(section)
        if isinstance(names, str):
            return None
        found = names
        if len(_dictionaries) < _CACHED:
            _dictionaries[section] = found
    return found
