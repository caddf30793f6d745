"""The pages: the read model as HTML. The server renders them; a small script refreshes them and draws the charts.

A page shows the same data as the API and escapes everything that comes from outside (templates escape by default).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException

from millrace.access.grants import Role
from millrace.base.errors import InvalidArgument, MillraceError
from millrace.message.ids import compose_tick
from millrace.observe.charts import WINDOWS
from millrace.observe.cluster import ClusterReader
from millrace.observe.models import RowSample
from millrace.observe.observer import Observer
from millrace.observe.wal_search import WalQuery
from millrace.service.error_responses import ApiError
from millrace.service.search_parameters import parse_id, parse_moment_ms, rejection_query, transaction_query
from millrace_airflow.ui import text
from millrace_airflow.ui.access import Reader, may_trigger, principal_of
from millrace_airflow.ui.actions import actions_for, started_run
from millrace_airflow.ui.queue import queue_entries

FOLDER: Final = Path(__file__).parent
TABS: Final = (
    ("", "Overview"),
    ("collections", "Collections"),
    ("flows", "Flows"),
    ("consumers", "Consumers"),
    ("transactions", "Transactions"),
    ("rejections", "Rejections"),
    ("checkpoints", "Checkpoints"),
    ("maintenance", "Maintenance"),
    ("quality", "Quality"),
    ("cluster", "Cluster"),
    ("actions", "Actions"),
)
_NEVER_MS: Final = 1 << 42
"""A moment that no message has, in the year 2109."""
MEDIA: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

Short = Annotated[str, Query(max_length=200)]
Offset = Annotated[int, Query(ge=0, le=1 << 40)]


class Renderer:
    """Renders templates with the common values of all pages."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(text.FILTERS)

    def page(self, request: Request, name: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """Render the template `name` with `values`."""
        root = str(request.scope.get("root_path", ""))

        def link(path: str, **query: Any) -> str:
            given = {key: value for key, value in query.items() if value not in (None, "")}
            return f"{root}/{path}" + (f"?{urlencode(given)}" if given else "")

        def again(**changes: Any) -> str:
            """Return this page's query string with other parameters."""
            return "?" + urlencode({**request.query_params, **{key: str(value) for key, value in changes.items()}})

        html = self._environment.get_template(name).render(
            root=root,
            airflow=root.removesuffix("/millrace"),
            tabs=TABS,
            link=link,
            again=again,
            part=lambda value: quote(str(value), safe=""),
            query=request.query_params,
            **values,
        )
        return HTMLResponse(html, status)

    def error_page(self, request: Request, status: int, fault: ApiError) -> Response:
        """Render the page of an error."""
        asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return self.page(
            request, "fault.html",
            status=status, tab=None, status_code=status, fault=fault, overview=None, login=urlencode({"next": asked}),
        )  # fmt: skip


def static_router() -> APIRouter:
    """Return the route of style, script and icons, read once and served by exact name, also without a login."""
    files = {path.name: (path.read_bytes(), MEDIA[path.suffix]) for path in sorted((FOLDER / "static").iterdir())}
    made = APIRouter(include_in_schema=False)

    @made.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "No such file.")
        data, media = files[name]
        return Response(data, media_type=media, headers={"Cache-Control": "public, max-age=300"})

    return made


