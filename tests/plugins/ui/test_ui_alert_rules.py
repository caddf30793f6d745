"""The alert rules ask for what is exposed, each has a case in which it fires, and Prometheus itself agrees when."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from millrace.base.metrics import NAMESPACE
from millrace.base.settings import Settings
from millrace.brokers.programs import build_program
from millrace.brokers.server import free_ports
from tests.plugins.alert_receivers import declare, end_run, fail_task, http_receiver
from tests.plugins.ui.conftest import Site
from tests.plugins.ui.test_ui_dashboard import SERIES
from tests.waiting import until

RULES = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "alerts.yml"
CASES = Path(__file__).with_name("alert_rules_test.yml")
ALERTMANAGER_MODULE, ALERTMANAGER = "github.com/prometheus/alertmanager/cmd/alertmanager", "v0.28.1"
_RULES = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", _RULES, ids=[rule["alert"] for rule in _RULES])
def test_a_rule_asks_for_what_is_exposed_says_what_to_do_and_has_a_case(rule: dict[str, object]) -> None:
    expression = str(rule["expr"])
    names = re.findall(rf"\b{NAMESPACE}_\w+", expression)
    assert names
    assert not [name for name in names if name not in SERIES]
    assert {"summary", "action"} <= dict(rule["annotations"]).keys()  # type: ignore[call-overload]
    assert f'alertname="{rule["alert"]}"' in CASES.read_text()


def _program(folder: Path, name: str) -> str:
    """A program of Prometheus: from PATH, or out of Debian's package, unpacked into `folder`."""
    found = shutil.which(name)
    if found is None and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if os.geteuid() == 0:
            subprocess.run(["apt-get", "-q", "update"], env=quiet, timeout=300, check=False)
        subprocess.run(["apt-get", "-q", "download", "prometheus"], cwd=folder, env=quiet, timeout=300, check=False)
        for archive in folder.glob("prometheus_*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / "unpacked")], timeout=60, check=True)
        found = shutil.which(name, path=str(folder / "unpacked" / "usr" / "bin"))
    assert found, f"no {name}: install it (Debian: apt-get install prometheus)"
    return found


@pytest.mark.slow
def test_prometheus_takes_the_rules_and_fires_each_when_it_should(tmp_path: Path) -> None:
    for path in (RULES, CASES):
        shutil.copy(path, tmp_path)
    tool = _program(tmp_path, "promtool")
    for arguments in (["check", "rules", RULES.name], ["test", "rules", CASES.name]):
        done = subprocess.run([tool, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def _running(*command: str, folder: Path, url: str) -> Iterator[None]:
    """Run a server of Prometheus' in `folder`, from when `url` answers."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with suppress(httpx.HTTPError):
            return httpx.get(url).is_success
        return False

    try:
        until(answers, f"{url} answers", seconds=60)
        yield
    finally:
        process.kill()
        process.wait(30)


@contextmanager
def _served(app: Any) -> Iterator[int]:
    """Serve the application on a port of its own."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, "the application listens")
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.slow
def test_alerts_of_prometheus_and_of_airflow_reach_a_receiver_and_are_resolved(
    own_site: Site, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of docs/grafana with short times: rules over the real metrics, routed by Alertmanager."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    instead = ("Alertmanager", "deselect this test")
    manager = build_program(Settings(), ALERTMANAGER_MODULE, ALERTMANAGER, purpose=instead)
    prometheus = _program(tmp_path, "prometheus")
    monkeypatch.setenv("MILLRACE_METRICS_TOKEN", "a token that allows metrics only")
    (tmp_path / "token").write_text("a token that allows metrics only")
    manager_port, own_port = free_ports(2)
    with http_receiver() as (receiver, received), _served(own_site.client.app) as site:
        changes = {
            "alerts.yml": {r"for: \w+": "for: 2s"},
            "prometheus.yml": {
                "METRICS_TOKEN_FILE": str(tmp_path / "token"),
                "localhost:8080": f"localhost:{site}",
                "localhost:9093": f"localhost:{manager_port}",
                "15s": "1s",
            },
            "alertmanager.yml": {
                "localhost:9000": f"localhost:{receiver}",
                "group_wait: 30s": "group_wait: 1s",
                "group_interval: 5m": "group_interval: 1s",
            },
        }
        for name, edits in changes.items():
            text = (RULES.parent / name).read_text()
            for old, new in edits.items():
                assert re.search(old, text)
                text = re.sub(old, new, text)
            (tmp_path / name).write_text(text)
        with (
            _running(
                str(manager),
                "--config.file=alertmanager.yml",
                "--storage.path=alertmanager",
                f"--web.listen-address=127.0.0.1:{manager_port}",
                "--cluster.listen-address=",
                folder=tmp_path,
                url=f"http://localhost:{manager_port}/-/ready",
            ),
            _running(
                prometheus,
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=prometheus",
                "--rules.alert.resend-delay=1s",
                f"--web.listen-address=127.0.0.1:{own_port}",
                folder=tmp_path,
                url=f"http://localhost:{own_port}/-/ready",
            ),
        ):
            _no_streaming_job_is_reported(received)
            declare(monkeypatch, {"class": "millrace_airflow.alerts.AlertmanagerNotifier"})
            monkeypatch.setenv("AIRFLOW_CONN_ALERTMANAGER", f"http://localhost:{manager_port}")
            fail_task("r1")
            end_run("r1", failed=True)
            until(lambda: ("MillraceRunFailed", "firing") in _states(received), "the failed run is reported")
            end_run("r2", failed=False)
            until(lambda: ("MillraceRunFailed", "resolved") in _states(received), "the failed run is resolved")


def _no_streaming_job_is_reported(received: list[tuple[str, Any, str | None]]) -> None:
    until(lambda: ("MillraceNoStreamingJob", "firing") in _states(received), "the missing job is reported")
    alerts = [alert for _, body, _ in received for alert in body["alerts"]]
    (found,) = [each for each in alerts if each["labels"]["alertname"] == "MillraceNoStreamingJob"][:1]
    assert found["annotations"]["action"].startswith("start the DAG streaming")


def _states(received: list[tuple[str, Any, str | None]]) -> set[tuple[str, str]]:
    return {(alert["labels"]["alertname"], alert["status"]) for _, body, _ in received for alert in body["alerts"]}
