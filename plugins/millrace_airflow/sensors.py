"""Sensors that wait for a time tick, for a small lag, for segments, or for a fresh collection, without a worker slot.

Each checks once at its start and then waits in the triggerer. Its result is the condition's findings. `timeout` bounds
the wait: the task then fails, and its retries apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from millrace_airflow.errors import raise_for
from millrace_airflow.hooks import load_settings
from millrace_airflow.macros import tick_of
from millrace_airflow.triggers import ConditionTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class MillraceSensor(BaseOperator):
    """The base of all sensors. A subclass names the condition and, if it has arguments, returns them."""

    template_fields: Sequence[str] = ("data_dir",)
    condition: ClassVar[str]
    ui_color = "#f5ecd7"

    def __init__(
        self,
        *,
        timeout: timedelta | None = timedelta(hours=1),
        poll_seconds: float = 5.0,
        data_dir: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.timeout = timeout
        self.poll_seconds = poll_seconds
        self.data_dir = data_dir

    def condition_arguments(self) -> dict[str, Any]:
        """Return the condition's arguments, from the rendered fields."""
        return {}

    def execute(self, context: Context) -> dict[str, Any]:
        """Check once; wait in the triggerer if the condition is not met."""
        from millrace.base.errors import MillraceError
        from millrace_airflow.conditions import check

        arguments = self.condition_arguments()
        met, found = False, {}
        try:
            answer = check(self.condition, load_settings(self.data_dir), arguments)
            met, found = answer.met, answer.found
            self.log.info("%s", answer.words)
        except MillraceError as error:
            if not error.retriable:
                raise_for(error.code, str(error), retriable=False)
            self.log.info("%s: %s", error.code, error)
        if not met:
            self.defer(
                trigger=ConditionTrigger(
                    condition=self.condition,
                    arguments=arguments,
                    data_dir=self.data_dir,
                    poll_seconds=self.poll_seconds,
                ),
                method_name="execute_complete",
                timeout=self.timeout,
            )
        return found

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Return the findings of the condition."""
        if "error" in event:
            raise_for(event["error"]["code"], event["error"]["message"], retriable=False)
        return dict(event["found"])


class TimeTickSensor(MillraceSensor):
    """Waits until the ``wal`` table holds everything up to a tick, of one PChannel or of all.

    :param tick: a tick, or a moment (ISO 8601); templated.
    """

    template_fields: Sequence[str] = ("tick", "pchannel", *MillraceSensor.template_fields)
    condition = "tick_reached"

    def __init__(self, *, tick: int | str, pchannel: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.tick = tick
        self.pchannel = pchannel

    def condition_arguments(self) -> dict[str, Any]:
        return {"tick": _tick(self.tick), "pchannel": self.pchannel}


class LagSensor(MillraceSensor):
    """Waits until every PChannel lags less than `seconds` behind its log."""

    condition = "lag_below"

    def __init__(self, *, seconds: float = 5.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seconds = seconds

    def condition_arguments(self) -> dict[str, Any]:
        return {"seconds": self.seconds}


class SegmentSensor(MillraceSensor):
    """Waits until at least `count` segments of a collection came into `state`.

    :param state: growing, flushed or dropped.
    :param after: only segments that came into it after this tick or moment; templated.
    """

    template_fields: Sequence[str] = ("collection", "after", *MillraceSensor.template_fields)
    condition = "segments_in_state"

    def __init__(
        self,
        *,
        collection: str,
        state: str = "flushed",
        count: int = 1,
        after: int | str = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.collection = collection
        self.state = state
        self.count = count
        self.after = after

    def condition_arguments(self) -> dict[str, Any]:
        return {
            "collection": self.collection,
            "state": self.state,
            "count": self.count,
            "after_tick": _tick(self.after),
        }


class FreshnessSensor(MillraceSensor):
    """Waits until a read of a collection as of a moment has everything that was appended before it.

    :param as_of: a tick or a moment, such as ``{{ data_interval_end }}``; templated.
    """

    template_fields: Sequence[str] = ("collection", "as_of", *MillraceSensor.template_fields)
    condition = "fresh_as_of"

    def __init__(self, *, collection: str, as_of: int | str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.collection = collection
        self.as_of = as_of

    def condition_arguments(self) -> dict[str, Any]:
        return {"collection": self.collection, "tick": _tick(self.as_of)}


def _tick(value: int | str) -> int:
    """Return a tick from a tick, its digits, or a moment."""
    if isinstance(value, str) and not value.strip().isdigit():
        return tick_of(value)
    return int(value)
