"""A message as an object: what a producer hands over (mutable) and what the WAL gives back (immutable).

The hot path works on columns (message/batch.py); these are for producers of few messages, for scanners and for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from millrace.message.header import HEADER, Header
from millrace.message.ids import MessageId

Payload: TypeAlias = bytes | memoryview
"""What a message carries, before it is in a log: rows lie in Arrow's own memory, and are copied into the entry alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutableMessage(Header):
    """A message before it is in a log. "Mutable" is Milvus's word for it: :func:`dataclasses.replace` gives a changed copy."""

    payload: Payload = b""


MESSAGE_FIELDS: Final = (*HEADER, "payload")
"""Names of a MutableMessage's fields, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImmutableMessage(Header):
    """A message of the WAL: what was appended, and what the chain stamped on it."""

    id: MessageId
    time_tick: int
    last_confirmed: MessageId
    physical_ms: int
    segment_id: int = 0
    payload: bytes = b""
    not_persisted: bool = False
    """True for a TimeTick that moves a reader's clock but is no row of the WAL."""
