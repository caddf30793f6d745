"""The web application: API, pages, metrics and their reference, all behind Airflow's login."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

import millrace
from millrace.ops.observe.observer import Observer
from millrace.settings import Settings
from millrace_airflow.ui import api, data_docs, faults, pages
from millrace_airflow.ui.access import Reader

_HEADERS = {
    # Nothing of a page comes from elsewhere, and no script or style stands in the HTML.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


def create_app(observer: Observer | None = None) -> FastAPI:
    """The application over `observer`, or over one with the settings of this process."""
    observer = observer or Observer(Settings.load())
    renderer = pages.Renderer()
    app = FastAPI(
        title="Millrace",
        version=millrace.__version__,
        summary="What a running Millrace is doing. Actions are runs of its DAGs, through Airflow's own API.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI would serve them to anybody
    )

    @app.middleware("http")
    async def headers(request: Request, following: Callable[[Request], Awaitable[Response]]) -> Response:
        answer = await following(request)
        for name, value in {**_HEADERS, "Cache-Control": "no-store"}.items():
            answer.headers.setdefault(name, value)
        return answer

    @app.get("/openapi.json", include_in_schema=False)
    def openapi(user: Reader) -> JSONResponse:
        return JSONResponse(app.openapi())

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
