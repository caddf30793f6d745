"""A collection as a source.

Its rows and deletes as records whose offsets are ticks, and one pipeline of them on real servers.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest
from opensearchpy import OpenSearch

import millrace.testing
from millrace.base.errors import InvalidArgument, PipelineInvalid
from millrace.base.settings import Settings
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.records import Record
from millrace.flows.sources.collection.documents import Rows, RowsReader
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.collection.rows import RowsOf
from millrace.flows.sources.source import Limits
from millrace.pipelines.declaration import pipeline_of
from tests import running_brokers

SCHEMA = {"id": "int64", "name": "string?", "at": "timestamp?"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[millrace.testing.Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("rows") / "data", pchannels=2) as made:
        yield made


def _ends(settings: Settings, source: CollectionSource, standing: dict[str, int] | None = None) -> dict[str, int]:
    rows = Rows(settings, source, standing or {})
    try:
        return {lane: end.high for lane, end in rows.ends().items()}
    finally:
        rows.close()


def _read(
    settings: Settings, source: CollectionSource, partition: int, start: int, end: int, items: int
) -> list[Record]:
    """All of a range, batch by batch."""
    reader, found, place = RowsReader(settings, source, partition), list[Record](), start
    while place < end:
        before = place
        for batch in reader.batches(place, end, Limits(items, 1 << 20, 0.0)):
            found += batch.records or ()
            place = batch.end
        assert place > before
    reader.close()
    return found


def _final(records: list[Record]) -> dict[str, object]:
    found: dict[str, object] = {}
    for record in records:
        key = (record.key or b"").decode()
        found.pop(key, None)
        if record.value is not None:
            found[key] = json.loads(record.value)["name"]
    return found


def test_rows_come_once_in_order_with_an_upsert_as_one_record(deployment: millrace.testing.Deployment) -> None:
    people = deployment.create_collection("people", SCHEMA, key="id")
    source, settings = CollectionSource(collection="people"), deployment.settings
    created = _ends(settings, source)["people-0"]
    assert _read(settings, source, 0, 0, created, 10) == []
    people.insert([{"id": number, "name": f"n{number}"} for number in range(50)])
    people.upsert([{"id": 1, "name": "newer"}])
    people.delete([2])
    end = _ends(settings, source)["people-0"]
    assert end > created
    records = _read(settings, source, 0, 0, end, 10)
    assert len(records) == 52
    assert [record.value is None for record in records if record.key == b"1"] == [False, False]
    by_key: dict[bytes, list[int]] = {}
    for record in records:
        by_key.setdefault(record.key or b"", []).append(record.offset)
    assert all(offsets == sorted(set(offsets)) for offsets in by_key.values())
    assert _final(_read(settings, source, 0, 0, end, 7)) == {str(n): f"n{n}" for n in range(50) if n not in (1, 2)} | {
        "1": "newer"
    }
    # Nothing new: the end stays; something new: only that comes.
    assert _ends(settings, source)["people-0"] == end
    people.insert([{"id": 100, "name": "late"}])
    later = _ends(settings, source)["people-0"]
    assert _final(_read(settings, source, 0, end, later, 10)) == {"100": "late"}


def test_of_named_channels_only_their_rows_come(deployment: millrace.testing.Deployment) -> None:
    parts = deployment.create_collection("parts", SCHEMA, key="id", vchannels=2)
    parts.insert([{"id": number, "name": f"n{number}"} for number in range(40)])
    settings = deployment.settings
    found = []
    for number, channel in enumerate(parts.definition.vchannels):
        source = CollectionSource(collection="parts", channels=(channel,))
        [(lane, end)] = _ends(settings, source).items()
        assert lane == f"parts-{number}", "a VChannel's lane has its place among all, whatever is read"
        found.append(_final(_read(settings, source, number, 0, end, 10)))
    assert all(found)
    assert not found[0].keys() & found[1].keys()
    assert found[0] | found[1] == {str(number): f"n{number}" for number in range(40)}
    with pytest.raises(InvalidArgument, match="has no channel 'dml_9'"):
        _ends(settings, CollectionSource(collection="parts", channels=("dml_9",)))


def test_a_position_is_at_a_tick_and_moves_within_a_range(deployment: millrace.testing.Deployment) -> None:
    """So that a large backlog is committed bit by bit; what follows is read on, and not read again."""
    steps = deployment.create_collection("steps", SCHEMA, key="id")
    for first in range(0, 40, 4):
        steps.insert([{"id": number, "name": "n"} for number in range(first, first + 4)])
    with steps.transaction() as txn:
        txn.insert([{"id": 100, "name": "n"}])
        txn.upsert([{"id": 100, "name": "m"}])
        txn.delete([0])
    source, settings = CollectionSource(collection="steps"), deployment.settings
    end = _ends(settings, source)["steps-0"]
    reader, place, sizes = RowsReader(settings, source, 0), 0, []
    found: list[Record] = []
    while place < end:
        [batch] = reader.batches(place, end, Limits(6, 1 << 20, 0.0))
        assert batch.end > place
        sizes.append(len(batch.records or ()))
        assert all(place < each.offset <= batch.end for each in batch.records or ())
        found += batch.records or ()
        place = batch.end
    assert sizes == [8, 8, 8, 8, 8, 2], "about the limit, up to the end of a tick"
    assert _final(found) == {str(n): "n" for n in range(1, 40)} | {"100": "m"}
    assert found == _read(settings, source, 0, 0, end, 1_000)
    assert found[16:] == _read(settings, source, 0, found[15].offset, end, 3), "from any position of it"


def test_rows_of_an_import_come_in_parts_before_its_tick_ends_and_of_anything_else_at_its_end(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.flows.sources.collection.documents._PART", 100)
    loaded = deployment.create_collection("loaded", SCHEMA, key="id")
    source = CollectionSource(collection="loaded")
    rows = RowsOf.find(deployment.settings, "loaded")

    def batches(change: str, written: int) -> list[pa.RecordBatch]:
        """1,000 changes at tick 7, in ten batches."""
        made = [
            {"id": number, "name": "n", "_change": change, "_vchannel": loaded.definition.vchannels[0],
             "_time_tick": 7, "_write_tick": written, "_partition_id": 1}
            for number in range(1000)
        ]  # fmt: skip
        return [pa.RecordBatch.from_pylist(made[at : at + 100], rows.arrow()) for at in range(0, 1000, 100)]

    for change, written, parts in (("insert", 7, 10), ("insert", 5, 1), ("delete", 7, 1)):
        reader = RowsReader(deployment.settings, source, 0)
        found = reader._parts(rows, iter(batches(change, written)))
        monkeypatch.setattr(reader, "_read", lambda start, end, found=found: (end, found))
        made = list(reader.batches(0, 9, Limits(100, 1 << 20, 0.0)))
        assert {each.end for each in made[:-1]} <= {0, 7}, "no position parts the rows of a tick"
        assert sum(bool(each.records) for each in made) == parts, (change, written)
        assert sorted(int(record.key or b"") for each in made for record in each.records or ()) == list(range(1000))


def test_vchannels_begin_where_the_one_lane_of_an_earlier_build_stands(
    deployment: millrace.testing.Deployment,
) -> None:
    old = deployment.create_collection("old", SCHEMA, key="id", vchannels=2)
    old.insert([{"id": number, "name": "n"} for number in range(10)])
    settings, source = deployment.settings, CollectionSource(collection="old")
    read = deployment.current_tick(old.definition.pchannels)  # beyond what the tables have: the log was read
    for channels, lanes in ((old.definition.vchannels, {"old-1"}), (old.definition.vchannels[1:], {"old-1"})):
        named = CollectionSource(collection="old", channels=tuple(channels))
        rows = Rows(settings, named, {"old-0": read})
        assert rows.inherited({"old-0": read, "older-0": 3}) == dict.fromkeys(lanes, read)
        assert {end.high for end in rows.ends().values()} == {read}, "there is nothing to read"
        rows.close()
    rows = Rows(settings, source, {"old-0": 7, "old-1": 5})
    assert rows.inherited({"old-0": 7, "old-1": 5}) == {}
    assert rows.inherited({}) == {}
    rows.close()
    old.insert([{"id": number, "name": "n"} for number in range(10, 30)])
    ends = _ends(settings, source, {"old-0": read})
    later = [each for lane, end in ends.items() for each in _read(settings, source, int(lane[-1]), read, end, 1_000)]
    assert sorted(int(each.key or b"") for each in later) == list(range(10, 30))


@pytest.mark.slow
def test_a_pipeline_keeps_an_index_as_a_mirror_of_a_collection(deployment: millrace.testing.Deployment) -> None:
    name = f"c-{uuid.uuid4().hex[:8]}"
    collection = deployment.create_collection(name, SCHEMA, key="id")
    server = running_brokers.opensearch()
    pipeline = pipeline_of(
        {
            "id": name,
            "source": {"kind": "collection", "collection": name},
            "sink": {
                "kind": "opensearch",
                "hosts": [server.url],
                "index_base": name,
                "create_index": True,
                "ids": "key",
            },
            "errors": {"cluster": {"bootstrap": [running_brokers.kafka().address]}},
        }
    )
    settings, client = deployment.settings, OpenSearch(server.url)

    def mirrored() -> dict[str, object]:
        run(FlowRun(settings, pipeline), stop=threading.Event(), until_end=True)
        client.indices.refresh(index=name)
        hits = client.search(index=name, body={"size": 1000})["hits"]["hits"]
        return {hit["_id"]: hit["_source"]["name"] for hit in hits}

    collection.insert([{"id": number, "name": f"n{number}", "at": "2013-01-01T05:00:00Z"} for number in range(100)])
    collection.delete([3])
    assert mirrored() == {str(n): f"n{n}" for n in range(100) if n != 3}
    collection.upsert([{"id": 4, "name": "four"}, {"id": 3, "name": "back"}])
    collection.delete([5])
    assert mirrored() == {str(n): f"n{n}" for n in range(100) if n != 5} | {"4": "four", "3": "back"}


def test_ids_of_rows_are_never_their_positions() -> None:
    declared = {
        "id": "x",
        "source": {"kind": "collection", "collection": "c"},
        "errors": {"cluster": {"bootstrap": ["b:1"]}},
    }
    for sink in ({"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i"}, {"kind": "delta", "table": "t"}):
        with pytest.raises(PipelineInvalid, match="positions"):
            pipeline_of({**declared, "sink": sink})
