"""A collection as a source.

Its rows and deletes as records whose offsets are ticks, and one pipeline of them on real servers.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator

import pytest
from opensearchpy import OpenSearch

import millrace.testing
from millrace.base.errors import InvalidArgument, PipelineInvalid
from millrace.flows.declare.pipeline import Pipeline
from millrace.flows.range_host.definition import PipelineRun
from millrace.flows.range_host.host import run
from millrace.flows.records import Record
from millrace.flows.sources.collection.documents import Rows, RowsReader
from millrace.flows.sources.collection.model import CollectionSource
from tests import running_brokers

SCHEMA = {"id": "int64", "name": "string?", "at": "timestamp?"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[millrace.testing.Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("rows") / "data", pchannels=2) as made:
        yield made


def _final(chunks: Iterator[list[Record]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for records in chunks:
        for record in records:
            key = (record.key or b"").decode()
            found.pop(key, None)
            if record.value is not None:
                found[key] = json.loads(record.value)["name"]
    return found


def test_rows_come_once_in_order_with_an_upsert_as_one_record(deployment: millrace.testing.Deployment) -> None:
    people = deployment.create_collection("people", SCHEMA, key="id")
    source, settings = CollectionSource(collection="people"), deployment.settings
    rows, reader = Rows(settings, source), RowsReader(settings, source)
    assert rows.ends()["people-0"].high == 0
    people.insert([{"id": number, "name": f"n{number}"} for number in range(50)])
    people.upsert([{"id": 1, "name": "newer"}])
    people.delete([2])
    rows._looked = 0.0
    end = rows.ends()["people-0"].high
    assert end > 0
    records = [record for chunk in reader.chunks(0, end, items=10) for record in chunk]
    assert len(records) == 52
    assert [record.value is None for record in records if record.key == b"1"] == [False, False]
    by_key: dict[bytes, list[int]] = {}
    for record in records:
        by_key.setdefault(record.key or b"", []).append(record.offset)
    assert all(offsets == sorted(set(offsets)) for offsets in by_key.values())
    assert _final(reader.chunks(0, end, items=7)) == {str(n): f"n{n}" for n in range(50) if n not in (1, 2)} | {
        "1": "newer"
    }
    # Nothing new: the end stays; something new: only that comes.
    rows._looked = 0.0
    assert rows.ends()["people-0"].high == end
    people.insert([{"id": 100, "name": "late"}])
    rows._looked = 0.0
    later = rows.ends()["people-0"].high
    assert _final(reader.chunks(end, later, items=10)) == {"100": "late"}
    rows.close()
    reader.close()


def test_of_named_channels_only_their_rows_come(deployment: millrace.testing.Deployment) -> None:
    parts = deployment.create_collection("parts", SCHEMA, key="id", vchannels=2)
    parts.insert([{"id": number, "name": f"n{number}"} for number in range(40)])
    settings = deployment.settings
    found = []
    for channel in parts.definition.vchannels:
        source = CollectionSource(collection="parts", channels=(channel,))
        rows, reader = Rows(settings, source), RowsReader(settings, source)
        found.append(_final(reader.chunks(0, rows.ends()["parts-0"].high, items=10)))
        rows.close()
        reader.close()
    assert all(found)
    assert not found[0].keys() & found[1].keys()
    assert found[0] | found[1] == {str(number): f"n{number}" for number in range(40)}
    strange = Rows(settings, CollectionSource(collection="parts", channels=("dml_9",)))
    with pytest.raises(InvalidArgument, match="has no channel 'dml_9'"):
        strange.ends()
    strange.close()


@pytest.mark.slow
def test_a_pipeline_keeps_an_index_as_a_mirror_of_a_collection(deployment: millrace.testing.Deployment) -> None:
    name = f"c-{uuid.uuid4().hex[:8]}"
    collection = deployment.create_collection(name, SCHEMA, key="id")
    server = running_brokers.opensearch()
    pipeline = Pipeline.parse(
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
        run(PipelineRun(settings, pipeline), stop=threading.Event(), until_end=True)
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
            Pipeline.parse({**declared, "sink": sink})
