"""Dead letters of a flow on Spark in an error topic, and their way back: each row once, whatever ends a redrive."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import millrace.testing
from millrace.base.errors import InvalidStream
from millrace.base.files import replace_file
from millrace.flows.batch import Batch
from millrace.flows.declare.flow import Flow, letters_place
from millrace.flows.errors.letter import Redriven, stream_letters
from millrace.flows.errors.selection import Selection
from millrace.flows.records import Record
from millrace.flows.sinks.collection import journal
from millrace.flows.sources.kafka.columns import Undecoded as BadRecord
from millrace.flows.sources.kafka.columns import undecoded_rows
from millrace.flows.spark_host import redrive as redriving
from millrace.flows.spark_host.frames import sink_of
from millrace.flows.spark_host.redrive import redrive
from millrace.flows.spark_host.undecoded import Undecoded, again_folder, undecoded_folder
from millrace.testing import Deployment
from tests.flows.brokers_in_process import Brokers, brokers


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("letters") / "data") as made:
        yield made


@pytest.fixture(scope="module")
def kafka() -> Iterator[Brokers]:
    with brokers() as found:
        yield found


def declared(kafka: Brokers, sink: dict[str, Any], **errors: Any) -> Flow:
    name = f"s_{uuid.uuid4().hex[:8]}"
    reached = {"bootstrap": [kafka.address], "socket_timeout_ms": 300}
    source = {"kind": "kafka", **reached, "topics": [f"in_{name}"], "columns": {"id": "int64", "n": "int64"}}
    kafka.producer.list_topics(f"{name}.dead", timeout=20)  # brokers in a process make no topics on request
    errors = {"topic": f"{name}.dead"} | errors
    return Flow.of({"name": name, "host": "spark", "source": source, "sink": sink, "errors": errors})


def table(*found: tuple[int, int]) -> list[pa.RecordBatch]:
    return pa.table({"id": [key for key, _ in found], "n": [n for _, n in found]}).to_batches()


def put(db: Deployment, stream: Flow, folder: Path, number: int, *found: tuple[int, int]) -> tuple[int, int]:
    sink = sink_of(db.settings, stream, folder)
    try:
        verdicts = sink.write(Batch.of_rows("query", number, table(*found)))
    finally:
        sink.close()
    return verdicts.acknowledged, verdicts.rejected


def contents(db: Deployment, name: str) -> Counter[tuple[int, int]]:
    db.settle()
    return Counter((row["id"], row["n"]) for row in db.collection(name).read().to_pylist())


def test_rows_of_a_collection_go_to_the_topic_and_come_back_once(
    db: Deployment, kafka: Brokers, tmp_path: Path
) -> None:
    made = db.create_collection("strict", {"id": "int64", "n": "int8"}, key="id")
    stream = declared(kafka, {"kind": "collection", "collection": "strict"})
    assert letters_place(stream) == f"{stream.name}.dead"
    assert put(db, stream, tmp_path / "sink", 0, (1, 1), (2, 1000), (3, 3), (4, 2000)) == (2, 2)
    assert put(db, stream, tmp_path / "sink", 0, (1, 1), (2, 1000), (3, 3), (4, 2000)) == (2, 2), "it comes again"
    assert put(db, stream, tmp_path / "sink", 1, (5, 100_000)) == (0, 1)
    found = stream_letters(db.settings, stream)
    assert [(each.lane, each.position, each.stage, each.kind) for each in found] == [
        (f"stream-{stream.name}", batch, "TASK_PUT", "INVALID_ARGUMENT") for batch in (1, 0, 0)
    ] or len(found) == 3
    assert sorted(json.loads(each.payload or "")["id"] for each in found) == [2, 4, 5]
    assert all("int8" in each.reason for each in found)
    assert "millrace.row" not in found[0].headers
    assert redrive(db.settings, stream, dry_run=True).selected == 3
    one = Selection(lane=f"stream-{stream.name}", low=1)
    assert redrive(db.settings, stream, one, dry_run=True).selected == 1
    assert redrive(db.settings, stream) == Redriven(looked_at=3, selected=3, failed_again=3), "they still do not fit"
    made.alter(widen={"n": "int16"})
    assert redrive(db.settings, stream) == Redriven(looked_at=3, selected=3, written=2, failed_again=1)
    made.alter(widen={"n": "int64"})
    assert redrive(db.settings, stream) == Redriven(looked_at=1, selected=1, written=1)
    assert redrive(db.settings, stream) == Redriven()
    assert contents(db, "strict") == Counter([(1, 1), (2, 1000), (3, 3), (4, 2000), (5, 100_000)])


def bad_records(db: Deployment, stream: Flow, *values: bytes) -> int:
    """What a task leaves, and what the driver makes of it."""
    topic = stream.topics()["input"][0]
    found = [
        BadRecord(Record(topic, 0, at, b"k", value, 5, [("h", b"v")]), "JSON is malformed")
        for at, value in enumerate(values)
    ]
    folder = undecoded_folder(db.settings, stream.name)
    folder.mkdir(parents=True, exist_ok=True)
    out, rows = pa.BufferOutputStream(), undecoded_rows(found)
    with pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_table(rows)
    replace_file(folder / "0-0.arrow", out.getvalue().to_pybytes())
    undecoded = Undecoded(db.settings, stream)
    count = undecoded.collect(0)
    undecoded.done()
    undecoded.close()
    return count


class Killed(BaseException):
    """Nothing of the process runs after this."""


POINTS = ["sink.journaled", "sink.sent", "sink.done", "redrive.sent", "redrive.queued"]


@pytest.mark.parametrize("point", POINTS)
def test_a_redrive_that_is_killed_is_completed_by_the_next_one(
    db: Deployment, kafka: Brokers, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appended rows are not doubled; of the source's records each waits once; what fails again is a letter again."""
    name = f"killed_{POINTS.index(point)}"
    made = db.create_collection(name, {"id": "int64", "n": "int8"}, key="id")
    stream = declared(kafka, {"kind": "collection", "collection": name})
    assert put(db, stream, tmp_path / "sink", 0, (1, 1), (2, 1000), (3, 1001), (4, 100_000)) == (1, 3)
    assert bad_records(db, stream, b"no json", b"{") == 2
    made.alter(widen={"n": "int16"})

    def hit(reached: str) -> None:
        if reached == point:
            raise Killed(point)

    with monkeypatch.context() as patch:
        patch.setattr(redriving, "hit", hit)
        patch.setattr(journal, "hit", hit)
        with pytest.raises(Killed):
            redrive(db.settings, stream)
    assert bad_records(db, stream, *[b"more"] * 2) == 2, "the flow may have run meanwhile"
    redrive(db.settings, stream)
    assert contents(db, name) == Counter([(1, 1), (2, 1000), (3, 1001)])
    assert redrive(db.settings, stream).queued == 0, "they wait already"
    made.alter(widen={"n": "int64"})
    assert redrive(db.settings, stream, dry_run=True).selected >= 1
    redrive(db.settings, stream)
    assert contents(db, name) == Counter([(1, 1), (2, 1000), (3, 1001), (4, 100_000)])
    waiting = []
    for path in sorted(again_folder(db.settings, stream.name).glob("*.arrow")):
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            waiting += reader.read_all()["_offset"].to_pylist()
    assert sorted(waiting) == [0, 1], "each record of the source once"