def router(observer: Observer, look: ClusterReader, renderer: Renderer) -> APIRouter:
    """Return the routes of the pages."""
    made = APIRouter(include_in_schema=False)

    def show(request: Request, user: Any, template: str, tab: str, **values: Any) -> HTMLResponse:
        def allowed(dag_id: str) -> bool:
            return may_trigger(user, dag_id)

        return renderer.page(request, template, tab=tab, overview=observer.overview(), allowed=allowed, **values)

    @made.get("/")
    def overview(request: Request, user: Reader, window: Short = "15m") -> HTMLResponse:
        charts = observer.history(window)
        series = {each.name: each for each in charts.series}
        return show(request, user, "overview.html", "", charts=charts, series=series, window=window, windows=WINDOWS)

    @made.get("/collections")
    def collections(
        request: Request, user: Reader, dropped: bool = False, search: Short = "", offset: Offset = 0
    ) -> HTMLResponse:
        page = observer.collections(dropped=dropped, search=search.strip(), offset=offset)
        values = {"page": page, "dropped": dropped, "search": search}
        return show(request, user, "collections.html", "collections", **values)

    @made.get("/collections/{name}")
    def collection(
        request: Request,
        user: Reader,
        name: str,
        view: Short = "schema",
        state: Short = "",
        at: Short = "",
        tick: Short = "",
        order: Short = "tick",
        deletes: bool = False,
        offset: Offset = 0,
    ) -> HTMLResponse:
        found = observer.collection(name)
        values: dict[str, Any] = {"page": None, "sample": None, "wrong": {}}
        if view == "segments":
            values["page"] = observer.segments(name, state=state, offset=offset)
        elif view == "files":
            values["page"] = observer.files(name, deletes=deletes, order=order, offset=offset)
        elif view == "rows":
            values |= _sampled(lambda: observer.sample(name, at=_tick(at, tick)))
        elif view != "schema":
            raise HTTPException(404, "A collection has the views schema, rows, segments and files.")
        return show(
            request, user, "collection.html", "collections",
            found=found, view=view, state=state, at=at, order=order, deletes=deletes, **values,
        )  # fmt: skip

    _add_searches(made, observer, show)

    @made.get("/messages/{pchannel}/{message_id}")
    def message(request: Request, user: Reader, pchannel: str, message_id: str) -> HTMLResponse:
        found = observer.message(pchannel, message_id)
        tab = "rejections" if found.kind == "rejection" else "transactions"
        return show(request, user, "message.html", tab, found=found)

    @made.get("/checkpoints")
    def checkpoints(request: Request, user: Reader) -> HTMLResponse:
        return show(request, user, "checkpoints.html", "checkpoints", found=observer.checkpoints())

    @made.get("/maintenance")
    def maintenance(
        request: Request, user: Reader, job: Short = "", run: Annotated[str, Query(max_length=500)] = ""
    ) -> HTMLResponse:
        found = observer.maintenance(job=job, run=run)
        queue = [] if run else queue_entries(found.running)
        return show(request, user, "maintenance.html", "maintenance", found=found, queue=queue, job=job, run=run)

    @made.get("/consumers")
    def consumers(request: Request, user: Reader) -> HTMLResponse:
        return show(request, user, "consumers.html", "consumers", groups=observer.consumer_groups())

    @made.get("/quality")
    def quality(request: Request, user: Reader) -> HTMLResponse:
        return show(request, user, "quality.html", "quality", found=observer.quality())

    @made.get("/cluster")
    def cluster(request: Request, user: Reader) -> HTMLResponse:
        operates = principal_of(user).has_role((Role.OPERATE,), ())
        return show(request, user, "cluster.html", "cluster", found=look.view(), operates=operates)

    @made.get("/actions")
    def actions(request: Request, user: Reader, started: Short = "", run: Short = "") -> HTMLResponse:
        found = actions_for(lambda dag_id: may_trigger(user, dag_id))
        return show(request, user, "actions.html", "actions", actions=found, started=started_run(started, run))

    return made


def _add_searches(made: APIRouter, observer: Observer, show: Callable[..., HTMLResponse]) -> None:
    """Add the pages that search the WAL."""

    def searched(
        request: Request,
        user: Any,
        tab: str,
        search: Callable[[WalQuery], Any],
        ask: Callable[[], WalQuery],
        before: str,
    ) -> HTMLResponse:
        """Render the page of a search. Errors of its fields are shown at them, without results."""
        wrong: dict[str, str] = {}
        try:
            found = search(ask())
        except InvalidArgument as error:
            name, colon, words = str(error).partition(": ")
            wrong = {name: words} if colon and name in request.query_params else {"": str(error)}
            found = search(WalQuery("message", since_ms=_NEVER_MS))
        return show(
            request, user, f"{tab}.html", tab, found=found, before=before, wrong=wrong, status=422 if wrong else 200
        )

    @made.get("/transactions")
    def transactions(
        request: Request,
        user: Reader,
        ask: Annotated[Callable[[], WalQuery], Depends(asked(transaction_query))],
        before: Short = "",
    ) -> HTMLResponse:
        return searched(
            request, user, "transactions", lambda query: observer.transactions(query, before=before), ask, before
        )

    @made.get("/rejections")
    def rejections(
        request: Request,
        user: Reader,
        ask: Annotated[Callable[[], WalQuery], Depends(asked(rejection_query))],
        before: Short = "",
    ) -> HTMLResponse:
        return searched(
            request, user, "rejections", lambda query: observer.rejections(query, before=before), ask, before
        )


def asked(query: Callable[..., WalQuery]) -> Callable[..., Callable[[], WalQuery]]:
    """Return a dependency with the parameters of `query`, which is called later, so that errors appear on the page."""

    @wraps(query)
    def later(**parameters: Any) -> Callable[[], WalQuery]:
        return lambda: query(**parameters)

    return later


def _sampled(ask: Callable[[], RowSample]) -> dict[str, Any]:
    """Return the rows from `ask`. A typed error is shown at its field."""
    try:
        return {"sample": ask()}
    except MillraceError as error:
        words = str(error).removeprefix("at: ").removeprefix("tick: ")
        name = "tick" if str(error).startswith("tick: ") else "at"
        return {"wrong": {name: words if isinstance(error, InvalidArgument) else f"{error.code}: {words}"}}


def _tick(at: str, tick: str) -> int | None:
    """Return the time tick `tick`, or the last one of the moment `at`; None for neither. Raises InvalidArgument."""
    at, tick = at.strip(), tick.strip()
    if tick:
        return parse_id("tick", tick)
    if at.isascii() and at.isdigit() and len(at) > 12:  # as in links of earlier builds
        return parse_id("at", at)
    ms = parse_moment_ms("at", at)
    return None if ms is None else compose_tick(ms, (1 << 18) - 1)
