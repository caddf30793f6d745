"""The application inside Airflow: that of millrace.service behind Airflow's login, with the pages."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.observe.cluster import ClusterReader
from millrace.observe.observer import Observer
from millrace.pipelines.api.management import Management
from millrace.service.application import build_app, core_routes
from millrace.service.error_responses import ERROR_RESPONSES
from millrace.service.pipelines import LazyPipelineStore, configuration_of, pipeline_routes
from millrace_airflow.ui import data_docs, flows, pages, pipelines, start_forms
from millrace_airflow.ui.access import Reader, authorize, may_trigger
from millrace_airflow.ui.actions import Action, actions_for


def create_app(observer: Observer | None = None, management: Management | None = None) -> FastAPI:
    """Return the application over `observer` and `management`, or over those of the settings of this process."""
    observer = observer or Observer(Settings.load())
    settings = observer.settings
    management = management or Management(
        settings, LazyPipelineStore(settings), configuration=configuration_of(settings)
    )
    renderer = pages.Renderer()
    look = ClusterReader(settings, SystemClock())
    app = build_app([*core_routes(observer, look), pipeline_routes(management)], authorize, page=renderer.error_page)

    @app.get("/docs", include_in_schema=False)
    def docs(request: Request, user: Reader) -> HTMLResponse:
        return renderer.page(request, "docs.html", tab="docs", overview=observer.overview(), schema=app.openapi())

    app.include_router(_actions())
    app.include_router(data_docs.router(observer))
    app.include_router(pages.static_router())
    app.include_router(pages.router(observer, look, renderer))
    app.include_router(start_forms.router(observer, renderer))
    app.include_router(flows.router(management, observer, renderer))
    app.include_router(pipelines.router(management, observer, renderer))
    return app


def _actions() -> APIRouter:
    made = APIRouter(prefix="/api/v1", tags=["millrace"], responses=ERROR_RESPONSES)

    @made.get("/actions")
    def actions(user: Reader) -> list[Action]:
        """List the actions: DAGs of Airflow, which are run through its own REST API."""
        return actions_for(lambda dag_id: may_trigger(user, dag_id))

    return made
