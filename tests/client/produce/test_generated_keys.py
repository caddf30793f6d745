"""Collections whose rows have no key of their own: producers make one before the row is appended."""

from __future__ import annotations

import io
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.files.formats import InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.client.produce.rows import conform
from millrace.client.schemas import schema
from millrace.message.schema import CollectionSchema
from millrace.node.ingest.definition import ingest_to_end
from tests.client.conftest import own_name

EVENTS = schema({"what": "string", "n": "int64?"}, generated_key="row_id")
GIVEN = "01939a3c-5a04-7f4f-9e0e-0a1b2c3d4e5f"


@pytest.fixture
def events(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    return shop.catalog.create_collection(own_name(request), EVENTS, vchannels=2)


def keys_of(rows: list[dict[str, Any]]) -> list[str]:
    found = [row["row_id"] for row in rows]
    assert len(set(found)) == len(found)
    assert [UUID(each).version for each in found] == [7] * len(found)
    assert all(each == str(UUID(each)) for each in found)
    return found


def test_equal_rows_stay_several_and_can_be_deleted_one_by_one(shop: Database, events: CollectionInfo) -> None:
    assert shop.definition(events.name).schema.generated_key
    producer = shop.new_producer()
    producer.insert(events, [{"what": "click"}] * 50)
    producer.insert(events, pa.table({"row_id": [None, GIVEN], "what": ["click", "own"]}))
    with producer.batch() as batch:
        batch.insert({"what": ["click"] * 2}, collection=events)
    ingest_to_end(shop.settings, shop.log)
    rows = shop.collection(events.name).read(deadline=10.0).to_pylist()
    keys = keys_of(rows)
    assert len(keys) == 54
    assert [row["what"] for row in rows if row["row_id"] == GIVEN] == ["own"]
    producer.delete(events, keys[:53])
    ingest_to_end(shop.settings, shop.log)
    assert [row["row_id"] for row in shop.collection(events.name).read(deadline=10.0).to_pylist()] == keys[53:]


@pytest.mark.parametrize(
    ("kind", "text", "given"),
    [
        (InputFormat.CSV, b"what,n\na,1\nb,2\n", []),
        (InputFormat.CSV, f"row_id,what\n{GIVEN},a\n,b\n".encode(), [GIVEN]),
        (InputFormat.JSONL, f'{{"what": "a"}}\n{{"what": "b", "row_id": "{GIVEN}"}}\n'.encode(), [GIVEN]),
    ],
)
def test_rows_of_files_get_theirs(kind: InputFormat, text: bytes, given: list[str]) -> None:
    (batch,) = read_batches(io.BytesIO(text), kind, EVENTS, batch_rows=10)
    assert not batch.bad
    assert batch.rows.schema == EVENTS.arrow()
    assert set(given) <= set(keys_of(batch.rows.to_pylist()))


def test_keys_to_delete_are_never_made(shop: Database, events: CollectionInfo) -> None:
    (batch,) = read_batches(io.BytesIO(b'{"what": "a"}\n'), InputFormat.JSONL, EVENTS, batch_rows=10, keys_only=True)
    assert (batch.rows.num_rows, len(batch.bad)) == (0, 1)
    with pytest.raises(InvalidArgument, match="row_id"):
        shop.new_producer().delete(events, [{"what": "a"}])


def test_what_is_no_uuid_is_refused_as_ever(events: CollectionInfo) -> None:
    with pytest.raises(InvalidArgument, match="row_id"):
        conform([{"row_id": "seven", "what": "a"}], events)


def test_only_a_uuid_alone_is_generated() -> None:
    assert EVENTS.fields[0].name == "row_id"
    assert CollectionSchema.from_json(EVENTS.to_json()) == EVENTS
    assert schema({"what": "string", "row_id": "uuid"}, generated_key="row_id").fields[1].name == "row_id"
    for source, named in (
        ({"id": "int64"}, {"generated_key": "id"}),
        ({"a": "int64"}, {"key": "a", "generated_key": "b"}),
    ):
        with pytest.raises(InvalidArgument, match="generated"):
            schema(source, **named)  # type: ignore[arg-type]
    assert schema(EVENTS, generated_key="row_id") == EVENTS
    with pytest.raises(InvalidArgument, match="already"):
        schema(schema({"id": "uuid"}, key="id"), generated_key="id")
