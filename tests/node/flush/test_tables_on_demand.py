"""A collection's tables are created with its first row or delete; until then it reads as empty, in its schema."""

from __future__ import annotations

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.message import builders
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.node.flush.definition import flush_to_end
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.verification import verify_collections
from millrace.storage.table import table_at, table_exists
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.collections.layout import stored_collection_ids
from millrace.tables.read.arrow import count_rows, read_arrow
from millrace.tables.read.plan import plan_read
from tests.tables.wal_maker import Collection, WalMaker


def created(settings: Settings, count: int = 1) -> list[Collection]:
    maker = WalMaker(settings)
    maker.open()
    made = [Collection(maker, collection_id=number + 1) for number in range(count)]
    for each in made:
        each.create()
    maker.commit()
    return made


def insert(collection: Collection) -> None:
    vchannel = collection.vchannels[0]
    rows: dict[str, list[object]] = {"id": list(collection.keys_of(vchannel, 3)), "body": ["a", "b", "c"]}
    collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
    collection.maker.commit()


def delete(collection: Collection) -> None:
    vchannel = collection.vchannels[0]
    collection.append(vchannel, collection.delete(collection.keys_of(vchannel, 1), vchannel=vchannel))
    collection.maker.commit()


def test_a_flush_touches_only_the_tables_that_get_rows(settings: Settings) -> None:
    first, *_ = created(settings, 30)
    flush_to_end(settings)
    assert stored_collection_ids(settings, "rows") == stored_collection_ids(settings, "deletes") == []
    insert(first)
    flush_to_end(settings)
    assert stored_collection_ids(settings, "rows") == [first.id]
    assert stored_collection_ids(settings, "deletes") == []
    delete(first)
    flush_to_end(settings)
    assert stored_collection_ids(settings, "deletes") == [first.id]
    assert table_at(rows_uri(settings, first.id)).version == 1, "created, and one commit of rows"


def test_an_empty_collection_reads_as_empty_in_its_schema(settings: Settings) -> None:
    [only] = created(settings)
    flush_to_end(settings)
    rows = read_arrow(settings, only.id, confirmed=only.maker.confirmed())
    assert rows.num_rows == 0
    assert rows.schema.names == [field.name for field in only.schema.fields]
    assert count_rows(plan_read(settings, only.id, confirmed=only.maker.confirmed())) == 0
    assert verify_collections(settings) == {}
    report = compact(settings, CompactionParams(collections=("things",)))
    assert report.collections == []


def test_deletes_without_rows_make_only_their_own_table(settings: Settings) -> None:
    [only] = created(settings)
    delete(only)
    flush_to_end(settings)
    assert table_exists(deletes_uri(settings, only.id))
    assert not table_exists(rows_uri(settings, only.id))
    assert read_arrow(settings, only.id, confirmed=only.maker.confirmed()).num_rows == 0
    insert(only)
    flush_to_end(settings)
    assert read_arrow(settings, only.id, confirmed=only.maker.confirmed()).num_rows == 3, (
        "a delete hits only earlier rows"
    )
    assert all(each.ok for each in verify_collections(settings).values())


def test_a_schema_change_reaches_a_table_that_exists_and_creates_none(settings: Settings) -> None:
    full, empty = created(settings, 2)
    insert(full)
    flush_to_end(settings)
    change = [AddField(FieldSpec("note", "string", True))]
    for each in (full, empty):
        for vchannel in each.vchannels:
            place = {"vchannel": vchannel, "collection_id": each.id}
            each.append(vchannel, builders.schema_change(change, schema_version=2, term=1, **place))
    full.maker.commit()
    flush_to_end(settings)
    assert "note" in table_at(rows_uri(settings, full.id)).columns
    assert not table_exists(rows_uri(settings, empty.id))
    assert read_arrow(settings, empty.id, confirmed=empty.maker.confirmed()).schema.field("note").type == pa.utf8()
