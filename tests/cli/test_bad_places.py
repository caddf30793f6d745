"""No command answers a bad data folder, settings file or file name with a traceback.

Each ends in one line with a code.
"""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from millrace.commands.main import app
from tests.cli import reference
from tests.cli.deployment import Deployment

ELSEWHERE = {("system", "airflow")}
"""Becomes Airflow's own command line."""


def places(folder: Path) -> dict[str, str]:
    """What somebody may name as a data folder and is none."""
    file = folder / "file"
    file.write_text("root:x:0:0:root:/root:/bin/sh\n")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    return {
        "a file": str(file),
        "below a file": str(file / "data"),
        "a socket": str(folder / "socket"),
        "a name of 300 characters": str(folder / ("x" * 300)),
        "not UTF-8": os.fsdecode(os.fsencode(folder) + b"/d\xff\xfe"),
        "a zero byte": f"{folder}/a\0b",
        "empty": "",
    }


def arguments_of(command: reference.Command, place: str) -> tuple[list[str], dict[str, str]]:
    """The command's example with `place` as its data folder.

    As an option, or for the few that lack it by the environment.
    """
    words = shlex.split(command.examples[0])
    words = words[words.index("millrace") + 1 :]
    if "--data" in words:
        words[words.index("--data") + 1] = place
        return words, {}
    if any("--data" in each.opts for each in command.definition.params):
        return [*words, "--data", place], {}
    return words, {"MILLRACE_DATA": place.replace("\0", "_")}


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command that got as far as starting a program has taken the bad place for a good one."""

    def started(*given: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"it starts {given[0]}")

    monkeypatch.setattr(os, "execve", started)
    monkeypatch.setattr("subprocess.Popen.__init__", started)
    monkeypatch.chdir(tmp_path)


def refused(words: list[str], env: dict[str, str | None]) -> str | None:
    """What is wrong with how a command ends; None where it is refused in a line."""
    result = CliRunner().invoke(app, words, env=env, input="")
    said = result.stderr.strip().splitlines()
    if not isinstance(result.exception, SystemExit):
        return f"{result.exception!r}, exit code {result.exit_code}"
    if result.exit_code == 2:
        return None if "Usage" in result.stderr else "exit code 2 without a usage"
    code, colon, _ = said[-1].partition(": ") if said else ("", "", "")
    return (
        None if result.exit_code == 1 and colon and code.isupper() and len(said) == 1 else f"{result.exit_code}: {said}"
    )


def without_the_data_folder() -> set[tuple[str, ...]]:
    """Commands that look into none, and so end by something else, or well."""
    looks_elsewhere = {each.path for each in reference.commands() if each.path[:1] == ("backup",)}
    return {("version",), ("flows", "service", "new-key"), ("flows", "kinds")} | looks_elsewhere


SOME = {("status",), ("jobs", "list"), ("flows", "service", "list"), ("operations", "checkpoint"), ("tokens", "add")}
"""Commands of each way to come by the settings."""


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        ("a file", None),
        ("below a file", SOME),
        ("a socket", SOME),
        ("a name of 300 characters", SOME),
        ("not UTF-8", SOME),
        ("a zero byte", SOME),
        ("empty", SOME),
    ],
)
def test_no_command_takes_something_else_for_a_data_folder(
    tmp_path: Path, kind: str, some: set[tuple[str, ...]] | None
) -> None:
    place = places(tmp_path)[kind]
    found = {}
    for command in reference.commands():
        if command.path in ELSEWHERE | without_the_data_folder() or (some is not None and command.path not in some):
            continue
        words, env = arguments_of(command, place)
        if env and "\0" in place:
            continue  # an environment holds none
        wrong = refused(words, dict(env))
        if wrong is not None:
            found[" ".join(command.path)] = wrong
    assert not found


SETTINGS_FILES = {
    "not UTF-8": ("millrace.toml", b"[millrace]\nnode = '\xff'\n"),
    "not UTF-8 INI": ("airflow.cfg", b"[millrace]\nnode = \xff\n"),
    "without the table": ("millrace.toml", b"pchannels = 4\n"),
    "with another table": ("millrace.toml", b"[milrace]\npchannels = 4\n"),
    "INI without the section": ("airflow.cfg", b"[core]\nparallelism = 4\n"),
    "a zero byte": ("millrace.toml", b'[millrace]\nnode = "a\\u0000b"\n'),
    "malformed": ("millrace.toml", b"[millrace\n"),
}


@pytest.mark.parametrize("kind", SETTINGS_FILES)
def test_a_settings_file_that_cannot_be_meant_is_told_in_a_line(tmp_path: Path, kind: str) -> None:
    name, content = SETTINGS_FILES[kind]
    (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(app, ["status"], env={"MILLRACE_CONFIG": str(tmp_path / name)})
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert result.stderr.startswith("INVALID_SETTINGS: ")
    assert name in result.stderr


@pytest.mark.parametrize(
    "name", ["x" * 300 + ".toml", os.fsdecode(b"\xff.toml"), "folder"], ids=["long", "bytes", "folder"]
)
def test_the_name_of_a_settings_file_may_be_anything(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["status"], env={"MILLRACE_CONFIG": str(tmp_path / name)})
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stderr.startswith("INVALID_SETTINGS: ")


def test_an_empty_settings_file_sets_nothing(tmp_path: Path, deployment: Deployment) -> None:
    (tmp_path / "millrace.toml").touch()
    result = CliRunner().invoke(
        app,
        ["status", "--data", str(deployment.settings.data_dir)],
        env={"MILLRACE_CONFIG": str(tmp_path / "millrace.toml")},
    )
    assert result.exit_code == 0


def test_a_file_is_no_folder_of_backups(tmp_path: Path, deployment: Deployment) -> None:
    (tmp_path / "file").touch()
    deployment.fails("BACKUP_NOT_FOUND", "backup", "list", "--in", str(tmp_path / "file"))


def test_verify_says_where_there_was_nothing_to_check(deployment: Deployment) -> None:
    assert deployment.ok("verify").strip().splitlines()[-1] == (
        f"There is nothing to check in {deployment.settings.data_dir} yet."
    )
