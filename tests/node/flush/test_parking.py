"""A PChannel whose rows have no place in their table stands still alone: law 6 for the flusher."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.base.errors import ChannelParked
from millrace.base.settings import Settings
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.definition import flush_to_end
from millrace.node.flush.flusher import run_flush
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import ensure_rows_table, rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.read.arrow import read_arrow
from tests.node.flush.plans import plans_of
from tests.tables.wal_maker import Collection, WalMaker

OTHER = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "int64", True)), "id")
"""What a dropped collection of the same id had: the body was a number."""


@pytest.fixture
def maker(settings: Settings) -> WalMaker:
    """Collection 1 on p0 and p1, collection 2 on p0 alone, with rows."""
    made = WalMaker(settings)
    made.open()
    for number, vchannels in ((1, 2), (2, 1)):
        collection = Collection(made, collection_id=number, vchannels=vchannels)
        collection.create()
        append(collection)
    made.commit()
    assert not made.rejected
    return made


def append(collection: Collection) -> None:
    for vchannel in collection.vchannels:
        keys = collection.keys_of(vchannel, 3)
        rows: dict[str, list[object]] = {"id": list(keys), "body": [str(key) for key in keys]}
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel))


def flushed(settings: Settings) -> list[str]:
    path = Path(settings.checkpoints_uri)
    return sorted(read_checkpoints(open_table(path)))


def files(path: Path) -> set[Path]:
    return set(path.rglob("*.parquet"))


def test_the_others_are_flushed_and_the_parked_one_is_told(settings: Settings, maker: WalMaker) -> None:
    ensure_rows_table(Path(rows_uri(settings, 2)), OTHER)
    with pytest.raises(ChannelParked, match="another schema"):
        flush_to_end(settings)
    assert flushed(settings) == ["p1"]
    assert DeltaTable(str(Path(rows_uri(settings, 1)))).to_pyarrow_dataset().count_rows() == 3
    assert not files(Path(rows_uri(settings, 2))), "no rows are written that cannot be committed"
    more = Collection(maker, vchannels=2)
    append(more)
    maker.commit()
    with pytest.raises(ChannelParked):
        flush_to_end(settings)
    assert DeltaTable(str(Path(rows_uri(settings, 1)))).to_pyarrow_dataset().count_rows() == 6


def test_a_table_that_comes_in_between_parks_its_report_and_leaves_nothing_of_it(
    settings: Settings, maker: WalMaker
) -> None:
    reports = [run_flush(settings, plan) for plan in plans_of(settings)]
    ensure_rows_table(Path(rows_uri(settings, 2)), OTHER)
    result = FlushCommitter(settings).commit(reports)
    assert list(result.refused) == ["p0"]
    assert [report.channel for report in result.committed] == ["p1"]
    assert flushed(settings) == ["p1"]
    assert not files(Path(rows_uri(settings, 2)))
    assert files(Path(rows_uri(settings, 1))) == {
        Path(rows_uri(settings, 1)) / action.path
        for report in reports
        for action in report.collections[1]["rows"].actions
        if report.channel == "p1"
    }


def test_it_goes_on_where_the_cause_is_mended(settings: Settings, maker: WalMaker) -> None:
    ensure_rows_table(Path(rows_uri(settings, 2)), OTHER)
    with pytest.raises(ChannelParked):
        flush_to_end(settings)
    Path(rows_uri(settings, 2)).rename(Path(rows_uri(settings, 2)).with_name("set-aside"))
    flush_to_end(settings)
    assert flushed(settings) == ["p0", "p1"]
    assert [read_arrow(settings, number).num_rows for number in (1, 2)] == [6, 3]
