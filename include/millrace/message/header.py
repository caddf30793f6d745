"""The header of a message, declared once: :class:`Header` is it as a value, ``HEADER`` its columns, of which the wire form, the
batch form and the rows of ``wal`` are made.

A field added here is a column of all of them: the wire form and stored rows are formats (docs/wire-form.md), so it is more than a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, get_type_hints

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Header:
    """What every message carries beside its payload. The default stands for "absent". By place only where it is made of columns.

    ``type`` is a number of :class:`~millrace.message.types.MessageType`, or one that this build does not know.
    """

    type: Annotated[int, pa.uint16()]
    """0 (UNDEFINED) marks an entry that did not decode."""
    vchannel: Annotated[str, pa.dictionary(pa.int32(), pa.utf8())] = ""
    """The empty name is the whole PChannel."""
    term: Annotated[int, pa.int64()] = 0
    """WAL term it was appended under."""
    collection_id: Annotated[int, pa.int64()] = 0
    partition_id: Annotated[int, pa.int64()] = 0
    """0: none (a delete: all partitions)."""
    schema_version: Annotated[int, pa.int32()] = 0
    rows: Annotated[int, pa.int64()] = 0
    """Rows of an insert, keys of a delete, as the producer says."""
    txn_id: Annotated[int, pa.int64()] = 0
    """Chosen by the producer; 0: outside any transaction."""
    producer_id: Annotated[int, pa.int64()] = 0
    """0: not idempotent."""
    epoch: Annotated[int, pa.int32()] = 0
    """Of the producer."""
    sequence: Annotated[int, pa.int64()] = 0
    """Per (producer, epoch, VChannel), from 0."""
    barrier_tick: Annotated[int, pa.int64()] = 0
    """The message's time tick must be greater; 0: none. It is spent when the tick is given: rows do not have it."""


HEADER: Final[dict[str, pa.DataType]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Header, include_extras=True).items()
}
"""The columns, in the order of the wire form."""

NUMERIC_FIELDS: Final = tuple(name for name in HEADER if name not in ("type", "vchannel", "barrier_tick"))
"""The columns that go into a row of ``wal`` as they came."""


def header_fields(*names: str) -> list[pa.Field]:
    """Columns of a schema."""
    return [pa.field(name, HEADER[name], nullable=False) for name in names]
