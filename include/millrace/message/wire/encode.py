"""Encode log entries from message objects, or from columns that a producer already has."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.message.header import HEADER
from millrace.message.model import MutableMessage, Payload
from millrace.message.wire.layout import (
    ABSENT,
    ARRAY,
    ASSERTED,
    BYTES_PER_MESSAGE,
    COLUMNS,
    COLUMNS_START,
    CONSTANT,
    CRC_START,
    MAGIC,
    MAX_MESSAGES,
    MAX_NAME_BYTES,
    MAX_STAMP_BYTES,
    PREFIX,
    RAMP,
    STAMPED,
    UNSTAMPED,
    HeaderColumn,
)

Int64s = npt.NDArray[np.int64]
Numbers: TypeAlias = int | Sequence[int] | npt.NDArray[np.integer] | pa.Array
VChannels: TypeAlias = str | Sequence[str] | pa.Array
Payloads: TypeAlias = Sequence[Payload] | pa.LargeBinaryArray

_MAX_SECTION: Final = (1 << 32) - 1
_NUMBER_COLUMNS: Final = COLUMNS[2:-1]
_HEADER: Final = attrgetter(*HEADER)
_VALUES: Final = {name: attrgetter(name) for name in HEADER}
_CONSTANTS: Final = tuple(struct.Struct("<" + column.code) for column in COLUMNS)


def encode_entry(messages: Sequence[MutableMessage], *, principal: str = "") -> bytes:
    """Return one log entry that frames `messages` (1 to 65,536), in order.

    `principal` names the writer in an asserted stamp, for a producer that writes to a broker directly. A log's server
    replaces it.
    Raises InvalidArgument for a header value that the wire form cannot carry, type 0, a VChannel name above 255 bytes,
    or sections above 4 GiB. The chain judges whether the messages make sense.
    """
    if len(messages) == 1:
        return _one(messages[0], principal)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidArgument(f"an entry frames 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    header: dict[str, list[Any]] = {name: list(map(value, messages)) for name, value in _VALUES.items()}
    return encode_columns(**header, payloads=[message.payload for message in messages], principal=principal)


def encode_columns(
    *,
    type: Numbers,
    vchannel: VChannels,
    payloads: Payloads,
    principal: str = "",
    **others: Numbers,
) -> bytes:
    """Return one log entry of ``len(payloads)`` messages from header columns: each a scalar, or an array of that
    length.

    `others` are the header's numbers by name; absent ones are 0. `principal` as in :func:`encode_entry`.
    The bytes equal those of :func:`encode_entry` for the same messages.
    Raises as it does, and for columns of other lengths.
    """
    count = len(payloads)
    if not 1 <= count <= MAX_MESSAGES:
        raise InvalidArgument(f"an entry frames 1 to {MAX_MESSAGES} messages, not {count}")
    body, lengths = _body(payloads)
    names, indices = _vchannels(vchannel, count)
    given = [others.pop(column.name, 0) for column in _NUMBER_COLUMNS]
    if others:
        raise InvalidArgument(f"no header has the column {next(iter(others))!r}")
    values = [_checked(type, COLUMNS[0], count), indices]
    values += [_checked(value, column, count) for value, column in zip(given, _NUMBER_COLUMNS, strict=True)]
    values.append(lengths)
    if int(np.min(values[0])) == 0:
        raise InvalidArgument("type 0 marks what did not decode; it is never written")

    encoded = [_column(value, column, count) for value, column in zip(values, COLUMNS, strict=True)]
    dictionary = _dictionary(names)
    size = COLUMNS_START + sum(len(data) for _, data in encoded) + len(dictionary) + int(lengths.sum())
    for place in range(2, len(COLUMNS)):
        # Pad to the minimum size of an entry with this many messages: write the first wide columns in full.
        if size >= count * BYTES_PER_MESSAGE:
            break
        tag, data = encoded[place]
        if tag != ARRAY:
            encoded[place] = (ARRAY, _full(values[place], COLUMNS[place], count))
            size += len(encoded[place][1]) - len(data)
    tags = bytes(tag for tag, _ in encoded)
    return _assemble(count, tags, b"".join(data for _, data in encoded), dictionary, body, principal)


def _assemble(
    count: int, tags: bytes, columns: bytes, dictionary: bytes, body: Sequence[Payload], principal: str
) -> bytes:
    """Return the entry; the parts of its body are copied once, here."""
    size = sum(map(len, body))
    if size > _MAX_SECTION:
        raise InvalidArgument("an entry's payloads have less than 4 GiB in sum: split it")
    stamp = stamp_bytes(principal)
    version, flags = (STAMPED, ASSERTED) if stamp else (UNSTAMPED, 0)
    prefix = PREFIX.pack(MAGIC, 0, version, flags, len(stamp), count, len(columns), len(dictionary), size)
    head = b"".join((prefix[CRC_START:], tags, columns, dictionary))
    crc = crc32c.crc32c(head)
    for part in (*body, stamp):
        crc = crc32c.crc32c(part, crc)
    return b"".join((MAGIC, crc.to_bytes(4, "little"), head, *body, stamp))


def stamp_bytes(principal: str) -> bytes:
    """Return a principal's name as the bytes of a stamp. Raises InvalidArgument if it is too long or not UTF-8."""
    try:
        data = principal.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument("a principal's name must be encodable as UTF-8") from None
    if len(data) > MAX_STAMP_BYTES:
        raise InvalidArgument(f"a principal's name has at most {MAX_STAMP_BYTES} bytes, not {len(data)}")
    return data


