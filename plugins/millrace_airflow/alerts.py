"""Alerts when a run fails or is late.

The history of failures is for the UI. Airflow's configuration declares notifiers (``[millrace] notifiers``).

A notifier gets Airflow's context with an :class:`Alert` as ``alert``. A failure to deliver is recorded in the history,
and does not affect the other notifiers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

from airflow.sdk import BaseNotifier
from airflow.sdk.configuration import conf

from millrace.base.bounded_call import BoundedCalls
from millrace.base.errors import InvalidSettings

RUN_FAILED: Final = "MillraceRunFailed"
RUN_LATE: Final = "MillraceRunLate"
MAX_TEXT: Final = 2000
"""The most characters of an error's message in an alert."""
_OPTION: Final = ("millrace", "notifiers")
_SEVERITIES: Final = {RUN_FAILED: "critical", RUN_LATE: "warning"}
_PATH: Final = "/api/v2/alerts"
_TIMEOUT: Final = 5.0
"""Time-out of a request to Alertmanager, in seconds. Meanwhile the DAG processor, which delivers, reads no DAG."""
_RETRIES: Final = 2
"""The number of connection retries."""
_LONGEST: Final = 20.0
"""Seconds that a delivery to Alertmanager may take in all: each byte of a slow receiver resets the time-out."""
_MAX_BODY: Final = 4 * MAX_TEXT
"""The most bytes that are read of Alertmanager's answer."""
_MAX_DELIVERIES: Final = 4
"""Deliveries that run at a time in a process, those that exceeded their time included."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Alert:
    """A notifier's report about a run. It renders as its summary."""

    name: str
    """:data:`RUN_FAILED` or :data:`RUN_LATE`; Alertmanager's ``alertname``."""
    dag_id: str
    run_id: str
    summary: str
    action: str
    """What the reader should do."""
    url: str
    """The run's URL in Airflow's UI."""

    def __str__(self) -> str:
        return self.summary


