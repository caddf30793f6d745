"""The sandboxed process, which compiles steps and runs them on records.

It has no settings, secrets or tables, and asks its caller for the rows of a lookup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from millrace.flows.declare.part import Problem, problems_of
from millrace.flows.declare.steps import AnyStep, Lookup
from millrace.flows.documents import encoded
from millrace.flows.records import Record
from millrace.flows.transform.transform import Rules, Transform
from millrace.runtime.sandbox.errors import TooMuchWork
from millrace.runtime.sandbox.worker import CallerConnection, serve

SHOWN_BYTES: Final = 8 << 20
"""The most bytes of documents, after all steps, that one dry run shows."""
SHOWN_LEVELS: Final = 200
"""The most levels of a document; the response's encoder accepts at most 255."""
_STEP: Final[TypeAdapter[Any]] = TypeAdapter(AnyStep)


def handle(question: Any, talk: CallerConnection) -> Any:
    """Answer one request.

    ``("check", steps)`` returns the problems of steps, by their index. ``("show", rules, records)`` returns a sample
    for each record. ``("run", rules, records)`` returns nothing when done.
    """
    if question[0] == "check":
        return _check(question[1], talk)
    if question[0] == "run":
        return _run(question[1], question[2], talk)
    return _show(question[1], question[2], talk)


def _check(steps: Mapping[int, Any], talk: CallerConnection) -> list[Problem]:
    found = []
    for place, step in steps.items():
        talk.report_position(f"steps.{place}")
        try:
            _STEP.validate_python(step)
        except ValidationError as error:
            found += [
                each._replace(field=f"steps.{place}.{each.field}".rstrip(".")) for each in problems_of(error, step)
            ]
        except RecursionError:
            found.append(Problem(f"steps.{place}", "is nested too deep", "depth"))
    return found


class _Asked:
    """The rows of a lookup, requested from the caller one by one."""

    def __init__(self, step: Lookup, talk: CallerConnection) -> None:
        self._step, self._talk = step, talk

    def get(self, key: str, /) -> Mapping[str, Any] | None:
        reply = self._talk.ask_caller([self._step.model_dump(), key])
        if "error" in reply:
            raise ValueError(reply["error"])
        found: Mapping[str, Any] | None = reply["row"]
        return found


def _run(rules: Rules, records: list[Record], talk: CallerConnection) -> None:
    transform = Transform(rules, open_rows=lambda step: _Asked(step, talk))
    for record in records:
        transform.show(record, keep=lambda document: document, at=talk.report_position)


def _show(rules: Rules, records: list[Record], talk: CallerConnection) -> list[dict[str, Any]]:
    left = SHOWN_BYTES

    def keep(document: dict[str, Any]) -> Any:
        nonlocal left
        if _depth(document) > SHOWN_LEVELS:
            raise ValueError(f"it is nested deeper than {SHOWN_LEVELS} levels, too deep to be shown")
        text = encoded(document)  # as in a sink: without NaN, which a response cannot hold
        left -= len(text)
        if left < 0:
            raise TooMuchWork(
                f"the documents after the steps have more than {SHOWN_BYTES >> 20} MiB: show fewer or smaller ones",
                limit="answer",
            )
        return json.loads(text)

    talk.report_position("the steps, compiled")
    transform = Transform(rules, open_rows=lambda step: _Asked(step, talk))
    found = []
    for place, record in enumerate(records):

        def at(step: str, place: int = place) -> None:
            talk.report_position(f"document {place}, step {step}")

        sample = transform.show(record, keep=keep, at=at)
        found.append({**sample._asdict(), "steps": [step._asdict() for step in sample.steps]})
    return found


def _depth(document: Any) -> int:
    found, level = 0, [document]
    while level := [each for each in level if isinstance(each, dict | list)]:
        found += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return found


def main() -> None:
    """Answer requests until the caller closes the connection."""
    # Import before the first request, so that no caller waits for it.
    import cel  # noqa: F401
    import jsonschema_rs  # noqa: F401

    serve(handle)


if __name__ == "__main__":
    main()
