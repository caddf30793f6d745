"""Naming records of a flow on Spark that are to be put aside."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import InvalidArgument, InvalidStream
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.sinks.memory import Folder
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.planner import LaneRange
from millrace.flows.sources.kafka.spark_source import TopicsRead, skip_options
from millrace.flows.spark_host import skipped
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.spark_host.skipped import declared_records, read_skipped, skip_record, skipped_rows
from millrace.storage import objects
from tests.flows.brokers_in_process import Brokers, brokers
from tests.s3_server import Faults, bucket

LETTERS = {"collection": "letters"}


def declared(kind: str = "kafka", **changes: Any) -> Flow:
    source = {"kind": "kafka", "bootstrap": ["h:1"], "topics": ["t"], "columns": {"id": "string"}}
    sink = {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "key": "id"}
    if kind != "kafka":
        source = {"kind": "collection", "collection": "in"}
    return Flow.of({"name": "s", "source": source, "sink": sink, "errors": LETTERS, "host": "spark", **changes})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a stream that has done micro-batch 3, up to t-0 10."""
    made = Settings(data_dir=tmp_path)
    checkpoint = Incarnations(made, "s").folder / "1"
    for folder in ("commits", "offsets"):
        (checkpoint / folder).mkdir(parents=True)
        (checkpoint / folder / "3").write_text("v1\n{}\n" + json.dumps({"offsets": {"t-0": 10, "t-1": 0}}))
    return made


@pytest.fixture(scope="module")
def kafka() -> Iterator[Brokers]:
    with brokers() as found:
        yield found


def test_a_record_waits_until_the_flow_has_passed_it(settings: Settings) -> None:
    stream = declared()
    skip_record(settings, stream, "t-0", 10)
    skip_record(settings, stream, "t-1", 4)
    skip_record(settings, stream, "stream-s", 4, 7)
    skip_record(settings, stream, "stream-s", 4, 9)
    assert read_skipped(Incarnations(settings, "s").folder).records == {"t-0": {10}, "t-1": {4}}
    assert skipped_rows(settings, stream, "stream-s", 4) == {7, 9}
    assert skipped_rows(settings, stream, "stream-s", 5) == frozenset()
    checkpoint = Incarnations(settings, "s").folder / "1"
    for folder in ("commits", "offsets"):
        (checkpoint / folder / "4").write_text("v1\n{}\n" + json.dumps({"offsets": {"t-0": 11, "t-1": 0}}))
    skip_record(settings, stream, "t-0", 12)
    skipped = read_skipped(Incarnations(settings, "s").folder)
    assert skipped.to_json() == {"records": {"t-0": [12], "t-1": [4]}, "rows": {}}