def test_a_delta_table_s_rows_go_to_the_topic(db: Deployment, kafka: Brokers, tmp_path: Path) -> None:
    write_deltalake(tmp_path / "table", pa.table({"id": pa.array([], pa.int64()), "n": pa.array([], pa.int8())}))
    stream = declared(kafka, {"kind": "delta", "path": str(tmp_path / "table")})
    assert put(db, stream, tmp_path / "sink", 0, (1, 1), (2, 1000)) == (1, 1)
    assert redrive(db.settings, stream) == Redriven(looked_at=1, selected=1, failed_again=1)
    assert redrive(db.settings, stream).failed_again == 1, "it is a letter again"
    found = DeltaTable(tmp_path / "table").to_pyarrow_table()
    assert found["id"].to_pylist() == [1]
    [letter, *_] = stream_letters(db.settings, stream)
    assert (letter.kind, json.loads(letter.payload or "")) == ("INVALID_ARGUMENT", {"id": 2, "n": 1000})


def test_a_topic_needs_brokers_and_is_not_read_by_its_flow(kafka: Brokers) -> None:
    with pytest.raises(InvalidStream, match="set the error topic's brokers"):
        Flow.of(
            {
                "name": "no_brokers",
                "host": "spark",
                "source": {"kind": "collection", "collection": "c"},
                "sink": {"kind": "delta", "path": "/tmp/x"},
                "errors": {"topic": "dead"},
            }
        )
    reached = {"kind": "kafka", "bootstrap": [kafka.address], "topics": ["dead"], "columns": {"n": "int64"}}
    sink = {"kind": "delta", "path": "/tmp/x"}
    with pytest.raises(InvalidStream, match="would read failed records again"):
        Flow.of({"name": "loop", "host": "spark", "source": reached, "sink": sink, "errors": {"topic": "dead"}})