def _one(message: MutableMessage, principal: str) -> bytes:
    kind, _, *others = _HEADER(message)
    values = (kind, 0, *others, len(message.payload))
    if message.type == 0:
        raise InvalidArgument("type 0 marks what did not decode; it is never written")
    tags = bytearray(len(COLUMNS))
    columns = bytearray()
    for place, value in enumerate(values):
        if value:
            if not 0 < value <= COLUMNS[place].max_value:
                raise _out_of_range(COLUMNS[place])
            tags[place] = CONSTANT
            columns += _CONSTANTS[place].pack(value)
    return _assemble(1, bytes(tags), bytes(columns), _dictionary([message.vchannel]), [message.payload], principal)


def _dictionary(names: Sequence[str]) -> bytes:
    parts = [len(names).to_bytes(2, "little")]
    for name in names:
        try:
            data = name.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidArgument("a VChannel's name must be encodable as UTF-8") from None
        if len(data) > MAX_NAME_BYTES:
            raise InvalidArgument(f"a VChannel's name has at most {MAX_NAME_BYTES} bytes, not {len(data)}")
        parts += (len(data).to_bytes(2, "little"), data)
    return b"".join(parts)


def _vchannels(vchannel: VChannels, count: int) -> tuple[list[str], Int64s]:
    """Return the distinct names in order of first use, and each message's index (one index for a scalar)."""
    if isinstance(vchannel, str):
        return [vchannel], np.zeros(1, dtype=np.int64)
    if len(vchannel) != count:
        raise InvalidArgument(f"the column vchannel has {len(vchannel)} values for {count} messages")
    try:
        array = vchannel if isinstance(vchannel, pa.Array) else pa.array(vchannel, pa.utf8())
    except (pa.ArrowException, UnicodeEncodeError):
        raise InvalidArgument("a VChannel's name is a string that UTF-8 can encode") from None
    if array.null_count:
        raise InvalidArgument('a VChannel is never null; "" is the whole PChannel')
    if pa.types.is_dictionary(array.type):
        array = array.cast(pa.utf8())
    coded = array.dictionary_encode()
    names = coded.dictionary.to_pylist()
    if len(names) > (1 << 16) - 1:
        raise InvalidArgument("an entry names at most 65,535 VChannels")
    return names, coded.indices.to_numpy().astype(np.int64)


def _body(payloads: Payloads) -> tuple[Sequence[Payload], Int64s]:
    """Return the body in parts, and the length of each payload."""
    if not isinstance(payloads, pa.Array):
        lengths = np.fromiter(map(len, payloads), dtype=np.int64, count=len(payloads))
        return payloads, lengths
    if payloads.null_count or not pa.types.is_large_binary(payloads.type):
        raise InvalidArgument("payloads are a large_binary array without nulls")
    _, offsets_buffer, data = payloads.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64, count=len(payloads) + 1, offset=payloads.offset * 8)
    whole = memoryview(data if data is not None else b"")
    return [whole[int(offsets[0]) : int(offsets[-1])]], np.diff(offsets)


def _checked(value: Numbers, column: HeaderColumn, count: int) -> Int64s:
    """Return the column as int64, with `count` values or (for a scalar) one, each checked against the column's
    range.
    """
    if isinstance(value, int):
        if not 0 <= value <= column.max_value:
            raise _out_of_range(column)
        return np.array([value], dtype=np.int64)
    try:
        array = np.asarray(value.to_numpy(zero_copy_only=False) if isinstance(value, pa.Array) else value)
    except OverflowError:
        raise _out_of_range(column) from None
    if array.shape != (count,):
        raise InvalidArgument(f"the column {column.name} has shape {array.shape} for {count} messages")
    if array.dtype.kind not in "iu":
        # Integers beyond int64 also end here, as an object or float array.
        raise _out_of_range(column)
    if int(array.min()) < 0 or int(array.max()) > column.max_value:
        raise _out_of_range(column)
    return array.astype(np.int64, copy=False)


def _out_of_range(column: HeaderColumn) -> InvalidArgument:
    return InvalidArgument(f"{column.name} is an integer from 0 to {column.max_value}")


def _column(values: Int64s, column: HeaderColumn, count: int) -> tuple[int, bytes]:
    """Return the tag and the bytes of a column, in its shortest form."""
    first = int(values[0])
    if len(values) == 1 or bool((values == first).all()):
        return (CONSTANT, values[:1].astype(column.dtype).tobytes()) if first else (ABSENT, b"")
    if int(values[-1]) - first == count - 1 and bool((np.diff(values) == 1).all()):
        return RAMP, values[:1].astype(column.dtype).tobytes()
    return ARRAY, values.astype(column.dtype).tobytes()


def _full(values: Int64s, column: HeaderColumn, count: int) -> bytes:
    return np.broadcast_to(values, (count,) if len(values) == 1 else values.shape).astype(column.dtype).tobytes()
