"""The header of a message, declared once: :class:`Header` as a value, ``HEADER`` as its columns.

The wire form, the batch form and the rows of ``wal`` are derived from it. A new field is a column of all three. The
wire form and stored rows are formats (docs/wire-form.md), so a new field needs a new version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, get_type_hints

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Header:
    """The header of every message, without its payload. A default means "absent". Positional use is for code that
    builds it from columns.

    ``type`` is a number of :class:`~millrace.message.types.MessageType`, or one that this build does not know.
    """

    type: Annotated[int, pa.uint16()]
    """0 (UNDEFINED) marks an entry that could not be decoded."""
    vchannel: Annotated[str, pa.dictionary(pa.int32(), pa.utf8())] = ""
    """The empty name means the whole PChannel."""
    term: Annotated[int, pa.int64()] = 0
    """The WAL term in which it was appended."""
    collection_id: Annotated[int, pa.int64()] = 0
    partition_id: Annotated[int, pa.int64()] = 0
    """0: none (for a delete: all partitions)."""
    schema_version: Annotated[int, pa.int32()] = 0
    rows: Annotated[int, pa.int64()] = 0
    """Rows of an insert or keys of a delete, as declared by the producer."""
    txn_id: Annotated[int, pa.int64()] = 0
    """Chosen by the producer; 0: outside any transaction."""
    producer_id: Annotated[int, pa.int64()] = 0
    """0: not idempotent."""
    epoch: Annotated[int, pa.int32()] = 0
    """The producer's epoch."""
    sequence: Annotated[int, pa.int64()] = 0
    """Counts from 0 per (producer, epoch, VChannel)."""
    barrier_tick: Annotated[int, pa.int64()] = 0
    """The message's time tick must be greater; 0: none. It is consumed when the tick is allocated, so rows do not have
    it."""


HEADER: Final[dict[str, pa.DataType]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Header, include_extras=True).items()
}
"""The columns, in the order of the wire form."""

NUMERIC_FIELDS: Final = tuple(name for name in HEADER if name not in ("type", "vchannel", "barrier_tick"))
"""The columns that are stored in a row of ``wal`` unchanged."""


def header_fields(*names: str) -> list[pa.Field]:
    """Return the Arrow fields of these columns."""
    return [pa.field(name, HEADER[name], nullable=False) for name in names]
