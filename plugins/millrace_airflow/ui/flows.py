"""The page of flows on either host: one graph of their inputs and outputs, and one table of their states.

A flow that the management service does not manage has a page here, with the same buttons as a managed one; they call
the API, which checks permissions.

A pipeline of the management service is shown to users who may see it. `/streams` and `/pipelines` of earlier builds
redirect here.
"""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from millrace.access.grants import Caller, Role
from millrace.base.errors import InvalidArgument, MillraceError
from millrace.catalog.sqlite_file import collection_names
from millrace.flows.directory import flow_statuses
from millrace.flows.errors.selection import Selection
from millrace.flows.status import FlowStatus
from millrace.observe.flows import graph_of
from millrace.observe.observer import Observer
from millrace.pipelines.api.management import Management
from millrace.pipelines.api.rights import sees
from millrace.pipelines.store.records import Phase, Record
from millrace_airflow.ui.access import Reader, principal_of
from millrace_airflow.ui.flow_graph import graph_layout
from millrace_airflow.ui.pages import Renderer

PER_PAGE: Final = 50
VIEWS: Final = {"state": "State", "errors": "Errors"}
Short = Annotated[str, Query(max_length=200)]
Offset = Annotated[int, Query(ge=0, le=1 << 31)]


def router(management: Management, observer: Observer, renderer: Renderer) -> APIRouter:
    """Return the routes of ``/flows``, and of the addresses that it replaces."""
    made = APIRouter(include_in_schema=False)

    @made.get("/flows")
    def flows(
        request: Request, user: Reader, text: Short = "", state: Short = "", host: Short = "", offset: Offset = 0
    ) -> HTMLResponse:
        caller = management.known(Caller(principal_of(user)))
        found, problem = _flows(management, observer, caller)
        rows = [each for each in found if _fits(each, text) and host in ("", each["flow"].host)]
        counts = {name: sum(row["state"] == name for row in rows) for name in sorted({row["state"] for row in rows})}
        rows = [row for row in rows if state in ("", row["state"])]
        view = graph_of([row["flow"] for row in rows])
        return renderer.page(
            request, "flows.html", tab="flows", overview=observer.overview(), problem=problem,
            found=view, drawn=graph_layout(view), collections=set(collection_names(observer.settings.data_dir)),
            rows=rows[offset : offset + PER_PAGE], page={"offset": offset, "limit": PER_PAGE, "total": len(rows)},
            counts=counts, text=text, state=state, host=host, creates=caller.principal.has_role((Role.OPERATE,)),
            managed={row["flow"].node for row in rows if row["record"] is not None},
        )  # fmt: skip

    @made.get("/flows/{name}")
    def one(
        request: Request,
        user: Reader,
        name: Annotated[str, Path(max_length=128)],
        view: Short = "state",
        lane: Annotated[str, Query(max_length=512)] = "",
        low: Short = "",
        high: Short = "",
        reason: Short = "",
    ) -> Response:
        caller = management.known(Caller(principal_of(user)))
        if any(each.id == name for each in management.seen_by(caller)):
            return RedirectResponse(f"{request.scope.get('root_path', '')}/pipelines/{quote(name)}", status_code=307)
        if view not in VIEWS:
            raise HTTPException(404, f"A flow has the views {', '.join(VIEWS)}.")
        values: dict[str, Any] = {"letters": None, "chosen": None, "problem": None}
        if view == "errors":
            try:
                chosen = chosen_by(lane=lane, low=low, high=high, reason=reason)
                values["chosen"] = given_of(chosen)
                values |= {"letters": management.flow_errors(caller, name, chosen)}
            except MillraceError as error:
                values["problem"] = f"{error.code}: {error}"
        return renderer.page(
            request, "flow.html", tab="flows", overview=observer.overview(), flow=management.show_flow(caller, name),
            view=view, views=VIEWS, may=caller.principal.has_role((Role.OPERATE,), ()), **values,
        )  # fmt: skip

    @made.get("/streams")
    @made.get("/pipelines")
    def moved(request: Request, user: Reader) -> RedirectResponse:
        asked = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{request.scope.get('root_path', '')}/flows{asked}", status_code=308)

    return made


def chosen_by(*, lane: str, low: str, high: str, reason: str, step: str = "", kind: str = "") -> Selection:
    """Return the selection of dead letters that a form requests.

    Raises InvalidArgument if a position is not a number.
    """
    return Selection(
        step=step, kind=kind, reason=reason, lane=lane.strip(), low=_position(low.strip()), high=_position(high.strip())
    )


def _position(text: str) -> int | None:
    if text and not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidArgument(f"{text[:40]!r} is not a position: give a number (for a topic, the offset)")
    return int(text) if text else None


def given_of(selection: Selection) -> dict[str, Any]:
    """Return the given conditions in the API's form."""
    return {field: each for field, each in selection.to_json().items() if each not in ("", None, [])}


def row_of(management: Management, record: Record) -> dict[str, Any]:
    """Return a managed pipeline with its status, and the additional values of its page and the table."""
    status, trend = management.status(record.id), management.trend(record.id)
    flow = management.flow(record, status)
    latencies = [task.latency_ms for task in status.tasks]
    return {
        "flow": flow,
        "record": record,
        "state": str(flow.state if record.phase is Phase.READY else record.phase).lower(),
        "how": status,
        "trend": trend,
        # The trend of a flow that just ended still has the last rate.
        "rates": {
            name: getattr(trend, f"records_{name}")[-1] if flow.state.live else 0.0 for name in ("in", "out", "error")
        },
        "bulks": sum(task.bulks for task in status.tasks),
        "retries": sum(task.retries for task in status.tasks),
        "late": {
            name: max((each[name] for each in latencies if name in each), default=None)
            for name in ("p50", "p95", "p99")
        },
    }


def _flows(management: Management, observer: Observer, caller: Caller) -> tuple[list[dict[str, Any]], str | None]:
    """Return the flows that the caller may see, and the problems of the declarations or the store."""
    rows: list[dict[str, Any]] = []
    problems = []
    try:
        rows += [row_of(management, each) for each in management.seen_by(caller)]
    except MillraceError as error:
        problems.append(f"{error.code}: {error}")
    managed = {row["record"].id for row in rows}
    try:
        for flow in flow_statuses(observer.settings, without=managed):
            if flow.host == "spark" or sees(caller, flow.name):
                rows.append({"flow": flow, "record": None, "state": str(flow.state), "trend": None, "late": None})
    except MillraceError as error:  # a declaration cannot be read
        problems.append(f"{error.code}: {error}")
    return sorted(rows, key=lambda row: (row["flow"].name, row["flow"].host)), "; ".join(problems) or None


def _fits(row: dict[str, Any], text: str) -> bool:
    flow: FlowStatus = row["flow"]
    record: Record | None = row["record"]
    named = text.lower() in flow.name.lower() or (record is not None and text.lower() in record.name.lower())
    return named or (record is not None and text == record.account)
