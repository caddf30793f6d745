"""The pipeline service as a program: its routes on their own port, and the reconciler of its pipelines.

    python -m millrace.service.pipelines [--config pipeline-config.yaml]

Runs until SIGTERM or SIGINT; `millrace flows service serve` starts it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request, Response

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.access.token_file import TokenFile
from millrace.base.closeable import Closeable
from millrace.base.data_folder import prepare_data_folder
from millrace.base.errors import MillraceError
from millrace.base.package import VERSION
from millrace.base.settings import Settings
from millrace.coord.store_factory import cluster_token
from millrace.flows.declare.configuration import Configuration
from millrace.flows.range_host.logs import begin_log, new_run
from millrace.observe.exposition import merge_expositions, pipeline_metrics
from millrace.pipelines.api.management import Management
from millrace.pipelines.api.routes import CALLS, SERVICE, ServiceHealth, router, service_facts
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.store.store import PipelineStore, open_pipelines
from millrace.runtime.process_setup import set_up_service
from millrace.service import read_routes
from millrace.service.application import HEALTH, RouteGroup, build_app
from millrace.service.authentication import Authenticator, Credentials, token_authenticator
from millrace.service.error_responses import ERROR_RESPONSES
from millrace.service.server import serving

RECONCILE_SECONDS: Final = 5.0
LOG: Final = "service.log"
"""Log file in ``<data>/pipelines``, configured by `log:`."""
_log: Final = logging.getLogger(__name__)


def pipeline_routes(management: Management) -> RouteGroup:
    """Return the routes of pipelines, for any application."""
    return RouteGroup(router(management, ERROR_RESPONSES), CALLS, partial(management.admit, CALLS))


def metrics_routes(settings: Settings, management: Management) -> RouteGroup:
    """Return ``/metrics``: the metrics of this folder's workers, and whether each pipeline has its worker."""

    def render() -> bytes:
        return merge_expositions([*pipeline_metrics(settings), management.metrics().decode()])

    return RouteGroup(read_routes.metrics_router(render), read_routes.CALLS)


def service_app(settings: Settings, management: Management, door: Authenticator) -> FastAPI:
    """Return the service's application: calls, metrics, health and an index.

    Health needs no token, because probes have none. To callers without a token, the index at ``/`` shows only what the
    documentation says.
    """
    app = build_app([pipeline_routes(management), metrics_routes(settings, management)], door)

    @app.get(HEALTH)
    def health(response: Response) -> ServiceHealth:
        """Return what this service is, and whether its store answers: 503 if it does not. Needs no token."""
        ready = management.ready()
        response.status_code = 200 if ready else 503
        return ServiceHealth(**service_facts(), ready=ready)

    @app.get("/", include_in_schema=False)
    async def index(request: Request, credentials: Credentials) -> dict[str, Any]:
        found = {"service": SERVICE, "api": "/api/v1/pipelines", "openapi": "/openapi.json"}
        found |= {
            "health": HEALTH,
            "dependencies": "/api/v1/pipelines-health",
            "metrics": "/metrics",
            "documentation": "docs/pipelines-api.md",
        }
        try:
            await door(request, credentials)
        except HTTPException:
            return found | {
                "login": "Authorization: Bearer TOKEN (millrace tokens add makes one, on this service's host)"
            }
        return found | {"version": VERSION}

    return app


class LazyPipelineStore(Closeable):
    """A deployment's store, opened by the first call that needs it; a failed opening is tried again. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = Lock()
        self._store: PipelineStore | None = None

    def __call__(self) -> PipelineStore:
        """Return the store. Raises MetaUnavailable, UnsupportedVersion, UnsafeDataFolder."""
        with self._lock:
            if self._store is None:
                prepare_data_folder(self._settings.data_dir)
                self._store = open_pipelines(self._settings)
            return self._store

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None


def configuration_of(settings: Settings, config: Path | None = None) -> Configuration:
    """Load the pipeline-config.yaml named by `config` or the settings; the defaults if none is.

    Raises InvalidSettings.
    """
    path = config or (Path(settings.pipeline_config) if settings.pipeline_config else None)
    return Configuration() if path is None else Configuration.load(path)


def run_reconciler(management: Management, stop: Event) -> None:
    """Keep pipelines in their declared state until `stop`."""
    while not stop.is_set():
        try:
            management.tend()
        except MillraceError as error:
            _log.warning("%s: %s", error.code, error)
        stop.wait(RECONCILE_SECONDS)


def main() -> int:
    """Serve until a signal arrives; return 1 if the store cannot be opened or the port is in use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a pipeline-config.yaml")
    options = parser.parse_args()
    stop = set_up_service()
    try:
        settings = Settings.load()
        prepare_data_folder(settings.data_dir)
        configuration = configuration_of(settings, options.config)
        begin_log(settings.data_dir / "pipelines", configuration.log, flow="", run=new_run(), file=LOG)
        door = token_authenticator([cluster_token(settings)], TokenFile(settings.data_dir))
        at_port = replace(settings, service_port=settings.service_port or configuration.server.httpPort)
        with open_pipelines(settings) as store:
            deployment = Deployment(settings, config=options.config)
            with (
                Management(settings, store, configuration=configuration, deployment=deployment) as management,
                serving(service_app(settings, management, door), at_port),
            ):
                run_reconciler(management, stop)
    except MillraceError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
