"""The place of a flow's dead letters: its error topic, or a collection of dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.records import Failure


class ErrorPlace(Protocol):
    """Writes one task's failures to the place. Not thread-safe."""

    def put(self, failures: Sequence[Failure], *, task: str) -> None:
        """Write the letters of `failures`; all are durable on return. Raises SinkBusy, SinkRefused."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


def errors_of(settings: Settings, flow: Flow) -> ErrorPlace:
    """Return the place that `flow` declares."""
    if flow.errors.collection is not None:
        from millrace.flows.errors.collection import ErrorCollection

        return ErrorCollection(settings, flow)
    from millrace.flows.errors.topic import ErrorTopic

    return ErrorTopic(flow)


def ensure_errors(settings: Settings, flow: Flow) -> None:
    """Create the place if necessary and allowed. Raises LogUnavailable, InvalidSettings, SinkRefused."""
    if flow.errors.collection is not None:
        from millrace.flows.errors.collection import ensure_collection

        ensure_collection(settings, flow)
        return
    from millrace.flows.errors.topic import ensure_topic

    ensure_topic(flow)
