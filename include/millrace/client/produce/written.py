"""The outcome of a producer's call, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from millrace.base.errors import AppendRejected
from millrace.message.model import MutableMessage
from millrace.rpc.outcome import AppendResult

MessageOutcome: TypeAlias = AppendResult | AppendRejected


@dataclass(slots=True, repr=False)
class Written:
    """The outcome of one call: messages and rows that were sent, and those that were rejected."""

    messages: int = 0
    rows: int = 0
    bytes: int = 0
    last_tick: int = 0
    rejections: list[AppendRejected] = field(default_factory=list)
    rejected_rows: int = 0
    rejected_by_reason: Counter[str] = field(default_factory=Counter)
    """`rejected_rows`, by reason."""
    refused: list[tuple[MutableMessage, AppendRejected]] = field(default_factory=list)
    """Messages of a call (`Producer.send`) that were rejected."""
    results: list[AppendResult] = field(default_factory=list)
    spooled_rows: int = 0
    """Rows that are durable in the producer's spool and not decided yet."""

    def __repr__(self) -> str:
        parts = [f"{self.rows:,} rows in {self.messages:,} messages", f"{self.bytes:,} bytes"]
        parts += [f"last tick {self.last_tick}"] if self.last_tick else []
        parts += [f"{rows:,} rows rejected ({reason})" for reason, rows in sorted(self.rejected_by_reason.items())]
        parts += [f"{self.spooled_rows:,} rows in the spool"] if self.spooled_rows else []
        return f"<Written {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        from millrace.client.display import written_html

        return written_html(self)

    def count(self, message: MutableMessage, judged: MessageOutcome) -> None:
        """Add one message and its outcome."""
        self.take(judged, rows=message.rows, size=len(message.payload))

    def take(self, judged: MessageOutcome, *, rows: int, size: int) -> None:
        """Add one message with `rows` rows of `size` bytes, and its outcome."""
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
        self.refused += other.refused
        self.results += other.results
        self.spooled_rows += other.spooled_rows

    def checked(self) -> Written:
        """Return this object. Raises the first rejection, if there is one."""
        if self.rejections:
            raise self.rejections[0]
        return self


@dataclass(slots=True)
class Deleted:
    """The outcome of a delete by predicate: `keys` matched at `tick`; `written` is the outcome of their deletes."""

    tick: int
    keys: int
    written: Written = field(default_factory=Written)
