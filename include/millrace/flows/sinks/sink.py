"""What a sink is: it is told what to do for each record, and says for each what became of it, when that is sure.

The promise, which the conformance suite holds:

- `write` returns when every action is acknowledged durably or is one of the failures; nothing is in flight then.
- Repetition is idempotent: the same actions again, all or some, after an error or a crash, leave the same documents.
- Of one id the action with the larger version wins, in any order and number of repetitions; without versions the last.
- One action's error (a malformed document) is its own failure. An error of all actions is raised: SinkBusy with the
  seconds to wait if it may pass; SinkRefused if somebody has to fix something, or if it takes none of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Protocol

from millrace.base.errors import InvalidSettings, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.records import Action, Failure
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.models import Sink as Declared


@dataclass(slots=True)
class Written:
    """What became of some actions."""

    acknowledged: int = 0
    stale: int = 0
    """Of those, documents that were left out: the sink holds a newer version of their id."""
    repeated: int = 0
    """Of those, what the sink held already, from an earlier attempt."""
    failures: list[Failure] = field(default_factory=list)
    bulks: int = 0
    retries: int = 0
    """Actions that were sent again."""
    cpu_seconds: float = 0.0
    """Of other threads than the one that called."""

    def add(self, other: Written) -> None:
        self.acknowledged += other.acknowledged
        self.stale += other.stale
        self.repeated += other.repeated
        self.failures += other.failures
        self.bulks += other.bulks
        self.retries += other.retries
        self.cpu_seconds += other.cpu_seconds


ALL_REFUSED: Final = 20
"""Number of documents from which a sink that takes none is at fault: fewer may each be malformed."""


def require_some(written: Written, refused: Sequence[Failure], sink: str) -> None:
    """Check that the documents of `refused` failed on their own.

    Raises SinkRefused if `sink` took none of many: otherwise the whole stream would go to the error topic.
    """
    if len(refused) >= ALL_REFUSED and not written.acknowledged:
        last = refused[-1]
        raise SinkRefused(
            f"{sink} took none of {len(refused)} documents, the last of them"
            f" {last.record.position}: {last.kind}: {last.reason}"
        )


class Sink(Protocol):
    """One task's way into the sink. Not thread-safe."""

    def open(self) -> None:
        """Reach it, and make what it was declared to make. Raises SinkBusy, SinkRefused."""
        ...

    def write(self, actions: Sequence[Action], /) -> Written:
        """Perform all of `actions`. Raises SinkBusy, SinkRefused: then none is reported, and all may be repeated."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


SINKS: Final[dict[str, str]] = {
    "opensearch": "millrace.flows.sinks.opensearch.sink:made",
    "kafka": "millrace.flows.sinks.kafka.sink:made",
    "collection": "millrace.flows.sinks.collection.sink:made",
    "delta": "millrace.flows.sinks.delta.sink:made",
}
"""Kind -> ``module:function``, from (declared, settings, flow=, flush=) to a Sink.

A new sink is a folder, a model and a line here.
"""


def sink_of(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> Sink:
    """The sink that flow `flow` declares, not opened. Raises InvalidSettings where this build has none of its kind."""
    if declared.kind not in SINKS:
        raise InvalidSettings(f"this build has no sink of kind {declared.kind}; it has {', '.join(sorted(SINKS))}")
    module, _, name = SINKS[declared.kind].partition(":")
    make: Any = getattr(import_module(module), name)
    found: Sink = make(declared, settings, flow=flow, flush=flush)
    return found
