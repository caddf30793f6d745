"""A definition as Spark's data source, without Spark: what crosses processes, and what Spark's offsets are worth."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.node.flush.definition import FlushLoop
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.definition import TASK_BYTES, LoopDefinition
from millrace.node.range_loop.failure import FailedRange
from millrace.node.range_loop.source import RangeReader, source_of
from tests.node.range_loop.lists import Lists, Moved, World, unavailable


@pytest.fixture
def world() -> World:
    return World(read={"a": [1, 2, 3], "b": [4]})


@pytest.fixture
def reader(settings: Settings, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeReader]:
    monkeypatch.setattr(
        "millrace.node.range_loop.source.freeze_modules", lambda source: None
    )  # this is no worker of Spark's
    made = source_of(Lists(settings, world, batch=2), tasks=2)({}).streamReader(StructType())
    assert isinstance(made, RangeReader)
    yield made
    made.stop()


def outcomes(reader: RangeReader, end: dict[str, Any]) -> list[Any]:
    return [
        pickle.loads(row["outcome"])
        for partition in reader.partitions({}, end)
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


def test_what_a_task_leaves_is_one_row_with_its_report_or_its_failure(reader: RangeReader, world: World) -> None:
    world.runs = lambda work: unavailable() if work.channel == "b" else None
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxBytes(2)
    first, second = outcomes(reader, reader.latestOffset(reader.initialOffset(), limit))
    assert isinstance(first, Moved)
    assert first.numbers == (1, 2)
    assert isinstance(second, FailedRange)
    assert second.failure.retriable


def test_a_limit_that_is_not_in_bytes_is_refused(reader: RangeReader) -> None:
    with pytest.raises(InvalidSettings, match="bytes"):
        reader.latestOffset(reader.initialOffset(), ReadMaxRows(5))
    assert reader.latestOffset(reader.initialOffset(), ReadAllAvailable())["ends"] == {"a": "3", "b": "1"}


def test_an_offset_of_an_earlier_build_plans_nothing_and_is_left_alone_until_there_is_something(
    reader: RangeReader, world: World
) -> None:
    old = {"batch": 57, "max_bytes": 9, "ticks": {"a": 3}}
    assert reader.partitions({}, old) == []
    numbers, world.read = world.read, {}
    assert reader.latestOffset(old, ReadMaxBytes(2)) is old
    assert reader.reportLatestOffset() is None
    world.read = numbers
    found = reader.latestOffset(old, ReadMaxBytes(2))
    assert found["ends"] == {"a": "3", "b": "1"}
    assert found != old
    assert reader.reportLatestOffset() == {"batch": 0, "max_bytes": 0, "ends": {"a": "3", "b": "1"}}


def test_a_task_gets_the_definition_and_nothing_that_was_opened_for_planning(reader: RangeReader) -> None:
    reader.latestOffset(reader.initialOffset(), ReadMaxBytes(2))
    copy = pickle.loads(cloudpickle.dumps(reader))
    assert copy._made is None
    assert copy._definition.batch == 2


@pytest.mark.parametrize("definition", [IngestLoop, FlushLoop])
def test_a_worker_that_gets_a_source_of_ours_imports_no_pandas(
    definition: type[LoopDefinition[Any, Any]], settings: Settings, tmp_path: Path
) -> None:
    made = definition(settings)  # type: ignore[call-arg]
    (tmp_path / "source").write_bytes(cloudpickle.dumps(source_of(made, tasks=2)))
    program = f"""
import sys, types
sys.modules['__main__'].__spec__ = types.SimpleNamespace(name="pyspark.sql.streaming.python_streaming_source_runner")
import pickle
with open({str(tmp_path / "source")!r}, "rb") as file:
    source = pickle.load(file)
import pyarrow as pa
pa.array([1])
print(source.name(), source.definition.settings.data_dir, "pandas" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    name = f"millrace_{made.name.replace('-', '_')}"
    assert ended.stdout.split() == [name, str(settings.data_dir), "False"]


def test_small_ranges_share_as_many_tasks_as_there_are_cores_and_a_large_one_has_its_own(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.node.range_loop.source.freeze_modules", lambda source: None)
    world = World(read={f"c{number}": [number] for number in range(64)} | {"large": [0] * TASK_BYTES})
    reader = source_of(Lists(settings, world), tasks=2)({}).streamReader(StructType())
    assert isinstance(reader, RangeReader)
    end = reader.latestOffset(reader.initialOffset(), ReadMaxBytes(1 << 40))
    partitions = reader.partitions({}, end)
    assert sorted(len(each.value) for each in partitions) == [1, 32, 32]
    assert {plan.channel for each in partitions for plan in each.value} == set(world.read)
    world.runs = lambda work: unavailable() if work.channel == "c7" else None
    found = [each for each in outcomes(reader, end) if isinstance(each, FailedRange)]
    assert [each.channel for each in found] == ["c7"], "a range that fails leaves the others of its task alone"
    reader.stop()
