"""What Airflow registers: links, macros, the listener, the views and the logs of jobs."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

from millrace_airflow import listener
from millrace_airflow.job_logs import make_app
from millrace_airflow.links import LOGS, DataDocsLink, JobLogLink, ReportLink, SparkUiLink
from millrace_airflow.macros import moment_of, tick_of, ticks_between
from millrace_airflow.ui import EXTERNAL_VIEWS, FASTAPI_APPS, FirstRequest
from millrace_airflow.ui.guard import LoginBrake


class MillracePlugin(AirflowPlugin):
    """Registered by plugins/millrace_plugin.py."""

    name = "millrace"
    macros: ClassVar[list[Any]] = [tick_of, moment_of, ticks_between]  # type: ignore[misc]
    operator_extra_links: ClassVar[list[Any]] = [ReportLink(), JobLogLink(), SparkUiLink(), DataDocsLink()]  # type: ignore[misc]
    listeners: ClassVar[list[Any]] = [listener]  # type: ignore[misc]
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]
        *FASTAPI_APPS,
        {"app": FirstRequest(make_app), "url_prefix": LOGS, "name": "Logs of Millrace's jobs"},
    ]
    fastapi_root_middlewares: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]
        {"middleware": LoginBrake, "args": [], "kwargs": {}, "name": "Brake on failed logins"}
    ]
    external_views: ClassVar[list[dict[str, Any]]] = [*EXTERNAL_VIEWS]  # type: ignore[misc]
