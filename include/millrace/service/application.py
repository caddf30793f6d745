"""The application: parts (routes with the table of what they need) behind a door, their description, errors as answers.

Airflow's web server mounts one with its own login and the pages (plugins/millrace_airflow/ui); a coordinator serves one by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from millrace.access.grants import Role
from millrace.access.permissions import Requirement, Scope
from millrace.base.package import VERSION
from millrace.observe.cluster import ClusterReader
from millrace.observe.observer import Observer
from millrace.service import cluster_routes, error_responses, read_routes
from millrace.service.authentication import Authenticator, AuthorizeCall, require_permission
from millrace.service.bodies import BodyLimit
from millrace.service.middleware import SecurityHeaders
from millrace.service.requests import RequestLog

OPENAPI_CALLS: Final[Mapping[str, Requirement]] = {
    "openapi": Requirement((Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the description of all this"),
}


class RouteGroup(NamedTuple):
    """Routes, and what each of them needs, by the name of its function."""

    router: APIRouter
    calls: Mapping[str, Requirement]
    authorize: AuthorizeCall | None = None
    """Who comes in, where more than `calls` says it."""


def core_routes(observer: Observer, look: ClusterReader) -> list[RouteGroup]:
    """What every application has: the read model, the metrics, the cluster."""
    return [
        RouteGroup(read_routes.router(observer), read_routes.CALLS),
        RouteGroup(read_routes.metrics_router(observer.metrics), read_routes.CALLS),
        RouteGroup(cluster_routes.router(look), cluster_routes.CALLS),
    ]


def build_app(
    parts: Sequence[RouteGroup], door: Authenticator, *, page: error_responses.ErrorRenderer | None = None
) -> FastAPI:
    """The application of `core_routes` for whom `door` lets in; `page` renders an error for a browser."""
    app = FastAPI(
        title="Millrace",
        version=VERSION,
        summary="What a running Millrace is doing, and what its cluster is to do. Operations are runs of DAGs, through Airflow's own API.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI would serve them to anybody
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
