"""Dead letters of a stream whose sink refuses single rows, and their way back into the sink."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch

import millrace.testing
from millrace.base.errors import InvalidStream, SinkRefused
from millrace.flows.batch import Batch
from millrace.flows.declare.checks import check
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import stream_of
from millrace.flows.errors import letters as errors
from millrace.flows.errors.letter import Redriven
from millrace.flows.records import Action
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.flows.sinks.opensearch import sink as sinks
from millrace.flows.sinks.opensearch.bulk import Item, Verdict
from millrace.flows.sinks.sink import Sink
from millrace.flows.spark_host import redrive as redriving
from millrace.flows.spark_host.frames import sink_of
from millrace.flows.spark_host.redrive import redrive
from millrace.testing import Deployment
from tests import running_brokers

COLUMNS = pa.schema([("id", pa.utf8()), ("n", pa.int64())])


@dataclass
class Index:
    """An index that takes numbers up to `most`, and of one id the larger version."""

    most: int = 99
    documents: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By id, version and number."""

    def send(self, client: Any, path: str, actions: Sequence[Action], **_: Any) -> list[Item]:
        return [self._one(each) for each in actions]

    def _one(self, action: Action) -> Item:
        number, version = json.loads(action.body or b"")["n"], action.version or 0
        if number > self.most:
            return Item(Verdict.FAILED, "mapper_parsing_exception", f"{number} is out of range")
        there = self.documents.get(action.id, (0, 0))[0]
        if there > version:
            return Item(Verdict.STALE, there=there)
        self.documents[action.id] = (version, number)
        return Item(Verdict.DONE)

    def numbers(self) -> dict[str, int]:
        return {name: number for name, (_, number) in self.documents.items()}


def sent(written: int, *, left: int) -> Redriven:
    """What a redrive says."""
    return Redriven(looked_at=written + left, selected=written + left, written=written, failed_again=left)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("letters") / "data") as made:
        yield made


@pytest.fixture
def letters(db: Deployment) -> str:
    name = f"letters_{uuid.uuid4().hex[:8]}"
    db.catalog.create_collection(name, LETTERS)
    return name


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index()
    monkeypatch.setattr(sinks, "send", made.send)
    monkeypatch.setattr(sinks, "exists", lambda *_: True)
    monkeypatch.setattr(sinks, "target_of", lambda *_: sinks.Target())
    return made


def declared(letters: str | None, **sink: Any) -> Flow:
    into: dict[str, Any] = {"opensearch": {"hosts": ["http://h:1"], "index_base": "i", "requests": 1}, "key": "id"}
    into |= sink | ({"dead_letters": letters} if letters else {})
    source = {"kafka": "h:1", "topics": ["t"], "columns": {"id": "string", "n": "int64"}}
    return stream_of({"name": f"s_{letters or 'none'}", "source": source, "sink": into})


def rows(*found: tuple[str, int]) -> list[pa.RecordBatch]:
    """Several Arrow batches, the first of them empty, as the host of Spark passes them on."""
    made = [pa.RecordBatch.from_pylist([{"id": name, "n": number}], COLUMNS) for name, number in found]
    return [pa.RecordBatch.from_pylist([], COLUMNS), *made]


def put(sink: Sink, number: int, *found: tuple[str, int]) -> tuple[int, int]:
    verdicts = sink.write(Batch("stream", number, number + 1, rows=iter(rows(*found))))
    assert not verdicts.failures
    return verdicts.acknowledged, verdicts.rejected


