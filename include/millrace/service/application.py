"""The application: route groups with permissions, authentication, OpenAPI, and errors as answers.

Airflow's web server mounts one with its own login and the pages (plugins/millrace_airflow/ui); a coordinator serves one
with tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from millrace.access.grants import Role
from millrace.access.permissions import Requirement, Scope
from millrace.base.package import VERSION
from millrace.observe.cluster import ClusterReader
from millrace.observe.observer import Observer
from millrace.service import cluster_routes, error_responses, read_routes
from millrace.service.authentication import Authenticator, AuthorizeCall, require_permission
from millrace.service.middleware import BodyLimit, RequestLog, SecurityHeaders

OPENAPI_CALLS: Final[Mapping[str, Requirement]] = {
    "openapi": Requirement((Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the description of all this"),
}


HEALTH: Final = "/health"
"""Path of the health probe."""
READY_SECONDS: Final = 1.0
"""Time for which an answer of the probe is cached, since the call needs no token."""


class RouteGroup(NamedTuple):
    """Routes, and the permission that each needs, by the name of its function."""

    router: APIRouter
    calls: Mapping[str, Requirement]
    authorize: AuthorizeCall | None = None
    """Authorizes calls, if `calls` is not sufficient."""


def core_routes(observer: Observer, look: ClusterReader) -> list[RouteGroup]:
    """Return the route groups of every application: the read model, the metrics, the cluster."""
    return [
        RouteGroup(read_routes.router(observer), read_routes.CALLS),
        RouteGroup(read_routes.metrics_router(observer.metrics), read_routes.CALLS),
        RouteGroup(cluster_routes.router(look), cluster_routes.CALLS),
    ]


def build_app(
    parts: Sequence[RouteGroup], door: Authenticator, *, page: error_responses.ErrorRenderer | None = None
) -> FastAPI:
    """Build the application of `parts` for callers that `door` accepts; `page` renders an error for a browser."""
    app = FastAPI(
        title="Millrace",
        version=VERSION,
        summary="The state of a running Millrace and its cluster. Operations are DAG runs, through Airflow's API.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI would serve it without authentication
    )
    app.add_middleware(BodyLimit, door=door)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(RequestLog)
    error_responses.install_error_handlers(app, page)

    def openapi(request: Request) -> JSONResponse:
        servers = [{"url": str(request.scope.get("root_path", "")) or "/", "description": "This deployment."}]
        return JSONResponse({**app.openapi(), "servers": servers})

    app.get("/openapi.json", include_in_schema=False, dependencies=[require_permission(door, OPENAPI_CALLS)])(openapi)
    for part in parts:
        app.include_router(part.router, dependencies=[require_permission(door, part.calls, part.authorize)])
    return app


def add_health(app: FastAPI, service: str, is_ready: Callable[[], bool]) -> None:
    """Add ``/health``, which needs no token: 503 unless `is_ready`."""
    lock = Lock()
    never = float("-inf")
    answered = (never, False)

    @app.get(HEALTH)
    def health(response: Response) -> dict[str, Any]:
        """Return whether the meta store answers: 503 if it does not. Needs no token."""
        nonlocal answered
        # Only the first caller waits. A store that hangs must not hold the threads of all routes.
        if time.monotonic() - answered[0] > READY_SECONDS and lock.acquire(blocking=answered[0] == never):
            try:
                if time.monotonic() - answered[0] > READY_SECONDS:
                    ready = is_ready()
                    answered = (time.monotonic(), ready)
            finally:
                lock.release()
        response.status_code = 200 if answered[1] else 503
        return {"service": service, "ready": answered[1]}
