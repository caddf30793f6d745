"""The tail: the newest messages of a PChannel as a reader gets them, and their wire form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.ids import MessageId, tick_physical_ms
from millrace.message.model import ImmutableMessage
from millrace.message.types import MessageType
from millrace.wal.schema import ROW_SCHEMA

_BODIES: Final = [kind.name for kind in (MessageType.INSERT, MessageType.UPSERT, MessageType.DELETE)]


@dataclass(frozen=True, slots=True)
class TailBatch:
    """Messages (ROW_SCHEMA, in tick order) after the requested tick, complete up to `confirmed_tick`."""

    batches: list[pa.RecordBatch]
    confirmed_tick: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The requested tick is before the buffer: everything after `earliest` is available here, the rest in ``wal``."""

    earliest: int


@dataclass(frozen=True, slots=True)
class DecidedMessages:
    """Messages that a read of one collection takes from the tails of its PChannels, in one call."""

    ticks: Mapping[str, int]
    """For each PChannel, the tick up to which everything is decided."""
    messages: Mapping[str, Sequence[pa.RecordBatch]]
    """For each PChannel, the messages (ROW_SCHEMA, in tick order) after the requested tick, up to its tick or further.
    Without time ticks and bodies of other collections.
    """
    complete: bool
    """False if a buffer does not reach back to the requested tick, or the messages exceed the requested size."""


def messages_of(collection_id: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the messages that concern a collection: all but time ticks and the bodies of other collections."""
    kind = batch["type"].cast(pa.utf8())
    body, tick = pc.is_in(kind, pa.array(_BODIES)), pc.equal(kind, MessageType.TIME_TICK.name)
    selected = pc.or_(pc.equal(batch["collection_id"], collection_id), pc.invert(body))
    return batch.filter(pc.and_not(selected, tick))


class TailSource(Protocol):
    """The source of the tail: an AppendHost, or an AppendClient."""

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> TailBatch | Evicted:
        """Return what comes after `after_tick`; wait up to `timeout` seconds if there is nothing."""
        ...

    def time_tick(self, pchannel: str, *, persist: bool = True, deadline: float = 30.0) -> TimeTick:
        """Append a time tick and return one up to which every earlier append is decided.

        Without `persist`, append nothing; the tick of a broker's log then moves with its entries alone.
        """
        ...


class TimeTick(NamedTuple):
    """A time tick as it was made: everything up to `time_tick` is decided."""

    time_tick: int
    last_confirmed: MessageId
    """A reader that starts there misses nothing that becomes visible after `time_tick`."""
    id: MessageId
    """The message's id; of a tick that is not persisted, `last_confirmed`."""
    persisted: bool
    """Whether the log has an entry of it."""
    term: int = 0

    def message(self) -> ImmutableMessage:
        """Return it as readers get it."""
        return ImmutableMessage(
            id=self.id,
            last_confirmed=self.last_confirmed,
            type=MessageType.TIME_TICK,
            term=self.term,
            time_tick=self.time_tick,
            physical_ms=tick_physical_ms(self.time_tick),
            not_persisted=not self.persisted,
        )


class Mvcc(NamedTuple):
    """The MVCC state of a VChannel: the reference document's ``MVCCInfo``."""

    vchannel: str
    time_tick: int
    """The greatest tick at which something became visible there, as far as the log is decided (docs/chain.md)."""
    confirmed: bool
    """Whether everything on the VChannel that was in the log at the time of the call is decided.

    A read at `time_tick` then sees every earlier append.
    """
    unconfirmed: int = 0
    """The least tick that a message which is not decided yet can have there.

    A read below it is complete, whatever the other VChannels of the PChannel wait for.
    """
    updates: int = 0
    """Number of moves of `time_tick` that the host has seen since it follows the PChannel."""


TAIL_SCHEMA: Final = pa.schema(
    [
        pa.field(field.name, field.type.value_type, field.nullable) if pa.types.is_dictionary(field.type) else field
        for field in ROW_SCHEMA
    ]
)
"""ROW_SCHEMA on the wire: Flight cannot send dictionaries and metadata together."""


def wire_schema(names: Sequence[str]) -> pa.Schema:
    """Return the columns of TAIL_SCHEMA with these names, in order."""
    return pa.schema([TAIL_SCHEMA.field(name) for name in names])


def to_wire_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert a batch with ROW_SCHEMA, or some of its columns, to TAIL_SCHEMA."""
    if batch.schema.equals(ROW_SCHEMA):  # the usual case: only the dictionaries change
        for place in _DICTIONARIES:
            batch = batch.set_column(place, TAIL_SCHEMA.field(place), batch.column(place).dictionary_decode())
        return batch
    columns = [each.dictionary_decode() if isinstance(each, pa.DictionaryArray) else each for each in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=wire_schema(batch.schema.names))


def from_wire_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert a batch from the wire back to ROW_SCHEMA.

    Whole rows without principals (those of an older server, and those that did not ask for them) get empty ones.
    """
    if batch.schema.names == _ANONYMOUS:
        batch = batch.append_column("principal", pa.nulls(batch.num_rows, pa.utf8()))
    if batch.schema.equals(TAIL_SCHEMA):
        for place in _DICTIONARIES:
            batch = batch.set_column(place, ROW_SCHEMA.field(place), batch.column(place).dictionary_encode())
        return batch
    schema = pa.schema([ROW_SCHEMA.field(name) for name in batch.schema.names])
    arrays = [
        column.dictionary_encode() if pa.types.is_dictionary(field.type) else column
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_ANONYMOUS: Final = [name for name in ROW_SCHEMA.names if name != "principal"]
"""Columns of rows on the wire for a client that did not ask for principals: an older one takes no others."""
_DICTIONARIES: Final = [place for place, field in enumerate(ROW_SCHEMA) if pa.types.is_dictionary(field.type)]
