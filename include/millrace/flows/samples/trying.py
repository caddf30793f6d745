"""What the service asks of a process apart: whether a declaration's steps compile, and what they make of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from millrace.base.closeable import Closeable
from millrace.base.errors import MillraceError
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import Problem
from millrace.flows.declare.steps import Lookup
from millrace.flows.records import Record
from millrace.flows.transform.operators import Rows
from millrace.flows.transform.transform import Rules
from millrace.runtime.sandbox.pool import Sandbox

TRYING: Final = "millrace.flows.samples"
"""The process apart."""
COMPILED: Final = frozenset({"filter", "compute", "json_schema"})
"""Steps whose writer's own text is compiled."""


class Trying(Closeable):
    """Steps tried apart. Each call ends within the bounds of :mod:`millrace.runtime.sandbox`. Thread-safe."""

    def __init__(self, apart: Sandbox | None = None) -> None:
        self._apart = apart or Sandbox(TRYING)

    def problems(self, steps: Any) -> list[Problem]:
        """What is wrong with a declaration's `steps`, those that are compiled. Raises TooMuchWork, ServiceBusy."""
        if not isinstance(steps, list | tuple):
            return []
        asked = {
            place: step for place, step in enumerate(steps) if isinstance(step, dict) and step.get("kind") in COMPILED
        }
        try:
            return [Problem(*each) for each in self._apart.call(("check", asked))] if asked else []
        except RecursionError:
            return []  # so deep that it is no declaration, which needs nobody's compiler

    def show(self, flow: Flow, records: Sequence[Record], open_rows: Callable[[Lookup], Rows]) -> list[dict[str, Any]]:
        """Return the result of each step for each record, as JSON.

        The form is that of :class:`millrace.flows.transform.transform.Sample`. Raises TooMuchWork, ServiceBusy.
        """
        found: list[dict[str, Any]] = self._apart.call(("show", Rules.of(flow), list(records)), _told_of(open_rows))
        return found

    def run(self, flow: Flow, record: Record, open_rows: Callable[[Lookup], Rows]) -> None:
        """Run the steps on `record` only to see whether they end. Raises TooMuchWork, whose `where` is the step."""
        self._apart.call(("run", Rules.of(flow), [record]), _told_of(open_rows))

    def close(self) -> None:
        self._apart.close()


def _told_of(open_rows: Callable[[Lookup], Rows]) -> Callable[[Any], dict[str, Any]]:
    """Return the encoding of a lookup's rows for the other process."""
    rows: dict[str, Rows] = {}

    def reply(asked: Any) -> dict[str, Any]:
        step, key = Lookup.model_validate(asked[0]), str(asked[1])
        try:
            row = rows.setdefault(step.model_dump_json(), open_rows(step)).get(key)
        except MillraceError as error:
            return {"error": str(error)}
        return {"row": None if row is None else dict(row)}

    return reply
