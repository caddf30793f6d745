"""The application: parts (routes with the table of what they need) behind a door, their description, errors as answers.

Airflow's web server mounts one with its own login and the pages (plugins/millrace_airflow/ui); a coordinator serves one by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from millrace.access.calls import Need, Over
from millrace.access.grants import Role
from millrace.base.package import VERSION
from millrace.observe.cluster import ClusterLook
from millrace.observe.observer import Observer
from millrace.service import cluster, faults, reading
from millrace.service.access import Admit, Door, checked
from millrace.service.answers import GuardedAnswers
from millrace.service.bodies import BoundedBodies
from millrace.service.requests import KnownRequests

DESCRIPTION: Final[Mapping[str, Need]] = {
    "openapi": Need((Role.READ, Role.PRODUCE), Over.ANYTHING, words="the description of all this"),
}


class Part(NamedTuple):
    """Routes, and what each of them needs, by the name of its function."""

    router: APIRouter
    calls: Mapping[str, Need]
    admit: Admit | None = None
    """Who comes in, where more than `calls` says it."""


def parts(observer: Observer, look: ClusterLook) -> list[Part]:
    """What every application has: the read model, the metrics, the cluster."""
    return [
        Part(reading.router(observer), reading.CALLS),
        Part(reading.metrics_router(observer.metrics), reading.CALLS),
        Part(cluster.router(look), cluster.CALLS),
    ]


def application(parts: Sequence[Part], door: Door, *, page: faults.Page | None = None) -> FastAPI:
    """The application of `parts` for whom `door` lets in; `page` renders an error for a browser."""
    app = FastAPI(
        title="Millrace",
        version=VERSION,
        summary="What a running Millrace is doing, and what its cluster is to do. Operations are runs of DAGs, through Airflow's own API.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI would serve them to anybody
    )
    app.add_middleware(BoundedBodies, door=door)
    app.add_middleware(GuardedAnswers)
    app.add_middleware(KnownRequests)
    faults.install(app, page)

    def openapi(request: Request) -> JSONResponse:
        servers = [{"url": str(request.scope.get("root_path", "")) or "/", "description": "This deployment."}]
        return JSONResponse({**app.openapi(), "servers": servers})

    app.get("/openapi.json", include_in_schema=False, dependencies=[checked(door, DESCRIPTION)])(openapi)
    for part in parts:
        app.include_router(part.router, dependencies=[checked(door, part.calls, part.admit)])
    return app
