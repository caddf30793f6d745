"""A run that fails or is late reaches whom `[millrace] notifiers` names: Alertmanager, a mailbox."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from email import message_from_bytes
from typing import Any

import pytest
from airflow.sdk import BaseNotifier

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.runtime.launch.history import FAILURES, history_path, read_history
from millrace_airflow.alerts import deadline_missed, make_notifiers
from millrace_airflow.defaults import millrace_dag
from tests.plugins.alert_receivers import declare, end_run, fail_task, http_receiver, mailbox, slow_receiver

ALERTMANAGER = {"class": "millrace_airflow.alerts.AlertmanagerNotifier", "labels": {"team": "data"}}
MAIL = {
    "class": "airflow.providers.smtp.notifications.smtp.SmtpNotifier",
    "from_email": "millrace@example.org",
    "to": "ada@example.org",
    "subject": "{{ alert.name }}",
    "html_content": "{{ alert }} {{ alert.action }}",
}


@pytest.fixture
def here(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"class": "a.B"}', "must be a list of objects"),
        ('[{"to": "ada"}]', "must be a list of objects"),
        ('[{"class": "no.such.Notifier"}]', "no.such.Notifier cannot be created: No module named"),
        ('[{"class": "millrace_airflow.alerts.Nobody"}]', "Nobody cannot be created"),
        ('[{"class": "millrace_airflow.alerts.AlertmanagerNotifier", "port": 1}]', "unexpected keyword argument"),
        ('[{"class": "builtins.dict"}]', "builtins.dict is not an Airflow notifier"),
    ],
)
def test_a_faulty_declaration_names_the_fault(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("AIRFLOW__MILLRACE__NOTIFIERS", text)
    with pytest.raises(InvalidSettings, match=rf"AIRFLOW__MILLRACE__NOTIFIERS.*{message}"):
        make_notifiers()


def test_without_notifiers_a_dag_has_no_callbacks(here: Settings) -> None:
    dag = millrace_dag("nightly", doc="Every night.")
    assert not dag.on_failure_callback
    assert not dag.on_success_callback


def test_a_dags_own_callback_replaces_the_notifiers(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, MAIL)
    dag = millrace_dag("nightly", doc="Every night.", on_failure_callback=print)
    assert dag.on_failure_callback is print
    assert not dag.on_success_callback, "no notifier of these resolves anything"


def test_a_failed_run_reaches_alertmanager_with_its_error_and_a_later_success_resolves_it(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, ALERTMANAGER)
    with http_receiver() as (port, received):
        monkeypatch.setenv(
            "AIRFLOW_CONN_ALERTMANAGER",
            json.dumps(
                {
                    "conn_type": "http",
                    "host": "127.0.0.1",
                    "port": port,
                    "login": "ada",
                    "password": "s3cret",
                    "extra": {"path": "/am/"},
                }
            ),
        )
        fail_task("an earlier one")
        fail_task("night/1")
        end_run("night/1", failed=True)
        end_run("night/2", failed=False)
    (path, (failed,), login), (_, resolved, _) = received
    assert path == "/am/api/v2/alerts"
    assert login == "Basic YWRhOnMzY3JldA=="
    labels = {"alertname": "MillraceRunFailed", "dag_id": "nightly", "severity": "critical", "team": "data"}
    assert failed["labels"] == labels
    assert failed["annotations"]["summary"] == "nightly: run night/1 failed: JOB_LOST: its process is gone"
    assert failed["generatorURL"].endswith("/dags/nightly/runs/night%2F1")
    assert resolved[0]["labels"] == labels
    assert datetime.fromisoformat(resolved[0]["endsAt"]) <= datetime.now(UTC) < datetime.fromisoformat(failed["endsAt"])
    assert {each["labels"]["alertname"] for each in resolved} == {"MillraceRunFailed", "MillraceRunLate"}


def test_a_failed_run_is_mailed_though_alertmanager_refuses_and_the_refusal_is_on_record(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, ALERTMANAGER, MAIL)
    with http_receiver(status=503) as (port, received), mailbox() as (smtp, mails):
        monkeypatch.setenv("AIRFLOW_CONN_ALERTMANAGER", f"http://127.0.0.1:{port}")
        extra = {"disable_ssl": True, "disable_tls": True}
        monkeypatch.setenv(
            "AIRFLOW_CONN_SMTP_DEFAULT",
            json.dumps({"conn_type": "smtp", "host": "127.0.0.1", "port": smtp, "extra": extra}),
        )
        fail_task("r1")
        end_run("r1", failed=True)
        assert len(received) == 1
    (mail,) = map(message_from_bytes, mails)
    assert (mail["Subject"], mail["To"]) == ("MillraceRunFailed", "ada@example.org")
    text = next(part for part in mail.walk() if part.get_content_type() == "text/html").get_payload(decode=True)
    assert isinstance(text, bytes)
    assert b"nightly: run r1 failed: JOB_LOST: its process is gone" in text
    (line,) = [each for each in read_history(history_path(here, FAILURES)) if each["kind"] == "alert"]
    assert (line["dag_id"], line["run_id"]) == ("nightly", "r1")
    assert line["error"]["code"] == "ALERT_NOT_DELIVERED"
    assert "AlertmanagerNotifier: Alertmanager answered 503" in line["error"]["message"]


def test_a_late_run_reaches_both_from_the_triggerer(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, {"class": "tests.plugins.test_alerts.FailingNotifier"}, ALERTMANAGER)
    with http_receiver() as (port, received):
        monkeypatch.setenv("AIRFLOW_CONN_ALERTMANAGER", f"http://127.0.0.1:{port}")
        asyncio.run(deadline_missed(dag_id="nightly", seconds=60.0, context={"dag_run": {"dag_run_id": "r1"}}))
    ((_, (late,), _),) = received
    assert late["labels"]["alertname"] == "MillraceRunLate"
    assert late["labels"]["severity"] == "warning"
    assert late["annotations"]["summary"] == "nightly: run r1: not ended 60 s after it was queued"
    undelivered, missed = read_history(history_path(here, FAILURES))
    assert (missed["kind"], undelivered["kind"]) == ("deadline", "alert")
    assert "FailingNotifier: gone" in undelivered["error"]["message"]


def test_a_history_that_cannot_be_read_or_written_keeps_no_alert_back(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is what an alert may be about."""
    path = history_path(here, FAILURES)
    path.mkdir(parents=True)  # every read and write of the file fails
    declare(monkeypatch, {"class": "tests.plugins.test_alerts.FailingNotifier"}, ALERTMANAGER)
    with http_receiver() as (port, received):
        monkeypatch.setenv("AIRFLOW_CONN_ALERTMANAGER", f"http://127.0.0.1:{port}")
        end_run("r1", failed=True)
        asyncio.run(deadline_missed(dag_id="nightly", seconds=60.0, context={"dag_run": {"dag_run_id": "r2"}}))
    assert [alert["labels"]["alertname"] for _, (alert,), _ in received] == ["MillraceRunFailed", "MillraceRunLate"]


def test_a_receiver_that_answers_byte_by_byte_is_given_up(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte resets the time-out of a read, so a slow receiver would hold the DAG processor for hours."""
    monkeypatch.setattr("millrace_airflow.alerts._LONGEST", 0.5)
    declare(monkeypatch, ALERTMANAGER)
    with slow_receiver() as port:
        monkeypatch.setenv("AIRFLOW_CONN_ALERTMANAGER", f"http://127.0.0.1:{port}")
        begun = time.monotonic()
        end_run("r1", failed=True)
        asyncio.run(deadline_missed(dag_id="nightly", seconds=60.0, context={"dag_run": {"dag_run_id": "r2"}}))
        assert time.monotonic() - begun < 10
    undelivered = [each for each in read_history(history_path(here, FAILURES)) if each["kind"] == "alert"]
    assert {each["run_id"] for each in undelivered} == {"r1", "r2"}
    assert all("AlertmanagerNotifier: " in each["error"]["message"] for each in undelivered)


class FailingNotifier(BaseNotifier):
    """Cannot deliver; it has no method for the triggerer's loop."""

    def notify(self, context: Any) -> None:
        raise OSError("gone")