class AlertmanagerNotifier(BaseNotifier):
    """Posts alerts to Prometheus' Alertmanager, and resolves them once a later run of the DAG has succeeded.

    `conn_id` is an Airflow connection: schema, host, port, login, password (basic authentication), and ``path`` in its
    extra if Alertmanager has a prefix. `labels` are added to each alert. An alert that no run resolves ends after
    `hours`.
    """

    def __init__(
        self, conn_id: str = "alertmanager", *, labels: Mapping[str, str] | None = None, hours: float = 24.0
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self.labels = dict(labels or {})
        self.hours = hours
        self._deliveries = BoundedCalls("alertmanager", most=_MAX_DELIVERIES)

    def notify(self, context: Any) -> None:
        """Post the alert of `context`. Raises RuntimeError with Alertmanager's response."""
        self._post(self._firing(context["alert"]))

    async def async_notify(self, context: Any) -> None:
        """Post the alert from the triggerer. See :meth:`notify`."""
        import httpx
        from airflow.sdk import Connection

        arguments = self._client(await Connection.async_get(self.conn_id))
        transport = httpx.AsyncHTTPTransport(retries=_RETRIES)
        async with (
            asyncio.timeout(_LONGEST),
            httpx.AsyncClient(transport=transport, trust_env=False, **arguments) as client,
            client.stream("POST", _PATH, json=self._firing(context["alert"])) as answer,
        ):
            if answer.is_error:
                said = b""
                async for part in answer.aiter_bytes(_MAX_BODY):
                    said += part
                    if len(said) >= _MAX_BODY:
                        break
                raise _refusal(answer.status_code, said)

    def resolve(self, dag_id: str) -> None:
        """Resolve the DAG's alerts after a successful run."""
        now = datetime.now(UTC).isoformat()
        self._post([{"labels": self._labels(name, dag_id), "endsAt": now} for name in _SEVERITIES])

    def _firing(self, alert: Alert) -> list[dict[str, Any]]:
        return [
            {
                "labels": self._labels(alert.name, alert.dag_id),
                "annotations": {"summary": alert.summary, "action": alert.action},
                "endsAt": (datetime.now(UTC) + timedelta(hours=self.hours)).isoformat(),
                "generatorURL": alert.url,
            }
        ]

    def _labels(self, name: str, dag_id: str) -> dict[str, str]:
        return {**self.labels, "alertname": name, "dag_id": dag_id, "severity": _SEVERITIES[name]}

    def _post(self, alerts: list[dict[str, Any]]) -> None:
        import httpx
        from airflow.sdk import Connection

        arguments = self._client(Connection.get(self.conn_id))

        def deliver() -> None:
            transport = httpx.HTTPTransport(retries=_RETRIES)
            with (
                httpx.Client(transport=transport, trust_env=False, **arguments) as client,
                client.stream("POST", _PATH, json=alerts) as answer,
            ):
                if answer.is_error:
                    said = b""
                    for part in answer.iter_bytes(_MAX_BODY):
                        said += part
                        if len(said) >= _MAX_BODY:
                            break
                    raise _refusal(answer.status_code, said)

        self._deliveries.run(deliver, _LONGEST)

    def _client(self, connection: Any) -> dict[str, Any]:
        if not connection.host:
            raise InvalidSettings(f"the Airflow connection {self.conn_id} has no host: give it Alertmanager's address")
        secure = "https" in (connection.schema, connection.conn_type)
        port = f":{connection.port}" if connection.port else ""
        prefix = str(connection.extra_dejson.get("path", "")).rstrip("/")
        return {
            "base_url": f"{'https' if secure else 'http'}://{connection.host}{port}{prefix}",
            "auth": (connection.login, connection.password or "") if connection.login else None,
            "timeout": _TIMEOUT,
        }


def _refusal(status: int, said: bytes) -> RuntimeError:
    return RuntimeError(f"Alertmanager answered {status}: {said.decode(errors='replace')[:MAX_TEXT]}")


def make_notifiers() -> list[BaseNotifier]:
    """Return the notifiers that ``[millrace] notifiers`` declares: a JSON list of ``{"class": path, argument: value}``.

    Raises InvalidSettings, naming the faulty entry.
    """
    text = conf.get(*_OPTION, fallback="").strip()
    if not text:
        return []
    where = "[millrace] notifiers in airflow.cfg (AIRFLOW__MILLRACE__NOTIFIERS)"
    try:
        declared = json.loads(text)
    except ValueError as error:
        raise InvalidSettings(f"{where} is not JSON: {error}") from None
    if not isinstance(declared, list) or not all(isinstance(each, dict) and "class" in each for each in declared):
        raise InvalidSettings(f'{where} must be a list of objects like {{"class": "path.of.a.Notifier", "to": "ada"}}')
    made = []
    for each in declared:
        arguments = {name: value for name, value in each.items() if name != "class"}
        try:
            notifier = pkgutil.resolve_name(each["class"])(**arguments)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise InvalidSettings(f"{where}: {each['class']} cannot be created: {error}") from None
        if not isinstance(notifier, BaseNotifier):
            raise InvalidSettings(f"{where}: {each['class']} is not an Airflow notifier (airflow.sdk.BaseNotifier)")
        made.append(notifier)
    return made


def run_callbacks() -> dict[str, Callable[[Any], None]]:
    """Return a DAG's callbacks for the ends of its runs; empty if no notifier is declared. Raises InvalidSettings."""
    declared = make_notifiers()
    callbacks: dict[str, Callable[[Any], None]] = {}
    if declared:
        callbacks["on_failure_callback"] = run_failed
    if any(hasattr(each, "resolve") for each in declared):
        callbacks["on_success_callback"] = run_succeeded
    return callbacks


def run_failed(context: Any) -> None:
    """Notify all notifiers that a run failed. Called by the DAG processor."""
    dag_id, run_id = context["dag"].dag_id, context["run_id"]
    error = _newest_error(dag_id, run_id) or str(context.get("reason") or "no error is on record")
    alert = Alert(
        RUN_FAILED,
        dag_id,
        run_id,
        f"{dag_id}: run {run_id} failed: {error}"[:MAX_TEXT],
        "see the run's log; docs/operating.md, Errors, says what each code means and what to do",
        _run_url(dag_id, run_id),
    )
    for notifier in make_notifiers():
        try:
            notifier({**context, "alert": alert})
        except Exception as error:
            _record_undelivered(notifier, dag_id, run_id, error)


def run_succeeded(context: Any) -> None:
    """Notify the notifiers that resolve alerts that a run succeeded. Called by the DAG processor."""
    dag_id = context["dag"].dag_id
    for notifier in make_notifiers():
        if hasattr(notifier, "resolve"):
            try:
                notifier.resolve(dag_id)
            except Exception as error:
                _record_undelivered(notifier, dag_id, context["run_id"], error)


async def deadline_missed(*, dag_id: str, seconds: float, **context: Any) -> None:
    """Notify all notifiers that a run of `dag_id` has not ended `seconds` after it was queued.

    Called by the triggerer.
    """
    message = f"not ended {seconds:.0f} s after it was queued"
    _logger.warning("a run of %s has not ended after %.0f s", dag_id, seconds)
    given = context.get("context") or {}
    run = given.get("dag_run") or {}
    run_id = run.get("dag_run_id") if isinstance(run, dict) else None
    line = {
        "kind": "deadline",
        "at": time.time(),
        "dag_id": dag_id,
        "run_id": run_id,
        "error": {"code": "DEADLINE_MISSED", "message": message},
    }
    await asyncio.to_thread(_record, line)
    alert = Alert(
        RUN_LATE,
        dag_id,
        run_id or "",
        f"{dag_id}: run {run_id}: {message}",
        "look at the page Maintenance: does it wait for another job, or is its data larger than usual?",
        _run_url(dag_id, run_id or ""),
    )
    for notifier in make_notifiers():
        try:
            await _notify(notifier, {**given, "alert": alert})
        except Exception as error:
            await asyncio.to_thread(_record_undelivered, notifier, dag_id, alert.run_id, error)


async def _notify(notifier: BaseNotifier, context: Any) -> None:
    if type(notifier).async_notify is BaseNotifier.async_notify:
        await asyncio.to_thread(notifier, context)
        return
    notifier.context = context
    await notifier


def record_failure(line: dict[str, Any]) -> None:
    """Add a line to ``run/history/failures.jsonl`` of the data folder."""
    from millrace.base.settings import Settings
    from millrace.runtime.launch.history import FAILURES, append_history, history_path

    append_history(history_path(Settings.load(), FAILURES), line)


def _record(line: dict[str, Any]) -> None:
    """Add a line to the history. A disk that refuses it must not keep an alert from being delivered."""
    try:
        record_failure(line)
    except Exception as error:
        _logger.error("the history of failures has no line of %s: %s", line["dag_id"], error)


def _record_undelivered(notifier: BaseNotifier, dag_id: str, run_id: str, error: Exception) -> None:
    name = type(notifier).__name__
    _logger.error("%s could not deliver an alert of %s: %s", name, dag_id, error)
    _record(
        {
            "kind": "alert",
            "at": time.time(),
            "dag_id": dag_id,
            "run_id": run_id,
            "error": {"code": "ALERT_NOT_DELIVERED", "message": f"{name}: {error}"[:MAX_TEXT]},
        }
    )


def _newest_error(dag_id: str, run_id: str) -> str | None:
    """Return the error of the run's task that failed last; None if the history has none or cannot be read."""
    from millrace.base.settings import Settings
    from millrace.runtime.launch.history import FAILURES, history_path, read_history

    try:
        for line in read_history(history_path(Settings.load(), FAILURES)):
            if line.get("kind") == "task" and (line.get("dag_id"), line.get("run_id")) == (dag_id, run_id):
                return f"{line['error']['code']}: {line['error']['message']}"
    except Exception as error:  # an alert without its error is better than none
        _logger.error("the history of failures cannot be read: %s", error)
    return None


def _run_url(dag_id: str, run_id: str) -> str:
    base = conf.get("api", "base_url", fallback="").rstrip("/") or "http://localhost:8080"
    return f"{base}/dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}"
