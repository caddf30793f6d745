"""`millrace flows service create, list, …` against a service that runs.

What they do, and what they say where something is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from millrace.access.grants import Grant, Role
from millrace.base.errors import ChannelNotFound
from millrace.base.settings import Settings
from millrace.flows import supervisor
from millrace.flows.range_host.status import PipelineStatus, State, TaskStatus, status_path
from millrace.flows.sources.kafka.topics import Topics
from millrace.pipelines.store.store import open_pipelines
from millrace.service.server import serving
from tests.cli.deployment import Deployment
from tests.pipelines.api.test_routes import DECLARED, OWN, Service


@pytest.fixture
def service(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    settings.data_dir.mkdir(mode=0o700)
    with open_pipelines(settings, env={}) as store:
        made = Service(settings, store)
        with serving(made.app, settings) as address:
            monkeypatch.setenv("MILLRACE_PIPELINES", address)
            monkeypatch.setenv("MILLRACE_SERVER_TOKEN", OWN)
            monkeypatch.setenv("SINK_PASSWORD", "hunter2")
            yield made


@pytest.fixture
def cli(service: Service, settings: Settings) -> Deployment:
    return Deployment(settings)


def declared(folder: Path, **changes: Any) -> str:
    """A file with a secret from the environment."""
    sink = {**DECLARED["sink"], "password": "${env:SINK_PASSWORD}"}
    file = folder / "flights.yaml"
    file.write_text(yaml.safe_dump({"id": "flights", **DECLARED, "sink": sink, **changes}))
    return str(file)


@pytest.mark.slow
def test_a_pipeline_lives_from_create_to_delete(cli: Deployment, service: Service, tmp_path: Path) -> None:
    file = declared(tmp_path)
    assert "no pipelines" in cli.ok("flows", "service", "list")
    assert "The declaration is valid" in cli.ok("flows", "service", "validate", file)
    made = cli.as_json("flows", "service", "create", file, "--run")
    assert (made["id"], made["wanted"], made["secrets"]) == ("flights", "RUNNING", ["sink.password"])
    assert service.deployment.running("flights")
    assert cli.as_json("flows", "service", "pause", "flights")["wanted"] == "PAUSED"
    assert cli.as_json("flows", "service", "resume", "flights")["wanted"] == "RUNNING"
    cli.ok("flows", "service", "restart", "flights", "--only-failed")
    assert "RUNNING" in cli.fails("PIPELINE_BUSY", "flows", "service", "delete", "flights", "--yes")
    cli.fails("PIPELINE_BUSY", "flows", "service", "offsets", "flights", "--reset", "latest")
    assert cli.as_json("flows", "service", "stop", "flights")["wanted"] == "STOPPED"
    assert "in-0" in cli.ok("flows", "service", "offsets", "flights", "--reset", "earliest")
    assert cli.as_json("flows", "service", "offsets", "flights", "--set", "in-0=7") == [
        {"task": "in-0", "offset": 7},
        {"task": "in-1", "offset": 0},
    ]
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"a": 1}\n\n{"a": 2}\n')
    shown = json.loads(cli.ok("flows", "service", "dry-run", "flights", str(samples)))
    assert [each["document"] for each in shown] == [{"b": 1}, {"b": 2}]
    changes = tmp_path / "changes.json"
    changes.write_text(json.dumps({"sink": DECLARED["sink"]}))
    assert "copy" in cli.ok("flows", "service", "clone", "flights", "copy", "--changes", str(changes))
    assert [each["id"] for each in cli.as_json("flows", "service", "list", "--text", "cop")] == ["copy"]
    assert cli.as_json("flows", "service", "redrive-errors", "flights", "--show")["state"] == "NONE"
    cli.ok("flows", "service", "redrive-errors", "flights", "--kind", "CAST", "--place", "0-7")
    assert service.redrives.asked["flights"]["selection"]["ids"] == ["0-7"]
    cli.fails("LOG_UNAVAILABLE", "flows", "service", "errors", "flights")
    assert "flights is deleted" in cli.ok("flows", "service", "delete", "flights", "--yes")
    cli.fails("PIPELINE_NOT_FOUND", "flows", "service", "get", "flights")
    assert cli.run("flows", "service", "delete", "copy", stdin="n\n").exit_code == 1
    assert [each["id"] for each in cli.as_json("flows", "service", "list")] == ["copy"], "who did not say yes keeps it"


def test_of_two_who_change_it_at_once_the_later_one_is_told(cli: Deployment, tmp_path: Path) -> None:
    cli.ok("flows", "service", "create", declared(tmp_path))
    version = str(json.loads(cli.ok("flows", "service", "get", "flights"))["version"])
    theirs = declared(tmp_path, failure_threshold=3)
    assert "failure_threshold" in cli.ok("flows", "service", "update", "flights", theirs, "--version", version)
    assert "read it" in cli.fails(
        "PIPELINE_CONFLICT", "flows", "service", "update", "flights", theirs, "--version", version
    )
    assert cli.run("flows", "service", "update", "flights", theirs).exit_code == 2, (
        "a change says what it was made from"
    )


def test_what_is_wrong_is_said_by_field(cli: Deployment, service: Service, tmp_path: Path) -> None:
    file = declared(tmp_path, flush={"items": 0}, nonsense=1)
    for command in ("create", "validate"):
        result = cli.run("flows", "service", command, file)
        assert result.exit_code == 1
        assert "flush.items: " in result.stderr
        assert "nonsense: " in result.stderr
        assert result.stderr.strip().endswith("PIPELINE_INVALID: the declaration has 2 problems")
    cli.fails("INVALID_SETTINGS", "flows", "service", "create", str(tmp_path / "absent.yaml"))
    assert "--id" in cli.fails("INVALID_ARGUMENT", "flows", "service", "create", declared(tmp_path, id=""))
    cli.fails("INVALID_ARGUMENT", "flows", "service", "offsets", "flights", "--set", "in-0")
    cli.fails("INVALID_ARGUMENT", "flows", "service", "offsets", "flights", "--set", "in-0=1", "--reset", "latest")
    assert service.ask("GET", "pipelines")[1]["total"] == 0


def test_who_may_not_and_where_no_service_is_are_told_so(
    cli: Deployment, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = declared(tmp_path)
    cli.ok("flows", "service", "create", file)
    monkeypatch.setenv("MILLRACE_SERVER_TOKEN", service.token("eve", Grant(Role.READ, ("pipeline:*",))))
    assert "operate" in cli.fails("PERMISSION_DENIED", "flows", "service", "stop", "flights")
    monkeypatch.setenv("MILLRACE_SERVER_TOKEN", "nonsense")
    assert "millrace tokens add" in cli.fails("PERMISSION_DENIED", "flows", "service", "list")
    monkeypatch.delenv("MILLRACE_SERVER_TOKEN")
    told = cli.fails("PERMISSION_DENIED", "flows", "service", "list")
    assert "MILLRACE_SERVER_TOKEN" in told, "the machine's own token goes to no address that somebody names"
    monkeypatch.setenv("MILLRACE_SERVER_TOKEN", OWN)
    assert "serve" in cli.fails("SERVICE_UNAVAILABLE", "flows", "service", "list", "--server", "http://127.0.0.1:9")
    cli.fails("INVALID_SETTINGS", "flows", "service", "list", "--server", "127.0.0.1:9")


def test_status_is_told_with_and_without_a_service(
    cli: Deployment, service: Service, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("flows", "service", "create", declared(tmp_path))
    task = TaskStatus(
        task="in-0",
        state=State.FAILED,
        position=7,
        end=9,
        lag=2,
        records_in=7,
        cause="no such index",
        code="SINK_REFUSED",
    )
    said = PipelineStatus(pipeline="flights", state=State.FAILED, pid=12345, tasks=(task,), cause="all of its tasks")
    status_path(settings, "flights").write_text(said.model_dump_json())
    words = cli.ok("flows", "service", "status", "flights")
    assert "all of its tasks" in words
    assert "in-0" in words
    (told,) = cli.as_json("flows", "service", "status", "flights")["tasks"]
    assert (told["lag"], told["code"]) == (2, "SINK_REFUSED")
    cli.fails("PIPELINE_NOT_FOUND", "flows", "service", "status", "absent")
    monkeypatch.delenv("MILLRACE_PIPELINES")
    assert cli.as_json("flows", "service", "status", "flights")["tasks"] == [told]
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    status_path(settings, "flights").write_text(
        PipelineStatus(pipeline="flights", state=State.RUNNING, pid=gone.pid).model_dump_json()
    )
    here = cli.as_json("flows", "service", "status", "flights")
    assert (here["state"], str(gone.pid) in here["cause"]) == ("STOPPED", True)
    # Another process has its number since: this one began after that was said.
    taken = PipelineStatus(pipeline="flights", state=State.RUNNING, pid=os.getpid(), at=1.0)
    status_path(settings, "flights").write_text(taken.model_dump_json())
    assert cli.as_json("flows", "service", "status", "flights")["state"] == "STOPPED"
    cli.fails("PIPELINE_NOT_FOUND", "flows", "service", "status", "absent")


def test_where_no_service_ever_ran_it_is_said_to_start_one(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLRACE_PIPELINES", "MILLRACE_SERVER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for folder in (settings, replace(settings, data_dir=settings.data_dir / "absent")):
        assert "millrace flows service serve" in Deployment(folder).fails(
            "SERVICE_UNAVAILABLE", "flows", "service", "list"
        )


def test_a_pipeline_in_the_foreground_says_what_its_worker_waits_for(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: object) -> Any:
        raise ChannelNotFound("there is no topic flights: create it")

    monkeypatch.setenv("SINK_PASSWORD", "hunter2")
    monkeypatch.setattr(Topics, "partitions", missing)
    monkeypatch.setattr(supervisor, "supervise", lambda *_, **__: SimpleNamespace(code=0))
    ran = Deployment(settings).run("flows", "run", declared(tmp_path))
    assert ran.exit_code == 0
    assert "CHANNEL_NOT_FOUND: there is no topic flights: create it. The worker tries again." in ran.stderr
