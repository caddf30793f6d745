"""Everything that the plugin registers with Airflow: links, macros, the listener, views and the logs of jobs."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

from millrace.service.middleware import App
from millrace_airflow import listener
from millrace_airflow.job_logs import make_app
from millrace_airflow.links import JOB_LOGS_PATH, DataDocsLink, JobLogLink, ReportLink, SparkUiLink
from millrace_airflow.macros import moment_of, tick_of, ticks_between
from millrace_airflow.ui import EXTERNAL_VIEWS, URL_PREFIX, LazyApp, create_app
from millrace_airflow.ui.login_throttle import LoginThrottle
from millrace_airflow.ui.middleware import PluginMiddleware

PAGES = LazyApp(create_app)
JOB_LOGS = LazyApp(make_app)


def plugin_middleware(app: App) -> PluginMiddleware:
    """Return the middleware of Airflow's web server. It is a function: Airflow shows the arguments of a middleware as
    JSON."""
    return PluginMiddleware(app, prefix=URL_PREFIX, ready=(PAGES.build, JOB_LOGS.build))


class MillracePlugin(AirflowPlugin):
    """Registered by plugins/millrace_plugin.py."""

    name = "millrace"
    macros: ClassVar[list[Any]] = [tick_of, moment_of, ticks_between]  # type: ignore[misc]
    operator_extra_links: ClassVar[list[Any]] = [ReportLink(), JobLogLink(), SparkUiLink(), DataDocsLink()]  # type: ignore[misc]
    listeners: ClassVar[list[Any]] = [listener]  # type: ignore[misc]
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]
        {"app": PAGES, "url_prefix": URL_PREFIX, "name": "Millrace"},
        {"app": JOB_LOGS, "url_prefix": JOB_LOGS_PATH, "name": "Logs of Millrace's jobs"},
    ]
    fastapi_root_middlewares: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]
        {
            "middleware": plugin_middleware,
            "args": [],
            "kwargs": {},
            "name": "Checks of triggers, and the redirect to Millrace's pages",
        },
        {"middleware": LoginThrottle, "args": [], "kwargs": {}, "name": "Throttle of failed logins"},
    ]
    external_views: ClassVar[list[dict[str, Any]]] = [*EXTERNAL_VIEWS]  # type: ignore[misc]
