"""Buttons on a task's page: the log of its job, Spark's own interface, the data docs of a quality run.

A link is computed by the worker when the task has ended, and stored as an XCom. Paths are relative to the address of
Airflow, so they also work behind a proxy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote, urlencode, urlsplit

import attrs
from airflow.sdk import BaseOperatorLink, conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

JOB_LOGS_PATH: str = "/millrace-jobs"
"""The path under which the plugin serves the logs of jobs (millrace_airflow.job_logs)."""


def base_path() -> str:
    """Return the path of Airflow's address, without a trailing slash: empty, or a proxy's prefix."""
    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")


def job_log_path(run_id: str) -> str:
    """Return the path of a run's log page."""
    return f"{base_path()}{JOB_LOGS_PATH}/{quote(run_id, safe='')}/log"


@attrs.define()
class JobLogLink(BaseOperatorLink):
    """A link to the output of the task's job."""

    operators: ClassVar[list[type[BaseOperator]]] = []

    @property
    def name(self) -> str:
        return "Job log"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        run_id = _xcom(ti_key, "millrace_run_id")
        return job_log_path(str(run_id)) if run_id else ""


@attrs.define()
class ReportLink(BaseOperatorLink):
    """A link to the report of the task's operation."""

    operators: ClassVar[list[type[BaseOperator]]] = []

    @property
    def name(self) -> str:
        return "Report"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        run_id = _xcom(ti_key, "millrace_run_id")
        return f"{base_path()}/millrace/maintenance?{urlencode({'run': str(run_id)})}" if run_id else ""


@attrs.define()
class SparkUiLink(BaseOperatorLink):
    """A link to Spark's interface: the driver's while the job runs (with the setting ``spark_ui_url``), or the master's
    of a cluster."""

    operators: ClassVar[list[type[BaseOperator]]] = []

    @property
    def name(self) -> str:
        return "Spark UI"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        from millrace_airflow.hooks import load_settings

        run_id = _xcom(ti_key, "millrace_run_id")
        if not run_id:
            return ""
        return (
            spark_ui_url(str(run_id), data_dir=getattr(operator, "data_dir", None)) if load_settings().spark_ui else ""
        )


@attrs.define()
class DataDocsLink(BaseOperatorLink):
    """A link to the page that a quality task's report names under ``data_docs``."""

    operators: ClassVar[list[type[BaseOperator]]] = []

    @property
    def name(self) -> str:
        return "Data Docs"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        report = _xcom(ti_key, "return_value")
        return str(report.get("data_docs") or "") if isinstance(report, dict) else ""


def spark_ui_url(run_id: str, *, data_dir: str | None = None) -> str:
    """Return the URL of a run's Spark interface from its progress; empty if there is none."""
    from millrace.runtime.launch.folder import RunFolder, read_json
    from millrace_airflow.hooks import load_settings

    progress = read_json(RunFolder(load_settings(data_dir), run_id).progress) or {}
    return str((progress.get("figures") or {}).get("spark_ui") or "")


def _xcom(ti_key: TaskInstanceKey, key: str) -> object:
    from airflow.sdk.bases.xcom import BaseXCom

    # A frozen key works, too; the protocol declares settable attributes.
    return BaseXCom.get_value(ti_key=ti_key, key=key)  # type: ignore[arg-type]
