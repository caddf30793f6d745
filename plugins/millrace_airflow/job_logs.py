"""The page of the button "Job log": the output of a run's job, behind Airflow's login."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI


def make_app() -> FastAPI:
    """Return the application: ``GET /<run id>/log?lines=2000`` shows the last lines of the run's log as text."""
    from fastapi import FastAPI, HTTPException
    from fastapi.responses import PlainTextResponse

    from millrace.base.errors import MillraceError
    from millrace.runtime.launch.folder import RunFolder
    from millrace.runtime.launch.launcher import log_tail
    from millrace.service.middleware import SecurityHeaders
    from millrace_airflow.hooks import load_settings
    from millrace_airflow.ui.access import Reader

    app = FastAPI(title="Logs of Millrace's jobs", docs_url=None, redoc_url=None, openapi_url=None)

    def job_log(run_id: str, user: Reader, lines: int = 2000) -> str:
        try:
            folder = RunFolder(load_settings(), run_id)
        except MillraceError as error:
            raise HTTPException(404, str(error)) from None
        if not folder.log.exists():
            raise HTTPException(404, f"no log of run {run_id}: it never started, or was removed")
        return log_tail(folder.log, lines=max(1, min(lines, 100_000)), max_bytes=4 << 20) + "\n"

    # FastAPI resolves a route's annotations by name in the module, which lacks the lazy imports.
    job_log.__annotations__ |= {"user": Reader}
    app.get("/{run_id}/log", response_class=PlainTextResponse)(job_log)
    app.add_middleware(SecurityHeaders)
    return app
