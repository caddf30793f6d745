"""What appends came to, counted: the answer of a producer's calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from millrace.base.errors import AppendRejected
from millrace.message.model import MutableMessage
from millrace.rpc.outcome import AppendResult

MessageOutcome: TypeAlias = AppendResult | AppendRejected


@dataclass(slots=True)
class Written:
    """What one call came to: messages and rows that were sent, and those among them that were rejected."""

    messages: int = 0
    rows: int = 0
    bytes: int = 0
    last_tick: int = 0
    rejections: list[AppendRejected] = field(default_factory=list)
    rejected_rows: int = 0
    rejected_by_reason: Counter[str] = field(default_factory=Counter)
    """`rejected_rows`, by reason."""
    results: list[AppendResult] = field(default_factory=list)
    spooled_rows: int = 0
    """Rows that are durable in the producer's spool, and not judged yet."""

    def count(self, message: MutableMessage, judged: MessageOutcome) -> None:
        """Take in one message and what became of it."""
        self.take(judged, rows=message.rows, size=len(message.payload))

    def take(self, judged: MessageOutcome, *, rows: int, size: int) -> None:
        """Take in `rows` of `size` bytes that one message carried, and what became of that."""
        self.messages += 1
        self.rows += rows
        self.bytes += size
        if isinstance(judged, AppendRejected):
            self.rejections.append(judged)
            self.rejected_rows += rows
            self.rejected_by_reason[judged.reason] += rows
        else:
            self.results.append(judged)
            self.last_tick = max(self.last_tick, judged.time_tick)

    def add(self, other: Written) -> None:
        self.messages += other.messages
        self.rows += other.rows
        self.bytes += other.bytes
        self.last_tick = max(self.last_tick, other.last_tick)
        self.rejections += other.rejections
        self.rejected_rows += other.rejected_rows
        self.rejected_by_reason += other.rejected_by_reason
        self.results += other.results
        self.spooled_rows += other.spooled_rows

    def checked(self) -> Written:
        """This, where nothing was rejected. Raises the first rejection."""
        if self.rejections:
            raise self.rejections[0]
        return self


@dataclass(slots=True)
class Deleted:
    """What a delete by predicate did: `keys` matched at `tick`, and `written` says what became of their deletes."""

    tick: int
    keys: int
    written: Written = field(default_factory=Written)
