"""The examples of docs/airflow.md are DAGs, and run as they stand."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.base.settings import Settings
from tests.docs.pages import python_blocks


def executed(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text, "<page>", "exec"), names)
    return names


def test_the_examples_of_the_page_are_dags(airflow: object) -> None:
    dags = [executed(block.text)["dag"] for block in python_blocks("docs/airflow.md") if "_dag(" in block.text]
    assert [dag.dag_id for dag in dags] == ["my_report", "mine"]
    report = dags[0]
    assert report.get_task("report").upstream_task_ids == {"fresh"}
    assert list(report.params) == ["hours", "dry_run"]


def test_the_tutorials_example_is_a_dag_that_starts_after_a_flush(airflow: object) -> None:
    (block,) = python_blocks("docs/tutorials/airflow.md")
    dag = executed(block.text)["dag"]
    assert (dag.dag_id, dag.task_ids) == ("after_flush", ["count_rows"])
    assert "segments_flushed" in str(dag.timetable.asset_condition)


def test_the_launchers_example_runs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    (block,) = [each for each in python_blocks("docs/airflow.md") if "Launcher(" in each.text]
    assert executed(block.text)["launcher"].runs() == []
