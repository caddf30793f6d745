"""A message as an object: what a producer hands over (mutable) and what the WAL gives back (immutable).

The hot path works on columns (message/batch.py); these are for producers of few messages, for scanners and for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Self, TypeAlias, TypedDict, Unpack

from millrace.message.ids import MessageId

Payload: TypeAlias = bytes | memoryview
"""What a message carries, before it is in a log: rows lie in Arrow's own memory, and are copied into the entry alone."""


class MessageChanges(TypedDict, total=False):
    """What :meth:`MutableMessage.with_` can change."""

    type: int
    vchannel: str
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
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class MutableMessage:
    """A message before it is in a log. "Mutable" is Milvus's word for it: :meth:`with_` gives a changed copy.

    Fields are the header columns of the wire form; their meanings stand at message/batch.py. ``type`` is a number of
    :class:`~millrace.message.types.MessageType`, or one that this build does not know.
    """

    type: int
    vchannel: str = ""
    term: int = 0
    collection_id: int = 0
    partition_id: int = 0
    schema_version: int = 0
    rows: int = 0
    txn_id: int = 0
    producer_id: int = 0
    epoch: int = 0
    sequence: int = 0
    barrier_tick: int = 0
    payload: Payload = b""

    def with_(self, **changes: Unpack[MessageChanges]) -> Self:
        """A copy with `changes`."""
        return replace(self, **changes)


FIELDS: Final = tuple(field.name for field in fields(MutableMessage))
"""Names of a MutableMessage's fields, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImmutableMessage:
    """A message of the WAL: what was appended, and what the chain stamped on it."""

    id: MessageId
    time_tick: int
    last_confirmed: MessageId
    physical_ms: int
    type: int
    vchannel: str = ""
    term: int = 0
    collection_id: int = 0
    partition_id: int = 0
    segment_id: int = 0
    schema_version: int = 0
    rows: int = 0
    txn_id: int = 0
    producer_id: int = 0
    epoch: int = 0
    sequence: int = 0
    barrier_tick: int = 0
    payload: bytes = b""
    not_persisted: bool = False
    """True for a TimeTick that moves a reader's clock but is no row of the WAL."""
