"""The pages of managed pipelines: the views of one pipeline, and the form that creates or changes one.

The API's own table of permissions decides which parts a page shows and which buttons are enabled; the buttons call that
API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from millrace.access.grants import Caller, Role
from millrace.base.errors import InvalidArgument, MillraceError
from millrace.flows.declare.worker import Resources
from millrace.flows.registry import SinkKind, SourceKind, sink_kinds, source_kinds
from millrace.observe.observer import Observer
from millrace.pipelines.api.management import Management
from millrace.pipelines.api.routes import CALLS
from millrace_airflow.ui.access import Reader, may_trigger, principal_of
from millrace_airflow.ui.flows import chosen_by, given_of, row_of
from millrace_airflow.ui.pages import Renderer

VIEWS: Final = {
    "state": "State",
    "errors": "Errors",
    "samples": "Samples",
    "declaration": "Declaration",
    "history": "History",
}
_STARTER: Final[Mapping[str, Any]] = {
    "source": {"kind": "kafka", "bootstrap": [], "topics": []},
    "steps": [],
    "sink": {"kind": "opensearch", "hosts": [], "index_base": ""},
}
_DEFAULTS: Final = {name: Resources.model_fields[name].default for name in ("cpus", "memory_mib")}
Short = Annotated[str, Query(max_length=200)]


def router(management: Management, observer: Observer, renderer: Renderer) -> APIRouter:
    """Return the routes below ``/pipelines``. The list is on the page of flows."""
    made = APIRouter(include_in_schema=False)

    def show(request: Request, user: BaseUser, template: str, **values: Any) -> HTMLResponse:
        def allowed(dag_id: str) -> bool:
            return may_trigger(user, dag_id)

        return renderer.page(request, template, tab="flows", overview=observer.overview(), allowed=allowed, **values)

    def caller_of(user: BaseUser) -> Caller:
        return management.known(Caller(principal_of(user)))

    @made.get("/pipelines-new")
    def new(request: Request, user: Reader) -> HTMLResponse:
        creates = caller_of(user).principal.has_role((Role.OPERATE,))
        return show(
            request, user, "pipeline_form.html",
            found=None, declaration=_STARTER, secrets=[], may_save=creates, defaults=_DEFAULTS, kinds=_kinds(),
        )  # fmt: skip

    @made.get("/pipelines/{pipeline}")
    def one(
        request: Request,
        user: Reader,
        pipeline: str,
        view: Short = "state",
        step: Short = "",
        kind: Short = "",
        reason: Short = "",
        lane: Annotated[str, Query(max_length=512)] = "",
        low: Short = "",
        high: Short = "",
        before: Annotated[str, Query(max_length=20_000)] = "",
    ) -> HTMLResponse:
        caller = management.admit(CALLS, Caller(principal_of(user)), "pipeline", {"pipeline": pipeline})
        if view not in VIEWS:
            raise HTTPException(404, f"A pipeline has the views {', '.join(VIEWS)}.")
        record = management.get(pipeline)
        row = row_of(management, record)
        values: dict[str, Any] = {"errors": None, "events": None, "problem": None, "chosen": None}
        if view == "errors":
            try:
                chosen = chosen_by(lane=lane, low=low, high=high, step=step, kind=kind, reason=reason)
            except InvalidArgument as error:
                values["problem"] = f"{error.code}: {error}"
            else:
                values["chosen"] = given_of(chosen)
                values |= _asked(lambda: {"errors": management.errors(pipeline, chosen, before=before)})
        elif view == "history":
            values["events"] = management.history(pipeline, before=None, limit=200)
        return show(
            request, user, "pipeline.html",
            found=record, view=view, views=VIEWS, row=row, how=row["how"], trend=row["trend"],
            redrive=management.redrive_status(pipeline), may=_may(caller, pipeline), roles=management.roles(pipeline),
            secrets=management.secret_names(pipeline), step=step, kind=kind, reason=reason, before=before, **values,
        )  # fmt: skip

    @made.get("/pipelines/{pipeline}/edit")
    def edit(request: Request, user: Reader, pipeline: str) -> HTMLResponse:
        caller = management.admit(CALLS, Caller(principal_of(user)), "pipeline", {"pipeline": pipeline})
        record = management.get(pipeline)
        return show(
            request, user, "pipeline_form.html",
            found=record, declaration=record.declaration, secrets=management.secret_names(pipeline),
            may_save=_may(caller, pipeline)["update_pipeline"], defaults=_DEFAULTS, kinds=_kinds(),
        )  # fmt: skip

    return made


def _kinds() -> dict[str, Any]:
    """Return the kinds that a form offers, and the plain fields of those from other packages."""
    found: dict[str, Mapping[str, SourceKind | SinkKind]] = {"source": source_kinds(), "sink": sink_kinds()}
    others = {
        part: {name: _plain_fields(each.model) for name, each in kinds.items() if each.package != "millrace"}
        for part, kinds in found.items()
    }
    return {part: list(kinds) for part, kinds in found.items()} | {"others": others}


def _plain_fields(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return the fields that fit one input: texts, numbers and choices. Others are edited in the declaration."""
    fields = []
    for name, each in model.model_json_schema()["properties"].items():
        if name != "kind" and (each.get("type") in ("string", "integer", "number") or "enum" in each):
            number = each.get("type") in ("integer", "number")
            words = each.get("description", "")
            fields.append({"name": name, "help": words, "number": number, "choices": each.get("enum")})
    return fields


def _may(caller: Caller, pipeline: str) -> dict[str, bool]:
    """Return, by call, whether the user may make it."""
    return {
        name: caller.principal.has_role(need.roles, need.resources({"pipeline": pipeline}))
        for name, need in CALLS.items()
    }


def _asked(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `ask`. A typed error becomes a line on the page, which shows the rest."""
    try:
        return ask()
    except MillraceError as error:
        return {"problem": f"{error.code}: {error}"}
