"""What holds for every command: help, usage errors, exit codes, a quick start, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.base.package import VERSION
from millrace.base.settings import Settings
from millrace.commands import status
from millrace.commands.main import app
from tests.cli import reference
from tests.cli.deployment import Deployment

HEAVY = {"pyspark", "pyarrow", "deltalake", "duckdb", "numpy", "psutil"}


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """``millrace`` as a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.fixture(scope="module")
def users(shared: Deployment) -> Deployment:
    """The module's deployment with the collection ``users``."""
    shared.create_users()
    return shared


@pytest.mark.parametrize("path", [each.path for each in reference.commands()], ids=" ".join)
def test_each_command_has_help_with_an_example_that_it_understands(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    examples = reference.command(path).examples
    assert examples
    for example in examples:
        reference.parse(example)


@pytest.mark.parametrize("path", [(), *reference.groups()], ids=" ".join)
def test_a_group_without_a_command_shows_its_help_and_counts_as_wrong_usage(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(path))
    assert result.exit_code == 2
    assert "Usage" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("msgspec", "pipelines", ("flows", "check", "flights.yaml")),
        ("msgspec", "pipelines", ("flows", "service", "serve")),
        ("fastapi", "coord", ("coord",)),
        ("duckdb", "operations", ("verify",)),
    ],
)
def test_a_library_that_is_missing_is_told_with_what_installs_it(
    module: str, extra: str, arguments: tuple[str, ...], users: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith("millrace.operations.verification")]:
        monkeypatch.delitem(sys.modules, name)
    told = users.fails("INVALID_SETTINGS", *arguments)
    assert f"{module} is not installed: pip install 'millrace[{extra}]'" in told


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, millrace.commands.main; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True)
    assert not HEAVY & set(found.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["collections", "fly"],
        ["read"],
        ["read", "users", "--limit", "many"],
        ["read", "users", "--colour"],
        ["produce", "users", "--on-error", "ignore"],
        ["produce", "users", "--partition", "a", "--partition-by", "b"],
        ["produce", "users", "--delete", "--partition-by", "b"],
        ["collections", "create", "users", "--vchannels", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_touches_nothing(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments, env={"MILLRACE_DATA": str(tmp_path / "data")})
    assert result.exit_code == 2
    assert "Usage" in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "code, arguments",
    [
        ("COLLECTION_NOT_FOUND", ["read", "users"]),
        ("COLLECTION_NOT_FOUND", ["produce", "users", "rows.csv"]),
        ("COLLECTION_NOT_FOUND", ["collections", "describe", "users"]),
        ("COLLECTION_NOT_FOUND", ["collections", "drop", "users", "--yes"]),
        ("COLLECTION_NOT_FOUND", ["segments", "users"]),
        ("CHANNEL_NOT_FOUND", ["scan", "dml_0_1v0"]),
        ("CHANNEL_NOT_FOUND", ["unpark", "dml_0"]),
        ("INVALID_ARGUMENT", ["scan", "dml_0", "--from", "yesterday"]),
        ("INVALID_ARGUMENT", ["scan", "dml_0", "--from", "tick:-1"]),
        ("INVALID_ARGUMENT", ["scan", "dml_0", "--types", "INSERTS"]),
        ("INVALID_ARGUMENT", ["read", "users", "--at", "noon"]),
        ("INVALID_ARGUMENT", ["wal", "rejections", "--reason", "BAD_LUCK"]),
        ("INVALID_ARGUMENT", ["segments", "--state", "lost"]),
        ("INVALID_ARGUMENT", ["collections", "create", "users", "--field", "id"]),
        ("INVALID_ARGUMENT", ["collections", "create", "users", "--field", "id:int64"]),
        ("INVALID_ARGUMENT", ["collections", "create", "users", "--key", "id"]),
        ("INVALID_ARGUMENT", ["collections", "create", "users", "--field", "id:text", "--key", "id"]),
        ("INVALID_ARGUMENT", ["collections", "create", "users", "--from", "nowhere.csv", "--key", "id"]),
        ("INVALID_ARGUMENT", ["collections", "create", "users", "--from", "rows.xlsx", "--key", "id"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_an_error_is_one_line_with_its_code_and_starts_no_server(
    settings: Settings, code: str, arguments: list[str]
) -> None:
    found = Deployment(settings).fails(code, *arguments)
    assert "\n" not in found
    assert not settings.log_path.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "collections list",
        "status",
        "wal describe",
        "wal verify",
        "wal rejections",
        "verify",
        "segments",
        "checkpoints",
        "config show",
        "log stop",
        "log clock",
    ],
)
def test_looking_into_an_empty_folder_is_no_error_and_makes_nothing_there(settings: Settings, arguments: str) -> None:
    Deployment(settings).ok(*arguments.split())
    assert not settings.data_dir.exists()


def test_a_wrong_setting_is_told_as_such(settings: Settings) -> None:
    result = CliRunner().invoke(app, ["status"], env={"MILLRACE_PCHANNELS": "none"})
    assert result.exit_code == 1
    assert result.stderr.startswith("INVALID_SETTINGS: MILLRACE_PCHANNELS")


def test_the_data_option_goes_over_the_environment(tmp_path: Path) -> None:
    environment = {"MILLRACE_DATA": str(tmp_path / "other")}
    result = CliRunner().invoke(app, ["config", "show", "--json", "--data", str(tmp_path / "mine")], env=environment)
    values = {row["setting"]: row for row in json.loads(result.stdout)}
    assert values["data_dir"]["value"] == str(tmp_path / "mine")
    assert values["data_dir"]["source"] == "--data"


def test_an_interrupt_in_the_midst_of_a_command_ends_with_130(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(settings: Settings) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "deployment_status", interrupted)
    result = Deployment(settings).run("status")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_a_reader_that_leaves_early_ends_a_scan_quietly(users: Deployment) -> None:
    process = start("scan", "dml_0", "--follow", "--data", str(users.settings.data_dir))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    users.produce({"id": 1})
    users.produce({"id": 2})
    process.wait(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_the_shell_completes_names_of_collections(users: Deployment) -> None:
    environment = {
        "_MILLRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": "millrace read us",
        "COMP_CWORD": "2",
        "MILLRACE_DATA": str(users.settings.data_dir),
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="millrace")
    assert result.stdout.split() == ["users"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data", "{}", "--json", "config", "show"],
        ["--data", "{}", "config", "show", "--json"],
        ["config", "show", "--json", "--data", "{}"],
        ["--data", "/elsewhere", "config", "show", "--json", "--data", "{}"],
    ],
    ids=" ".join,
)
def test_a_shared_option_stands_before_or_after_the_command_which_takes_precedence(
    tmp_path: Path, arguments: list[str]
) -> None:
    result = CliRunner().invoke(app, [each.format(tmp_path / "mine") for each in arguments])
    assert result.exit_code == 0, result.stderr
    shown = {each["setting"]: each for each in json.loads(result.stdout)}
    assert (shown["data_dir"]["value"], shown["data_dir"]["source"]) == (str(tmp_path / "mine"), "--data")


def test_a_shared_option_before_a_command_that_does_not_take_it_is_wrong_usage(tmp_path: Path) -> None:
    for arguments in (["--json", "log", "stop"], ["--server", "https://host", "status"], ["--roots", "x", "version"]):
        result = CliRunner().invoke(app, ["--data", str(tmp_path / "data"), *arguments])
        assert result.exit_code == 2
        assert arguments[0] in result.stderr
        assert "does not take" in result.stderr
    result = CliRunner().invoke(
        app, ["status"], env={"MILLRACE_PIPELINES": "https://host", "MILLRACE_DATA": str(tmp_path)}
    )
    assert result.exit_code == 0, "a variable is for the commands that take it"


def test_the_address_of_the_service_is_taken_from_before_the_command_then_the_variable(tmp_path: Path) -> None:
    environment = {
        "MILLRACE_PIPELINES": "host-by-variable",
        "MILLRACE_DATA": str(tmp_path),
        "MILLRACE_SERVER_TOKEN": "t",
    }
    for words, address in (
        (["--server", "host-before", "flows", "service", "list"], "host-before"),
        (["flows", "service", "list", "--server", "host-after"], "host-after"),
        (["flows", "service", "list"], "host-by-variable"),
    ):
        result = CliRunner().invoke(app, words, env=environment)
        assert result.exit_code == 1
        assert f"{address!r} is" in result.stderr


def test_no_command_declares_a_shared_option_itself() -> None:
    shared = {each.opts[0] for each in reference.shared_options()}
    assert shared == {"--data", "--json", "--server", "--roots"}
    for each in reference.commands():
        assert not shared & {name for option in each.definition.params for name in option.opts}, each.path
    takes_data = [each for each in reference.commands() if "data" in each.takes]
    assert len(takes_data) > 70


def test_the_page_about_the_command_line_says_what_the_program_does() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    assert page == reference.written(page), "run: python -m tests.cli.reference"


def test_every_example_on_the_page_is_understood() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    examples = re.findall(r"^    (?:.*\| )?(millrace .*)$", page, re.MULTILINE)
    assert len(examples) > 20
    for example in examples:
        reference.parse(example)


def test_the_version_is_told_as_other_programs_tell_it() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"millrace {VERSION}\n")


def test_a_name_that_is_not_utf8_is_printed_all_the_same() -> None:
    code = "import millrace.__main__ as program; program._run = lambda _: print('\\udcff.toml'); program.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"\\udcff.toml\n"), done.stderr
