"""A message as an object: mutable from a producer, immutable from the WAL.

The hot path works on columns (message/columns.py). These objects are for producers of few messages, for scanners and
for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from millrace.message.header import HEADER, Header
from millrace.message.ids import MessageId

Payload: TypeAlias = bytes | memoryview
"""The payload of a message before it is in a log. Rows are in Arrow's own memory and copied only into the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutableMessage(Header):
    """A message before it is in a log. "Mutable" is Milvus's term: :func:`dataclasses.replace` returns a changed
    copy.
    """

    payload: Payload = b""


MESSAGE_FIELDS: Final = (*HEADER, "payload")
"""The names of a MutableMessage's fields, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImmutableMessage(Header):
    """A message of the WAL: what was appended, plus the chain's stamps."""

    id: MessageId
    time_tick: int
    last_confirmed: MessageId
    physical_ms: int
    segment_id: int = 0
    payload: bytes = b""
    principal: str = ""
    """Name of the token that appended it, or ``machine``. ``asserted:NAME`` if the producer wrote the name to a
    broker itself. Empty if the entry has no name, and for messages that the chain emits."""
    not_persisted: bool = False
    """True for a TimeTick that moves a reader's clock but is not a row of the WAL."""
