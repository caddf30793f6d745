"""DAGs of declared streams: one a job, with one run id, its tables as assets; nothing heavy is imported for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.errors import InvalidStream
from millrace.base.settings import Settings
from millrace_airflow.streams import stream_dags, table_asset

TWO = """
streams:
  - {name: one, source: flights, sink: a, group: light, words: The first.}
  - {name: two, source: flights, sink: {delta: /lake/two}, group: light}
  - {name: alone, source: planes, sink: b}
"""


def test_each_stream_or_group_has_a_dag_with_one_job_and_assets(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TWO, encoding="utf-8")
    dags = stream_dags(Settings(data_dir=tmp_path, stream_declarations=str(tmp_path / "s.yaml")))
    assert sorted(dags) == ["stream_alone", "stream_flights_hourly", "stream_light"]
    [task] = dags["stream_light"].tasks
    assert (task.job, task.arguments, task.job_run_id) == ("stream", [], "stream-light")
    assert task.app_name == "millrace-stream-light"
    assert task.streams == ["one", "two"]
    assert [each.uri for each in task.inlets] == ["millrace://collection/flights"]
    assert [each.uri for each in task.outlets] == ["millrace://collection/a", "millrace://delta/lake/two"]
    assert "exactly once. The first." in str(dags["stream_light"].doc_md)
    assert table_asset("kafka:topic").uri == "millrace://kafka/topic"


def test_a_stream_that_cannot_run_fails_once_and_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.yaml").write_text(TWO, encoding="utf-8")
    monkeypatch.setenv("MILLRACE_STREAM_DECLARATIONS", str(tmp_path / "s.yaml"))
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path))
    dag = stream_dags(Settings.load())["stream_alone"]
    assert dag.max_consecutive_failed_dag_runs == 1, "Airflow pauses it then"
    [task] = dag.tasks
    task.watch_for = 5
    with pytest.raises(InvalidStream, match="there is no collection 'planes'") as refused:
        task.execute({})
    assert not refused.value.retriable
    assert not (tmp_path / "jobs").exists()


def test_a_declaration_that_is_wrong_is_an_import_error(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("streams: [{name: one}]", encoding="utf-8")
    with pytest.raises(InvalidStream, match=r"stream 0 \(one\)"):
        stream_dags(Settings(data_dir=tmp_path, stream_declarations=str(tmp_path / "s.yaml")))
