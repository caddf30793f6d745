"""``millrace operations``: each operation as a command, whose options are its parameters."""

from __future__ import annotations

import pytest

from millrace.base import extras
from millrace.operations import entry
from millrace.operations.registry import operations
from tests.cli import reference
from tests.cli.deployment import Deployment


@pytest.mark.parametrize("name", sorted(operations()))
def test_an_operation_has_a_command_with_an_option_for_each_parameter(name: str) -> None:
    command = reference.command(("operations", name.replace("_", "-")))
    names = {each.name for each in command.definition.params} | set(command.takes)
    assert names == {*operations()[name].params.model_fields, "params", "data", "as_json"}
    assert operations()[name].example


def test_a_missing_library_of_an_operation_is_reported_before_spark_starts(
    shared: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module == "great_expectations" else object())
    monkeypatch.setattr(entry, "spark_session", lambda *_: pytest.fail("Spark was started"))
    assert "great_expectations is not installed" in shared.fails("INVALID_SETTINGS", "operations", "quality")


def test_options_go_over_params_and_what_came_of_it_is_printed(shared: Deployment) -> None:
    shared.create_users()
    assert shared.as_json("operations", "checkpoint", "--dry-run")["dry_run"] is True
    given = ("--params", '{"dry_run": false, "sample_mib": 1}', "--dry-run")
    assert shared.as_json("operations", "checkpoint", *given)["dry_run"] is True


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("checkpoint", "--sample-mib", "none"), "sample_mib"),
        (("recovery", "--mode", "pray"), "'diagnose', 'rehearse' or 'repair'"),
        (("restore", "--into", "x"), "collection: is required"),
        (("compaction", "--collections", "a", "--collections", "b", "--zorder-by", "id"), "exactly that collection"),
        (("backup", "--params", "{"), "--params is not JSON"),
        (("backup", "--params", '{"too": "/x"}'), "too: unknown parameter; the parameters are "),
    ],
)
def test_wrong_parameters_are_said_before_anything_is_done(
    shared: Deployment, arguments: tuple[str, ...], words: str
) -> None:
    assert words in shared.fails("INVALID_ARGUMENT", "operations", *arguments)
