"""The declaration of a pipeline as reference document 004 has it: a flow of the range loop, in that document's JSON.

flow = pipeline_of({"id": "flights", "source": {"kind": "kafka", ...}, "sink": {"kind": "opensearch", ...}})
pipeline_of(as_pipeline(flow), secrets=flow.secrets()) == flow
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import Problem, invalid
from millrace.flows.declare.spellings import NAME, VERSION, Spelling, as_written

_PIPELINE: Final = (
    "description", "account", "labels", "source", "steps", "sink", "errors", "failure_threshold", "flush", "recovery",
    "resources", "deployment",
)  # fmt: skip
"""Fields of a pipeline besides its id and name, in their order."""
_FLOW: Final = frozenset({"transform", "title", "host", "schedule", "group", "late", "seconds"})
"""Fields that flows have and pipelines do not."""


def pipeline_of(value: Any, *, secrets: Mapping[str, str] | None = None, compiled: bool = True) -> Flow:
    """Return the flow that the JSON of a pipeline declares. Arguments and errors are those of :meth:`Flow.parse`."""
    return Flow.parse(value, spelling="pipeline", secrets=secrets, compiled=compiled)


def spelling_asked(declared: Mapping[str, Any]) -> Spelling:
    """Return the form of a declaration that came through the API, where the name may be only in the URL."""
    return "flow" if _FLOW & set(declared) and not {"id", "steps"} & set(declared) else "pipeline"


def named(name: str, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration that came through the API with its name, which is in the URL.

    Raises PipelineInvalid if it has another name, or is a flow that the service cannot store.
    """
    spelling = spelling_asked(declared)
    found = {NAME[spelling]: name, **declared}
    if found[NAME[spelling]] != name:
        raise invalid([Problem(NAME[spelling], f"is {name!r}, as in the URL", "id")])
    if spelling == "flow":
        if problems := list(_unfit(found)):
            raise invalid(problems)
        found["host"] = "range"
    return found


def _unfit(declared: Mapping[str, Any]) -> Iterator[Problem]:
    if declared.get("host") not in (None, "range"):
        yield Problem("host", "is range: the service does not run user code; declare a flow on Spark in a file", "host")
    for field in ("schedule", "version"):
        if field in declared and declared[field] != Flow.model_fields[field].default:
            yield Problem(field, "is for flows that a file declares (the setting flow_declarations)", "misplaced")


def as_pipeline(flow: Flow) -> dict[str, Any]:
    """Return a flow of the range loop as the JSON of a pipeline, with defaults and without secrets.

    The text is always the same for one declaration.
    """
    every = flow.model_dump(mode="json", by_alias=True, exclude_none=True)
    every["steps"] = every["transform"]["steps"]
    for part, declared in (("source", flow.source), ("sink", flow.sink)):
        for name in declared.of_rows:
            every[part].pop(name, None)
    for path in flow.secret_paths():
        place = every
        *folders, last = path.split(".")
        for folder in folders:
            place = place[folder]
        del place[last]
    return {"version": VERSION, "id": flow.name, "name": flow.title, **{name: every[name] for name in _PIPELINE}}


def restarts_of(was: Flow, asked: Flow) -> list[str]:
    """Return the fields of the JSON whose changes from `was` to `asked` require a restart of a running pipeline."""
    return sorted(as_written(each, None, "pipeline") for each in was.restarts(asked))
