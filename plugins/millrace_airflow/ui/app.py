"""The web application: API, pages, metrics and their reference, all behind Airflow's login."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse

from millrace.base.package import VERSION
from millrace.base.settings import Settings
from millrace.observe.observer import Observer
from millrace_airflow.ui import api, data_docs, faults, pages
from millrace_airflow.ui.access import Reader
from millrace_airflow.ui.guard import GuardedAnswers


def create_app(observer: Observer | None = None) -> FastAPI:
    """The application over `observer`, or over one with the settings of this process."""
    observer = observer or Observer(Settings.load())
    renderer = pages.Renderer()
    app = FastAPI(
        title="Millrace",
        version=VERSION,
        summary="What a running Millrace is doing. Actions are runs of its DAGs, through Airflow's own API.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI would serve them to anybody
    )

    app.add_middleware(GuardedAnswers)

    @app.get("/openapi.json", include_in_schema=False)
    def openapi(request: Request, user: Reader) -> JSONResponse:
        servers = [{"url": str(request.scope.get("root_path", "")) or "/", "description": "This deployment."}]
        return JSONResponse({**app.openapi(), "servers": servers})

    @app.get("/docs", include_in_schema=False)
    def docs(request: Request, user: Reader) -> HTMLResponse:
        return renderer.page(request, "docs.html", tab="docs", overview=observer.overview(), schema=app.openapi())

    faults.install(app, renderer.fault)
    app.include_router(api.router(observer))
    app.include_router(api.metrics_router(observer))
    app.include_router(data_docs.router(observer))
    app.include_router(pages.static_router())
    app.include_router(pages.router(observer, renderer))
    return app
