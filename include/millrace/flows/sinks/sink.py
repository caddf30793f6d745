"""The contract of a sink: it writes a batch of a lane, and returns a verdict on each row when that is durable.

The promises, which the conformance suite tests:

- `write` returns when every row is acknowledged durably or is one of the failures; nothing is in flight then.
- Replaying a batch is idempotent, in one of two ways. An exactly-once sink stores the position of each lane in its own
  transaction, and returns it from `standing`. Any other sink produces the same documents from the same rows:
  effectively once by id and version, or by headers from which a reader recognises repeats.
- The document with the larger version of an id wins, in any order and number of repetitions; without versions, the
  lane's last one wins.
- A verdict concerns one row: a malformed document is its own failure. An error of the sink as a whole is raised:
  SinkBusy with the seconds to wait if it is transient; SinkRefused if somebody must fix something, or if the sink
  accepts none of many documents. BatchRefused means that one of the rows may be the cause: parts of the batch are then
  written. The same holds for any exception that is not a MillraceError.
- An exactly-once sink stores the batch's `aside` and its own failures with the position, from `batch.since` on, and
  returns them as failures if they are repeated: they did not take effect.
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
    """The outcome of a batch's rows: acknowledged + rejected + failures are all of them, unless `again`."""

    acknowledged: int = 0
    """Rows that took effect, or were sent."""
    rejected: int = 0
    """Rows that the sink itself put aside durably, in the same transaction: dead letters of a collection."""
    again: bool = False
    """Whether an earlier attempt wrote the whole batch; `acknowledged` and `rejected` are those of that attempt."""
    stale: int = 0
    """Acknowledged documents that were left out because the sink had a newer version of their id."""
    repeated: int = 0
    """Acknowledged documents that the sink had already, from an earlier attempt."""
    failures: list[Failure] = field(default_factory=list)
    bulks: int = 0
    retries: int = 0
    """Rows that were sent again."""
    cpu_seconds: float = 0.0
    """CPU time of threads other than the caller's."""

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
"""The number of documents from which a sink that accepts none is at fault. Fewer may each be malformed."""


def require_some(verdicts: Verdicts, refused: Sequence[Failure], sink: str) -> None:
    """Check that the documents of `refused` failed on their own.

    Raises SinkRefused if `sink` accepted none of many: otherwise the whole stream would go to the error topic.
    """
    if len(refused) >= ALL_REFUSED and not verdicts.acknowledged:
        last = refused[-1]
        raise SinkRefused(
            f"{sink} accepted none of {len(refused)} documents, the last of them"
            f" {last.record.position}: {last.kind}: {last.reason}"
        )


class Sink(Protocol):
    """A runner's access to a sink. Not thread-safe."""

    def check(self, schema: pa.Schema, /) -> None:
        """Raise InvalidArgument if rows of these columns can never be written. Documents are not checked."""
        ...

    def open(self) -> None:
        """Connect to the sink, and create what is declared to be created. Raises SinkBusy, SinkRefused."""
        ...

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the position after the last stored batch, by lane.

        Lanes without a stored position are absent; a sink that stores no positions returns nothing.
        """
        ...

    def write(self, batch: Batch, /) -> Verdicts:
        """Write a batch. Raises SinkBusy, SinkRefused: nothing is reported then, and all of it may be repeated."""
        ...

    def close(self) -> None:
        """Release what the sink holds. Idempotent."""
        ...


class Ticks(Protocol):
    """The clock of a sink that is read at ticks."""

    def now(self) -> int:
        """Return a tick after all acknowledged documents and before all later ones. Raises LogUnavailable."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