@pytest.mark.parametrize(
    ("lane", "position", "row", "words"),
    [
        ("t-0", 9, None, "has passed 9 of t-0: it is at 10"),
        ("t-9", 9, None, "has no lane 't-9': it has t-0, t-1"),
        ("stream-s", 3, 0, "has passed the micro-batch 3"),
        ("t-0", 10, 0, "has no lane 't-0' of rows: it has stream-s"),
    ],
)
def test_a_place_that_is_none_is_refused(
    settings: Settings, lane: str, position: int, row: int | None, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        skip_record(settings, declared(), lane, position, row)


def test_what_has_no_place_for_the_letter_or_no_rows_is_refused(settings: Settings, tmp_path: Path) -> None:
    for stream, lane, row, words in (
        (declared(errors={}), "t-0", None, "declare errors.collection"),
        (declared(errors={}), "stream-s", 1, "declare errors.collection"),
        (declared("collection"), "in", None, "name the row that its sink gets"),
        (declared(sink={"kind": "function", "function": "a:b"}), "stream-s", 1, "a whole DataFrame to a function"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            skip_record(settings, stream, lane, 10, row)


@pytest.mark.parametrize("place", ["disk", "bucket", "bucket without compare-and-set"])
def test_commands_at_the_same_time_lose_no_record(
    place: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Faults() as faults, bucket(monkeypatch, faults.at) as uri:
        monkeypatch.setattr(objects, "_TAGGED", set())
        folder: Folder = tmp_path / "streams" if place == "disk" else f"{uri}/t/streams"
        chosen = random.Random(7)
        if place == "bucket":  # the outcome of some puts is unknown
            faults.break_request = lambda method, path: "lost" if method == "PUT" and chosen.random() < 0.3 else ""
        if "without" in place:
            faults.break_request = lambda method, path: "blind" if method == "PUT" else ""
        monkeypatch.setattr(Incarnations, "folder", property(lambda self: folder))
        monkeypatch.setattr(skipped, "position", lambda checkpoint: {"t-0": 10})
        monkeypatch.setattr(skipped, "newest_batch", lambda checkpoint: 3)
        monkeypatch.setattr(Incarnations, "checkpoint", lambda self, state: tmp_path)
        monkeypatch.setattr(Incarnations, "state", property(lambda self: None))
        with ThreadPoolExecutor(1 if "without" in place else 4) as threads:
            list(threads.map(lambda at: skip_record(settings, declared(), "t-0", at), range(10, 18)))
        assert read_skipped(folder).records == {"t-0": set(range(10, 18))}


def test_the_number_of_those_that_wait_is_bounded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped, "MAX_SKIPPED", 2)
    for position in (10, 11):
        skip_record(settings, declared(), "t-0", position)
    with pytest.raises(InvalidArgument, match="2 records of 's' wait"):
        skip_record(settings, declared(), "stream-s", 9, 9)


@pytest.mark.parametrize(
    ("skip", "changes", "words"),
    [
        ({"lane": "t-0", "position": 1, "row": 1}, {}, "the lane of a row is stream-s"),
        ({"lane": "t-0", "position": 1}, {"kind": "collection"}, "give the row of a micro-batch of stream-s"),
        ({"lane": "t-0", "position": 1}, {"place": {}}, "skipped records need a place"),
    ],
)
def test_a_declaration_names_them_too(skip: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    good = [
        {"lane": "t-0", "position": 3},
        {"lane": "t-0", "position": 1},
        {"lane": "stream-s", "position": 2, "row": 5},
    ]
    stream = declared(errors={**LETTERS, "skip": good})
    assert declared_records(stream) == {"t-0": [1, 3]}
    assert skipped_rows(Settings(), stream, "stream-s", 2) == {5}
    with pytest.raises(InvalidStream, match=words):
        declared(changes.get("kind", "kafka"), errors={**changes.get("place", LETTERS), "skip": [skip]})


def test_a_task_puts_a_named_record_aside_without_decoding_it(kafka: Brokers, tmp_path: Path) -> None:
    kafka.send("skips", [(b"k", value, []) for value in (b'{"n": 1}', b"poison", b'{"n": 3}', b'{"n": 4}')], 0)
    source = KafkaSource(bootstrap=(kafka.address,), topics=("skips",), socket_timeout_ms=300)
    file = tmp_path / "skip.json"
    file.write_text(json.dumps({"records": {"skips-0": [1], "skips-1": [2]}, "rows": {}}))
    options = skip_options({"skips-0": [3]}, file)
    read = TopicsRead(
        source,
        columns={"n": "int64"},
        record=(),
        undecoded=str(tmp_path / "undecoded"),
        skip=json.loads(options["skip"]),
        skip_file=options["skip_file"],
    )
    (tmp_path / "undecoded").mkdir()
    rows = [row["n"] for chunk in read.read(LaneRange("skips", 0, 0, 4)) for row in chunk.to_pylist()]
    assert rows == [1, 3]
    import pyarrow as pa

    with pa.memory_map(str(tmp_path / "undecoded" / "skips-0-0.arrow")) as stored:
        found = pa.ipc.open_file(stored).read_all().to_pylist()
    assert [(each["_offset"], each["reason"].partition(":")[0]) for each in found] == [(1, "SKIPPED"), (3, "SKIPPED")]
