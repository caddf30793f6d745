"""``jobs run`` becomes the job; ``config show`` says where each setting comes from and keeps credentials to itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.base.settings import LIVE, Settings, describe
from millrace.commands import configuration, jobs
from millrace.commands.main import app
from tests.cli.deployment import Deployment


def _executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    calls: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        assert path == sys.executable
        calls.append((arguments[1:], environment))

    monkeypatch.setattr(os, "execve", execve)
    return calls


def test_the_job_runs_in_place_of_the_command_with_the_settings_it_was_given(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _executed(monkeypatch)
    Deployment(settings).ok("jobs", "run", "--with-flusher", "--available-now")
    [(arguments, environment)] = calls
    assert Path(arguments[0]).is_file()
    assert arguments[1:] == ["--with-flusher", "--available-now"]
    assert environment["MILLRACE_DATA"] == str(settings.data_dir)
    assert str(Path(configuration.__file__).parents[2]) in environment["PYTHONPATH"].split(os.pathsep)
    handed = {name: value for name, value in environment.items() if name.startswith("MILLRACE_")}
    assert Settings.load(env=handed).data_dir == settings.data_dir


@pytest.mark.slow
def test_the_job_understands_what_it_is_called_with() -> None:
    command = [sys.executable, str(jobs.jobs_folder() / "streaming_node.py"), "--help"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert "--with-flusher" in found.stdout
    assert "--available-now" in found.stdout


def test_without_the_checkout_the_error_says_how_to_name_it(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _executed(monkeypatch)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    assert "MILLRACE_HOME" in Deployment(settings).fails("INVALID_SETTINGS", "jobs", "run")
    assert not calls


def _shown(**environment: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["config", "show", "--json"], env=environment)
    assert result.exit_code == 0, result.stderr
    return {row["setting"]: row for row in json.loads(result.stdout)}


def test_each_setting_is_shown_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text("[millrace]\npchannels = 3\nspark_memory = '2g'\n", encoding="utf-8")
    found = _shown(MILLRACE_CONFIG=str(file), MILLRACE_SPARK_MEMORY="3g")
    assert [*found] == [name for name, *_ in describe()]
    assert (found["pchannels"]["value"], found["pchannels"]["source"]) == (3, "file millrace.toml")
    assert (found["spark_memory"]["value"], found["spark_memory"]["source"]) == ("3g", "environment")
    assert found["metrics_port"]["source"] == "default"
    result = CliRunner().invoke(
        app, ["config", "show", "--changed"], env={"MILLRACE_CONFIG": str(file), "MILLRACE_SPARK_MEMORY": "3g"}
    )
    assert "pchannels" in result.stdout
    assert "metrics_port" not in result.stdout


def test_credentials_are_never_shown() -> None:
    result = CliRunner().invoke(
        app, ["config", "show"], env={"MILLRACE_LOG": "kafka://somebody:opensesame@broker:9092"}
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("INVALID_SETTINGS: MILLRACE_LOG holds credentials")
    assert "opensesame" not in result.stdout + result.stderr


def test_the_version_names_the_chain_and_the_libraries() -> None:
    result = CliRunner().invoke(app, ["version", "--json"])
    found = json.loads(result.stdout)
    assert found["millrace"]
    assert found["chain_version"] >= 1
    assert found["pyarrow"]


def test_live_settings_are_shown_changed_and_given_back(deployment: Deployment) -> None:
    def shown(*options: str) -> dict[str, dict[str, Any]]:
        return {row["setting"]: row for row in deployment.as_json("config", "show", *options)}

    assert shown("--live").keys() == LIVE
    deployment.ok("config", "set", "flush_interval", "5")
    assert (shown()["flush_interval"]["value"], shown()["flush_interval"]["source"]) == (5.0, "config set")
    for refused in (("set", "pchannels", "5"), ("set", "flush_interval", "soon"), ("unset", "pchannels")):
        deployment.fails("INVALID_SETTINGS", "config", *refused)
    deployment.ok("config", "unset", "flush_interval")
    assert shown()["flush_interval"]["source"] != "config set"