def test_a_refused_row_is_a_letter_once_and_goes_in_when_it_fits_without_replacing_a_newer_one(
    db: Deployment, letters: str, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = declared(letters)
    first = sink_of(db.settings, stream, tmp_path / "sink")
    assert put(first, 0, ("a", 1), ("b", 1000), ("c", 2000)) == (1, 2)
    first.close()  # killed before Spark noted the batch, which comes again
    sink = sink_of(db.settings, stream, tmp_path / "sink")
    assert put(sink, 0, ("a", 1), ("b", 1000), ("c", 2000)) == (1, 2)
    assert put(sink, 1, ("b", 7), ("d", 3000)) == (1, 1)
    sink.close()
    found = db.collection(letters).read().to_pylist()
    assert sorted((json.loads(each["row"])["id"], each["batch"]) for each in found) == [("b", 0), ("c", 0), ("d", 1)]
    assert all("mapper_parsing_exception: " in each["reason"] for each in found)
    assert redrive(db.settings, stream) == sent(0, left=3)
    index.most = 2500

    def killed(name: str) -> None:
        raise KeyboardInterrupt(name)

    with monkeypatch.context() as patch:
        patch.setattr(redriving, "hit", killed)
        with pytest.raises(KeyboardInterrupt, match=r"redrive\.resent"):
            redrive(db.settings, stream)
    assert len(db.collection(letters).read()) == 3, "a letter leaves when the sink has its row"
    assert redrive(db.settings, stream) == sent(2, left=1)
    assert index.numbers() == {"a": 1, "b": 7, "c": 2000}, "b was newer already"
    index.most = 9999
    assert redrive(db.settings, stream) == sent(1, left=0)
    assert redrive(db.settings, stream) == sent(0, left=0)
    assert index.numbers() == {"a": 1, "b": 7, "c": 2000, "d": 3000}
    folder = db.settings.data_dir / "streams" / stream.name
    assert not (folder / "redrive").exists(), "nothing stays of a redrive"


def test_a_row_too_large_for_a_message_is_a_letter_without_it_and_keeps_no_other_back(
    db: Deployment, letters: str
) -> None:
    place = errors.LetterCollection(db.settings, letters, stream="s", begun=1)
    large, small = (pa.table({"id": [name], "n": [1]}, schema=COLUMNS) for name in ("x" * ((16 << 20) - 600), "a"))
    place.put(3, [errors.RefusedRow(0, large, "K", "why"), errors.RefusedRow(1, small, "K", "why\udc80")])
    found = db.collection(letters).read(order_by=["id"])
    assert [bool(each) for each in found["payload"].to_pylist()] == [False, True]
    assert found["reason"].to_pylist() == ["K: why", "K: why?"]
    [(begun, batch, ids)] = errors.resent(found, "s")
    assert (begun, batch.numbers, ids) == (1, [1], ["s/1/3/1"])


def test_letters_of_a_query_that_begins_again_are_others(
    db: Deployment, letters: str, index: Index, tmp_path: Path
) -> None:
    stream = declared(letters)
    for began in (100, 200):
        folder = tmp_path / str(began)
        folder.mkdir()
        (folder / "opensearch.json").write_text(json.dumps({"begun": began}))
        sink = sink_of(db.settings, stream, folder)
        assert put(sink, 0, ("a", 1000 + began)) == (0, 1)
        sink.close()
    assert len(db.collection(letters).read()) == 2
    index.most = 9999
    assert redrive(db.settings, stream) == sent(2, left=0)
    assert index.numbers() == {"a": 1200}, "of the later query, whatever came first"


def test_late_rows_have_letters_of_their_own_that_go_to_their_sink(
    db: Deployment, letters: str, index: Index, tmp_path: Path
) -> None:
    stream = declared(letters)
    late = stream.model_copy(update={"late": stream.sink.model_copy()})
    for into in (None, late.late):
        sink = sink_of(db.settings, late, tmp_path / str(into is None), into)
        assert put(sink, 0, ("a", 1000)) == (0, 1)
        sink.close()
    assert sorted(db.collection(letters).read()["stream"].to_pylist()) == [stream.name, f"{stream.name}/late"]
    index.most = 9999
    assert redrive(db.settings, late) == sent(2, left=0)


def test_a_stream_without_letters_stops_as_does_one_with_too_many(
    db: Deployment, letters: str, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sink_of(db.settings, declared(None), tmp_path / "plain")
    assert len(plain.write(Batch("stream", 0, 1, rows=rows(("a", 1000)))).failures) == 1
    plain.close()
    with pytest.raises(InvalidStream, match="has no dead letters"):
        redrive(db.settings, declared(None))
    monkeypatch.setattr(errors, "MOST", 2)
    sink = sink_of(db.settings, declared(letters), tmp_path / "sink")
    with pytest.raises(SinkRefused, match="the sink is the likely cause"):
        put(sink, 0, *((str(number), 1000) for number in range(3)))
    sink.close()
    assert len(db.collection(letters).read()) == 0


def test_the_collection_of_letters_is_checked(db: Deployment, letters: str) -> None:
    assert not [each for each in check(db.settings, declared(letters)) if each.level == "error"]
    [finding] = [each for each in check(db.settings, declared("none_such")) if each.level == "error"]
    assert (finding.field, "there is no collection" in finding.words) == ("sink.dead_letters", True)


@pytest.mark.slow
def test_an_index_that_refuses_a_document_by_its_mapping(db: Deployment, letters: str, tmp_path: Path) -> None:
    server = running_brokers.opensearch()
    name, client = f"l-{uuid.uuid4().hex[:8]}", OpenSearch(server.url)
    body = {"mappings": {"properties": {"n": {"type": "byte"}}}}
    place = {"hosts": [server.url], "index_base": name, "create_index": True, "index_body": body}
    stream = declared(letters, opensearch=place)
    sink = sink_of(db.settings, stream, tmp_path / "sink")
    assert put(sink, 0, ("a", 1), ("b", 1000)) == (1, 1)
    sink.close()
    [letter] = db.collection(letters).read().to_pylist()
    assert "mapper_parsing_exception" in letter["reason"] or "document_parsing_exception" in letter["reason"]
    client.indices.delete(index=name)
    client.indices.create(index=name)
    assert redrive(db.settings, stream) == sent(1, left=0)
    assert client.get(index=name, id="b")["_source"]["n"] == 1000


@pytest.mark.slow
def test_a_topic_that_refuses_a_message_by_its_size(db: Deployment, letters: str, tmp_path: Path) -> None:
    address, topic = running_brokers.kafka().address, f"l{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": address})
    limit = {"max.message.bytes": "2000"}
    admin.create_topics([NewTopic(topic, 1, 1, config=limit)])[topic].result(30)
    stream = stream_of(
        {
            "name": f"s_{letters}",
            "source": {"kafka": "h:1", "topics": ["t"], "columns": {"id": "string", "n": "int64"}},
            "sink": {"kafka": address, "topic": topic, "key": "id", "dead_letters": letters},
        }
    )
    sink = sink_of(db.settings, stream, tmp_path / "sink")
    assert put(sink, 3, ("a", 1)) == (1, 0)
    assert put(sink, 4, ("x" * 5000, 2)) == (0, 1)
    sink.close()
    [letter] = db.collection(letters).read().to_pylist()
    assert letter["reason"].startswith("MSG_SIZE_TOO_LARGE")
    larger = ConfigEntry("max.message.bytes", "100000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[larger])
    admin.incremental_alter_configs([resource])[resource].result(30)
    assert redrive(db.settings, stream) == sent(1, left=0)


@pytest.mark.slow
def test_a_row_that_a_transaction_leaves_out_is_a_letter_through_a_kill(
    db: Deployment, letters: str, tmp_path: Path
) -> None:
    address, topic = running_brokers.kafka().address, f"l{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, 1, 1, config={"max.message.bytes": "2000"})])[topic].result(30)
    stream = stream_of(
        {
            "name": f"s_{letters}",
            "source": {"kafka": "h:1", "topics": ["t"], "columns": {"id": "string", "n": "int64"}},
            "sink": {"kafka": address, "topic": topic, "key": "id", "dead_letters": letters},
            "guarantee": "exactly once",
        }
    )

    class Killed(BaseException):
        """The process ends between the transaction's commit and the letter."""

    def dies(name: str) -> None:
        if name == "sink.sent":
            raise Killed

    first = sink_of(db.settings, stream, tmp_path / "sink")
    with patch("millrace.flows.sinks.kafka.sink.hit", dies), pytest.raises(Killed):
        put(first, 0, ("a", 1), ("x" * 5000, 2), ("b", 3))
    assert len(db.collection(letters).read()) == 0
    sink = sink_of(db.settings, stream, tmp_path / "sink")
    assert put(sink, 0, ("a", 1), ("x" * 5000, 2), ("b", 3))[1] == 1
    sink.close()
    [letter] = db.collection(letters).read().to_pylist()
    assert letter["reason"].startswith("MSG_SIZE_TOO_LARGE")
    assert json.loads(letter["row"])["n"] == 2
