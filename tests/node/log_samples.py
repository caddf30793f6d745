"""Log entries for tests of the streaming node: each names what the chain makes of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import crc32c
import pyarrow as pa

from millrace.message.builders import flush_all, insert, term_opening, time_tick
from millrace.message.columns import MessageColumns
from millrace.message.wire.decode import decode_columns
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.layout import CRC_START, PREFIX, VERSIONS
from millrace.wal.chain import CHAIN_VERSION

TERM = 1


def opening() -> bytes:
    """Opens term 1: one message row. Everything before it is rejected."""
    return encode_entry([term_opening(term=TERM, chain_version=CHAIN_VERSION, config={})])


def accepted() -> bytes:
    """One message row."""
    return encode_entry([flush_all(term=TERM)])


def rejected(payload: bytes = b"") -> bytes:
    """One rejection row: an insert into a collection that does not exist, with `payload` in it."""
    batch = pa.RecordBatch.from_pydict({"key": pa.array([1], pa.int64()), "value": pa.array([payload], pa.binary())})
    return encode_entry([insert(batch, vchannel="p0_1v0", collection_id=1, partition_id=1, term=TERM)])


def tick() -> bytes:
    """A row only where a message row came since the last tick."""
    return encode_entry([time_tick(term=TERM)])


def poison() -> bytes:
    """An entry of a later version of the wire form: this build must not go beyond it."""
    data = bytearray(accepted())
    version_at = struct.calcsize("<4sI")
    data[version_at] = VERSIONS[-1] + 1
    data[version_at - 4 : version_at] = crc32c.crc32c(bytes(data[CRC_START:])).to_bytes(4, "little")
    assert len(data) > PREFIX.size
    return bytes(data)


@contextmanager
def later_build() -> Iterator[None]:
    """The chain of this process is that of a later build: it reads `poison` as it reads `accepted`."""

    def decode(entries: pa.RecordBatch) -> MessageColumns:
        values = [accepted() if value == poison() else value for value in entries.column("value").to_pylist()]
        read = pa.RecordBatch.from_arrays(
            [*entries.columns[:3], pa.array(values, pa.large_binary())], schema=entries.schema
        )
        return decode_columns(read)

    with mock.patch("millrace.wal.chain.decode_columns", decode):
        yield
