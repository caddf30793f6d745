"""The wire form of a message: a fixed header with a checksum, hash keys, trace context, body (docs/msgstream.md).

Any bytes give an Envelope or a typed error (Malformed, UnsupportedVersion). Parsing allocates memory in proportion to
the input. The body's meaning is defined in millrace.msgstream.messages.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from crc32c import crc32c

from millrace.base.errors import InvalidArgument, Malformed, UnsupportedVersion

MAGIC: Final = b"MS"
VERSION: Final = 1
MAX_TRACE_BYTES: Final = 8 << 10

_HEADER: Final = struct.Struct("<2sBBIIIqQQqII")
HEADER_BYTES: Final = _HEADER.size
_COVERED: Final = 8
"""Offset from which the checksum covers the message."""

_TYPE: Final = struct.Struct("<I")


class Envelope(NamedTuple):
    """A message's parts; the body is not parsed."""

    type: int
    id: int
    begin_ts: int
    end_ts: int
    source_id: int
    hash_keys: tuple[int, ...]
    trace_ctx: Mapping[str, str]
    body: memoryview


def write(envelope: Envelope) -> bytes:
    """Return the bytes of a message.

    Raises InvalidArgument if a value does not fit.
    """
    kind, id_, begin_ts, end_ts, source_id, hash_keys, trace_ctx, body = envelope
    if begin_ts > end_ts:
        raise InvalidArgument(f"a message's begin_ts {begin_ts} is after its end_ts {end_ts}")
    trace = b"".join([text_to_bytes(part) for pair in trace_ctx.items() for part in pair])
    if len(trace) > MAX_TRACE_BYTES:
        raise InvalidArgument(f"a trace context has at most {MAX_TRACE_BYTES} bytes, not {len(trace)}")
    try:
        covered = b"".join(
            (
                _HEADER.pack(
                    MAGIC, VERSION, 0, 0, kind, len(hash_keys), id_, begin_ts, end_ts, source_id, len(trace), len(body)
                )[_COVERED:],
                struct.pack(f"<{len(hash_keys)}I", *hash_keys),
                trace,
                body,
            )
        )
    except struct.error as error:
        raise InvalidArgument(
            f"a message has a 64-bit id and source, unsigned 64-bit time stamps, unsigned 32-bit hash keys ({error})"
        ) from None
    return struct.pack("<2sBBI", MAGIC, VERSION, 0, crc32c(covered)) + covered


def read(data: bytes | memoryview) -> Envelope:
    """Inverse of :func:`write`.

    Raises Malformed, UnsupportedVersion.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise Malformed(f"a message has at least {HEADER_BYTES} bytes, not {len(view)}")
    header = _HEADER.unpack_from(view, 0)
    magic, version, flags, crc, kind, keys, id_, begin_ts, end_ts, source_id, trace_bytes, body_bytes = header
    if magic != MAGIC:
        raise Malformed("the bytes do not start with the magic number of a message")
    if version != VERSION:
        raise UnsupportedVersion(f"a message of version {version}; this build knows {VERSION}")
    if crc32c(view[_COVERED:]) != crc:
        raise Malformed("the message fails its checksum")
    if flags:
        raise Malformed(f"the message has flags {flags:#x}, and version {VERSION} has none")
    trace_at = HEADER_BYTES + 4 * keys
    body_at = trace_at + trace_bytes
    if body_at + body_bytes != len(view) or trace_bytes > MAX_TRACE_BYTES:
        raise Malformed("the lengths in the message's header do not match its size")
    if begin_ts > end_ts:
        raise Malformed("the message's begin_ts is after its end_ts")
    hash_keys = struct.unpack_from(f"<{keys}I", view, HEADER_BYTES) if keys else ()
    trace_ctx = _trace(view[trace_at:body_at]) if trace_bytes else {}
    return Envelope(kind, id_, begin_ts, end_ts, source_id, hash_keys, trace_ctx, view[body_at:])


def peek_type(data: bytes | memoryview) -> int:
    """Return the type number in the bytes, without further checks.

    Raises Malformed if they are too short.
    """
    if len(data) < HEADER_BYTES:
        raise Malformed(f"a message has at least {HEADER_BYTES} bytes, not {len(data)}")
    return int(_TYPE.unpack_from(data, _COVERED)[0])


def text_to_bytes(text: str) -> bytes:
    """Return a string as its length (16 bits) and UTF-8.

    Raises InvalidArgument above 65,535 bytes.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument("a text must be encodable as UTF-8") from None
    if len(data) > 0xFFFF:
        raise InvalidArgument(f"a text has at most 65535 bytes, not {len(data)}")
    return len(data).to_bytes(2, "little") + data


class ByteReader:
    """Reads values from the front of bytes; raises Malformed at a premature end."""

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def raw(self, count: int) -> memoryview:
        """Return the next `count` bytes."""
        end = self._at + count
        if end > len(self._view):
            raise Malformed("the message's body is truncated")
        part = self._view[self._at : end]
        self._at = end
        return part

    def number(self, count: int) -> int:
        """Return an unsigned little-endian integer of `count` bytes."""
        return int.from_bytes(self.raw(count), "little")

    def text(self) -> str:
        """Inverse of :func:`text_to_bytes`."""
        try:
            return str(self.raw(self.number(2)), "utf-8")
        except UnicodeDecodeError:
            raise Malformed("a text in the message is not UTF-8") from None

    def rest(self) -> memoryview:
        """Return all remaining bytes."""
        return self.raw(len(self._view) - self._at)

    def end(self) -> None:
        """Raise Malformed if bytes remain."""
        if self._at != len(self._view):
            raise Malformed("the message's body has extra bytes at its end")

    @property
    def left(self) -> int:
        return len(self._view) - self._at


def _trace(view: memoryview) -> dict[str, str]:
    cursor = ByteReader(view)
    found: dict[str, str] = {}
    while cursor.left:
        key, value = cursor.text(), cursor.text()
        if key in found:
            raise Malformed("the trace context has a key twice")
        found[key] = value
    return found
