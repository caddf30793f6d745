"""What a reader is told of the newest messages of a PChannel, and how these rows cross the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa

from millrace.wal.schema import ROW_SCHEMA


@dataclass(frozen=True, slots=True)
class TailBatch:
    """Messages (ROW_SCHEMA, in tick order) behind the asked tick, and the tick up to which they are all there is."""

    batches: list[pa.RecordBatch]
    confirmed_tick: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The asked tick lies before the buffer: everything behind `earliest` can be had here, the rest from ``wal``."""

    earliest: int


class Mvcc(NamedTuple):
    """A VChannel's MVCC: the reference document's ``MVCCInfo``."""

    vchannel: str
    time_tick: int
    """The greatest tick at which something became visible there, as far as the log is decided (docs/chain.md)."""
    confirmed: bool
    """Whether all that the log held when this was asked is decided: a read at `time_tick` then sees every append before."""


TAIL_SCHEMA: Final = pa.schema(
    [
        pa.field(field.name, field.type.value_type, field.nullable) if pa.types.is_dictionary(field.type) else field
        for field in ROW_SCHEMA
    ]
)
"""ROW_SCHEMA on the wire: Flight sends no dictionaries beside metadata."""


def wire_schema(names: Sequence[str]) -> pa.Schema:
    """Of TAIL_SCHEMA the columns of these names, in their order."""
    return pa.schema([TAIL_SCHEMA.field(name) for name in names])


def to_wire_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of ROW_SCHEMA, or of some of its columns, as TAIL_SCHEMA has them."""
    columns = [each.dictionary_decode() if isinstance(each, pa.DictionaryArray) else each for each in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=wire_schema(batch.schema.names))


def from_wire_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch from the wire as ROW_SCHEMA has its columns again."""
    schema = pa.schema([ROW_SCHEMA.field(name) for name in batch.schema.names])
    arrays = [
        column.dictionary_encode() if pa.types.is_dictionary(field.type) else column
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
