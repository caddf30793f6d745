"""Records that do not decode, and those that a redrive reads again, where tasks of any machine reach them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import stream_of
from millrace.flows.records import Record
from millrace.flows.sources.kafka import spark_source, topics
from millrace.flows.sources.kafka.columns import Undecoded as Bad
from millrace.flows.sources.kafka.planner import LaneRange, Place
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.spark_host.undecoded import (
    Undecoded,
    again_folder,
    letters_from,
    next_number,
    queue,
    undecoded_folder,
    waiting,
)
from tests.flows.brokers_in_process import brokers
from tests.s3_server import Faults, bucket

SOURCE = {"kind": "kafka", "bootstrap": ["127.0.0.1:1"], "topics": ["t"], "columns": {"n": "int64"}}


def flow() -> Flow:
    return stream_of({"name": "one", "source": SOURCE, "sink": "into"})


def source_of(settings: Settings, address: str = "") -> spark_source.TopicsSource:
    """Return the source as Spark makes it."""
    source: Any = flow().source
    source = source.model_copy(update={"bootstrap": (address,)}) if address else source
    again = again_folder(settings, "one")
    options = spark_source.options_of(
        source, Place({}, {}), columns=source.columns, record=[], undecoded=undecoded_folder(settings, "one")
    )
    return spark_source.TopicsSource({**options, "again": str(again)})


def read_of(settings: Settings) -> Any:
    """What a task has of the source."""
    return source_of(settings)._read


def admitted(settings: Settings) -> None:
    kept = Incarnations(settings, "one")
    with kept.locked():
        kept.admitted(flow())


def test_the_driver_counts_what_tasks_put_aside_once(places: Settings) -> None:
    admitted(places)
    collected, read = Undecoded(places, flow()), read_of(places)
    assert collected.collect(0) == 0
    bad = [Bad(Record("t", 0, each, None, b"no json", 0), "no JSON") for each in (4, 5)]
    for _ in range(2):  # a range that is read again replaces its file
        read._put_aside(LaneRange("t", 0, 4, 9), bad)
    assert collected.collect(1) == 2
    assert collected.collect(2) == 0
    assert Undecoded(places, flow()).collect(3) == 0, "the files stay, and an earlier process has counted them"


def test_tasks_read_the_records_of_a_redrive_again(places: Settings) -> None:
    admitted(places)
    read = read_of(places)
    assert (read.newest_again(), next_number(places, "one")) == (0, 1)
    letters = letters_from("one", [Record("t", 0, 7, None, b'{"n": 7}', 0)])
    assert queue(places, "one", letters) == 1
    assert queue(places, "one", letters) == 0, "they wait already"
    assert waiting(again_folder(places, "one"), 0) == {1: ["one/source/t-0-7"]}
    assert read.newest_again() == 1
    (task,) = read.again(Place({}, {}), Place({}, {}, again=1))
    assert [each.to_pylist() for each in read.read_again(task)] == [[{"n": 7}]]


def test_an_idle_stream_of_topics_asks_nothing_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark asks its planner each second; the driver looks for files of redrives until there are none."""
    monkeypatch.setattr(topics, "topic_ids", lambda *_, **__: {})  # brokers of this process know none
    with Faults() as faults, brokers() as kafka, bucket(monkeypatch, faults.at) as uri:
        settings = Settings(data_dir=tmp_path / "data", tables=f"{uri}/tables", meta_store=f"sqlite:///{tmp_path}/m.db")
        admitted(settings)
        letters = letters_from("one", [Record("t", 0, 0, None, b'{"n": 7}', 0)])
        assert queue(settings, "one", letters) == 1
        kafka.send("t", [(None, b'{"n": 1}', [])])
        reader: Any = source_of(settings, kafka.address).streamReader(None)  # type: ignore[arg-type]
        limit = reader.getDefaultReadLimit()
        place = reader.latestOffset(reader.initialOffset(), limit)
        assert place["again"] == 1
        faults.requests.clear()
        for _ in range(5):
            assert reader.latestOffset(place, limit) == place
        assert not faults.requests
        reader.stop()
        declared = flow()
        errors = declared.errors.model_copy(update={"topic": "t.errors"})
        other = replace(settings, tables=f"{uri}/other", meta_store=f"sqlite:///{tmp_path}/other.db")
        admitted(other)
        collected = Undecoded(other, declared.model_copy(update={"errors": errors}))
        collected.collect(0)
        faults.requests.clear()
        collected.collect(1)
        assert faults.requests == {"LIST": 1}, "of what tasks put aside; not of redrives"
        collected.close()
