"""Declared streams as a graph.

Levels by the longest way, circles too; a stream that does not run is told by a metric.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidStream
from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.spark_host.status import progress_name
from millrace.observe.flows import flows_view, levels
from millrace.observe.observer import Observer
from millrace_airflow.ui.flow_graph import graph_layout

TWO = """
streams:
  - name: three
    source: {collection: flights, watermark: {column: at}}
    operator:
      as_of: {collection: weather, keys: [origin], columns: {temp: temp}, time: at}
    sink: b
    late: {delta: /lake/late}
  - {name: one, source: flights, sink: a, group: light, words: The first.}
  - {name: two, source: a, sink: {delta: /lake/two}}
"""


@pytest.fixture
def declared(tmp_path: Path) -> Settings:
    (tmp_path / "s.yaml").write_text(TWO, encoding="utf-8")
    return Settings(data_dir=tmp_path / "data", stream_declarations=str(tmp_path / "s.yaml"))


def test_a_level_is_the_longest_way_and_a_circle_ends() -> None:
    assert levels([("a", "s"), ("s", "b"), ("b", "t"), ("t", "c"), ("a", "u"), ("u", "c")]) == {
        "a": 0, "s": 1, "b": 2, "t": 3, "u": 1, "c": 4
    }  # fmt: skip
    assert levels([("a", "s"), ("s", "b"), ("b", "t"), ("t", "a")]) == {"a": 0, "s": 1, "b": 2, "t": 3}
    assert levels([]) == {}


NODES = st.integers(0, 7)


@given(st.lists(st.tuples(NODES, NODES).filter(lambda pair: pair[0] < pair[1])))
def test_every_line_leads_to_the_right_where_nothing_goes_round(pairs: list[tuple[int, int]]) -> None:
    edges = [(str(one), str(other)) for one, other in pairs]
    found = levels(edges)
    assert all(found[one] < found[other] for one, other in edges)
    assert set(found) == {each for pair in edges for each in pair}
    into = {other for _, other in edges}
    assert all((level == 0) == (node not in into) for node, level in found.items())


@given(st.lists(st.tuples(NODES, NODES), max_size=20))
def test_any_graph_has_a_bounded_picture(pairs: list[tuple[int, int]]) -> None:
    found = levels((str(one), str(other)) for one, other in pairs)
    assert all(0 <= level < len(found) for level in found.values())


def test_a_chain_of_streams_is_told_with_what_each_says(declared: Settings) -> None:
    _reporter = ProcessRegistration(declared.run_path)
    told = {
        "pid": os.getpid(),
        "at": time.time(),
        "rows": 12,
        "late": 2,
        "state_rows": 5,
        "state_bytes": 640,
        "rows_per_second": 4.5,
    }
    path = declared.progress_path(progress_name("two"))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, told)
    view = Observer(declared).streams()
    rows = {each.name: each for each in view.streams}
    assert sorted(rows) == ["flights_hourly", "one", "three", "two"]
    assert (rows["two"].state, rows["two"].rows, rows["two"].late, rows["two"].state_bytes) == ("running", 12, 2, 640)
    assert rows["one"].dag_id == "stream_light"
    assert view.levels["collection:flights"] == 0
    assert [view.levels[each] for each in ("stream:one", "collection:a", "stream:two", "delta:/lake/two")] == [
        1,
        2,
        3,
        4,
    ]
    assert rows["three"].reads == ("collection:flights", "collection:weather")
    assert rows["three"].writes == ("collection:b", "delta:/lake/late")
    flows = flows_view(declared)
    drawn = graph_layout(flows)
    assert len(drawn.lines) == sum(len(each.reads) + len(each.writes) for each in flows.flows)
    assert len({(each.x, each.y) for each in drawn.boxes}) == len(drawn.boxes) == len(flows.levels)
    metrics = Observer(declared).metrics().decode()
    assert 'millrace_flow_running{flow="two",host="spark"} 1.0' in metrics
    assert 'millrace_flow_running{flow="one",host="spark"} 0.0' in metrics


def test_a_declaration_that_is_wrong_is_said_and_costs_no_metrics(declared: Settings, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("streams: [{name: one}]", encoding="utf-8")
    with pytest.raises(InvalidStream):
        Observer(declared).streams()
    assert "millrace_read_duration_seconds" in Observer(declared).metrics().decode()
