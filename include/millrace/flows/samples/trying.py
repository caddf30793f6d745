"""The service's side of the sandbox: check whether steps compile, and run them on sample records."""

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
"""The module that the sandboxed process runs."""
COMPILED: Final = frozenset({"filter", "compute", "json_schema"})
"""Kinds of steps that contain a user's text to be compiled."""


class Trying(Closeable):
    """Tries steps in a sandbox. Each call ends within the bounds of :mod:`millrace.runtime.sandbox`. Thread-safe."""

    def __init__(self, apart: Sandbox | None = None) -> None:
        self._apart = apart or Sandbox(TRYING)

    def problems(self, steps: Any) -> list[Problem]:
        """Return the problems of those `steps` that are compiled. Raises TooMuchWork, ServiceBusy."""
        if not isinstance(steps, list | tuple):
            return []
        asked = {
            place: step for place, step in enumerate(steps) if isinstance(step, dict) and step.get("kind") in COMPILED
        }
        try:
            return [Problem(*each) for each in self._apart.call(("check", asked))] if asked else []
        except RecursionError:
            return []  # too deep to be a declaration, which the caller reports

    def show(self, flow: Flow, records: Sequence[Record], open_rows: Callable[[Lookup], Rows]) -> list[dict[str, Any]]:
        """Return the result of each step for each record, as JSON.

        The form is that of :class:`millrace.flows.transform.transform.Sample`. Raises TooMuchWork, ServiceBusy.
        """
        found: list[dict[str, Any]] = self._apart.call(
            ("show", Rules.of(flow), list(records)), _replies_from(open_rows)
        )
        return found

    def run(self, flow: Flow, record: Record, open_rows: Callable[[Lookup], Rows]) -> None:
        """Run the steps on `record` only to see whether they end. Raises TooMuchWork, whose `where` is the step."""
        self._apart.call(("run", Rules.of(flow), [record]), _replies_from(open_rows))

    def close(self) -> None:
        self._apart.close()


def _replies_from(open_rows: Callable[[Lookup], Rows]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that answers the other process's requests for rows of a lookup."""
    rows: dict[str, Rows] = {}

    def reply(asked: Any) -> dict[str, Any]:
        step, key = Lookup.model_validate(asked[0]), str(asked[1])
        try:
            row = rows.setdefault(step.model_dump_json(), open_rows(step)).get(key)
        except MillraceError as error:
            return {"error": str(error)}
        return {"row": None if row is None else dict(row)}

    return reply
