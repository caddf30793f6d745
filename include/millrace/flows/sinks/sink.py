"""The contract of a sink: it takes a batch of a lane, and returns a verdict on each row when that is durable.

The promises, which the conformance suite tests:

- `write` returns when every row is acknowledged durably or is one of the failures; nothing is in flight then.
- Replaying a batch is idempotent, by one of two ways. An exactly-once sink stores the position of each lane in its own
  transaction, and returns it from `standing`. Any other sink gets the same documents from the same rows again:
  effectively once by id and version, or by headers from which a reader recognises repeats.
- Of one id the document with the larger version wins, in any order and number of repetitions; without versions the
  last of the lane.
- A verdict concerns one row: a malformed document is its own failure. A fault of the sink as a whole is raised:
  SinkBusy with the seconds to wait if it may pass; SinkRefused if somebody has to fix something, or if the sink takes
  none of many. BatchRefused says that one of the rows may be the cause: parts of the batch then come again. So does
  any exception that is none of Millrace's.
- An exactly-once sink stores the batch's `aside` and its own failures with the position, from `batch.since` on, and
  returns them as failures if they come again: they did not take effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import pyarrow as pa

from millrace.base.errors import SinkRefused
from millrace.flows.batch import Batch
from millrace.flows.records import Failure


@dataclass(slots=True)
class Verdicts:
    """What became of the rows of a batch: acknowledged + rejected + failures are all of them, unless `again`."""

    acknowledged: int = 0
    """Rows that took effect, or were sent."""
    rejected: int = 0
    """Rows that the sink put aside durably itself, in the same transaction: dead letters of a collection."""
    again: bool = False
    """Whether an earlier attempt took the whole batch; `acknowledged` and `rejected` are those of that attempt."""
    stale: int = 0
    """Of the acknowledged ones, documents that were left out: the sink holds a newer version of their id."""
    repeated: int = 0
    """Of the acknowledged ones, what the sink held already, from an earlier attempt."""
    failures: list[Failure] = field(default_factory=list)
    bulks: int = 0
    retries: int = 0
    """Rows that were sent again."""
    cpu_seconds: float = 0.0
    """Of other threads than the one that called."""

    def add(self, other: Verdicts) -> None:
        self.acknowledged += other.acknowledged
        self.rejected += other.rejected
        self.stale += other.stale
        self.repeated += other.repeated
        self.failures += other.failures
        self.bulks += other.bulks
        self.retries += other.retries
        self.cpu_seconds += other.cpu_seconds


ALL_REFUSED: Final = 20
"""Number of documents from which a sink that takes none is at fault: fewer may each be malformed."""


def require_some(verdicts: Verdicts, refused: Sequence[Failure], sink: str) -> None:
    """Check that the documents of `refused` failed on their own.

    Raises SinkRefused if `sink` took none of many: otherwise the whole stream would go to the error topic.
    """
    if len(refused) >= ALL_REFUSED and not verdicts.acknowledged:
        last = refused[-1]
        raise SinkRefused(
            f"{sink} took none of {len(refused)} documents, the last of them"
            f" {last.record.position}: {last.kind}: {last.reason}"
        )


class Sink(Protocol):
    """One runner's way into a sink. Not thread-safe."""

    def check(self, schema: pa.Schema, /) -> None:
        """Raise InvalidArgument if rows of these columns can never be taken. Documents are not checked."""
        ...

    def open(self) -> None:
        """Reach the sink, and create what is declared to be created. Raises SinkBusy, SinkRefused."""
        ...

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the position after the last batch that the sink stores, by lane.

        A lane that the sink stores no position of is absent; a sink that stores none returns nothing.
        """
        ...

    def write(self, batch: Batch, /) -> Verdicts:
        """Take a batch. Raises SinkBusy, SinkRefused: then nothing is reported, and all of it may be repeated."""
        ...

    def close(self) -> None:
        """Release what the sink holds. Idempotent."""
        ...


class Ticks(Protocol):
    """The time of a sink whose reads take a tick."""

    def now(self) -> int:
        """Return a tick after all that was acknowledged, and before all that will be. Raises LogUnavailable."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
