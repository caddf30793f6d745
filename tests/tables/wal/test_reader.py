"""WalSnapshot: one version, in order, by tick and by id, opening only the files that it must."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.base.errors import WalGap
from millrace.base.settings import Settings
from millrace.message.ids import MessageId
from millrace.node.retention.wal_compaction import compact_once, live_files
from millrace.storage.store import store_at
from millrace.tables.wal import reader as wal_reader
from millrace.tables.wal.reader import WalRange, WalSnapshot, range_bytes, read_range
from millrace.tables.wal.table import WalTable
from millrace.wal.schema import KIND_MESSAGE
from tests.tables.wal_maker import Collection, WalMaker

IDS = ("ledger", "entry", "index", "ordinal")


def made(settings: Settings, commits: int = 3) -> tuple[WalMaker, WalSnapshot]:
    """A WAL of several commits; on p0 a transaction is open from the first commit to the last."""
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker)
    collection.create()
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 3)
    collection.append(vchannel, collection.begin(vchannel, 5))
    for number in range(commits):
        rows: dict[str, list[object]] = {"id": list(keys), "body": [str(number)] * 3}
        collection.append(vchannel, *(collection.insert(rows, vchannel=vchannel) for _ in range(3)))
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel, txn=5))
        if number == commits - 1:
            collection.append(vchannel, collection.end(vchannel, 5))
        maker.commit()
    snapshot = WalSnapshot.open(Path(settings.wal_uri))
    assert snapshot is not None
    return maker, snapshot


def ticks_of(tables: list[pa.Table]) -> list[int]:
    return [tick for table in tables for tick in table["time_tick"].to_pylist()]


def test_messages_come_in_id_order_whole_and_once(settings: Settings) -> None:
    maker, snapshot = made(settings)
    for name in maker.pchannels:
        found = ticks_of(list(snapshot.messages(name)))
        assert found == [message["time_tick"] for message in maker.accepted[name]]
        assert snapshot.verify(name) == len(found)


def merged(settings: Settings, maker: WalMaker) -> WalSnapshot:
    """The same rows in one file a PChannel, as compaction leaves them, two rows in each of its row groups."""
    table = WalTable.open(settings.wal_uri)
    for name in maker.pchannels:
        parts = [
            file
            for file in live_files(table.table)
            if (file.partition["kind"], file.partition["pchannel"]) == (KIND_MESSAGE, name)
        ]
        with mock.patch("millrace.node.retention.wal_compaction.MOST_SMALL", 0):  # at any price
            made_of = compact_once(table.table, fan_in=len(parts), only={name})
        assert made_of[name] >= len(parts)
    for file in live_files(table.table):
        path = Path(table.uri) / file.path
        pq.write_table(pq.ParquetFile(path).read(), path, row_group_size=2)
    snapshot = WalSnapshot.open(Path(settings.wal_uri))
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_a_range_of_ticks_and_a_first_id_cut_exactly(settings: Settings, batch_bytes: int, one_file: bool) -> None:
    maker, snapshot = made(settings)
    if one_file:
        snapshot = merged(settings, maker)
    rows = maker.accepted["p0"]
    for low in range(0, len(rows), 3):
        for high in range(low, len(rows), 4):
            after, until = rows[low]["time_tick"], rows[high]["time_tick"]
            wanted = [row["time_tick"] for row in rows if after < row["time_tick"] <= until]
            part = snapshot.messages("p0", after_tick=after, up_to_tick=until, batch_bytes=batch_bytes)
            assert ticks_of(list(part)) == wanted
            start = MessageId(*(rows[low][name] for name in IDS))
            found = ticks_of(list(snapshot.messages("p0", start=start, up_to_tick=until, batch_bytes=batch_bytes)))
            assert found == [row["time_tick"] for row in rows[low:] if row["time_tick"] <= until]


def test_a_read_opens_only_the_files_of_its_range(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, snapshot = made(settings, commits=6)
    last = maker.accepted["p0"][-1]["time_tick"]
    opened: list[str] = []
    real = wal_reader._batches
    monkeypatch.setattr(
        wal_reader, "_batches", lambda path, file, *rest: (opened.append(file.path), real(path, file, *rest))[1]
    )
    assert ticks_of(list(snapshot.messages("p0", after_tick=last - 1))) == [last]
    assert len(opened) == 1


@pytest.mark.slow
def test_of_a_file_that_a_range_begins_in_only_what_lies_behind_is_read_and_counted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, _ = made(settings, commits=6)
    snapshot = merged(settings, maker)
    rows = maker.accepted["p0"]
    (file,) = snapshot.plan("p0").files
    read: list[int] = []
    real = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, number, **rest: (read.append(number), real(self, number, **rest))[1],
    )
    counted = []
    for place in range(len(rows)):
        plan = snapshot.plan("p0", start=MessageId(*(rows[place][name] for name in IDS)))
        counted.append(range_bytes(store_at(Path(settings.wal_uri)), plan))
        read.clear()
        assert ticks_of(list(read_range(store_at(Path(settings.wal_uri)), plan))) == [
            row["time_tick"] for row in rows[place:]
        ]
        # Several messages may be of one entry: its row groups cannot be told apart by their statistics.
        first = next(number for number, row in enumerate(rows) if row["entry"] == rows[place]["entry"])
        assert read == list(range(first // 2, (len(rows) + 1) // 2))
    assert counted[0] <= (Path(settings.wal_uri) / file.path).stat().st_size
    assert counted == sorted(counted, reverse=True)
    assert counted[-1] < counted[0] / 10
    assert range_bytes(store_at(Path(settings.wal_uri)), WalRange(())) == 0


def test_last_confirmed_is_where_a_reader_of_everything_later_begins(settings: Settings) -> None:
    maker, snapshot = made(settings)
    rows = maker.accepted["p0"]
    for row in rows:
        wanted = MessageId(*(row[f"lc_{name}"] for name in IDS))
        assert snapshot.confirmed_at("p0", row["time_tick"]) == wanted
    assert snapshot.confirmed_at("p0", 1) == MessageId(0, 0, 0, 0)


def test_a_pinned_version_stays_what_it_is(settings: Settings) -> None:
    maker, snapshot = made(settings)
    before = snapshot.last_tick("p0")
    pinned = WalSnapshot.open(Path(settings.wal_uri), version=snapshot.version)
    assert pinned is not None
    made_rows = ticks_of(list(pinned.messages("p0")))
    collection = Collection(maker)
    vchannel = collection.vchannels[0]
    rows: dict[str, list[object]] = {"id": list(collection.keys_of(vchannel, 1)), "body": ["later"]}
    collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
    maker.commit()
    assert ticks_of(list(pinned.messages("p0"))) == made_rows
    assert snapshot.refreshed().last_tick("p0") > before


def test_a_range_cut_by_bytes_ends_with_a_whole_file(settings: Settings) -> None:
    _, snapshot = made(settings)
    whole = snapshot.plan("p0")
    cut = snapshot.plan("p0", max_bytes=1)
    assert cut.files == whole.files[:1]
    assert cut.up_to_tick == whole.files[0].last_tick
    assert WalRange.from_json(cut.to_json()) == cut


def test_rows_out_of_order_are_a_gap_and_not_a_surprise(settings: Settings) -> None:
    _, snapshot = made(settings)
    plan = snapshot.plan("p0")
    path: Path = Path(settings.wal_uri) / plan.files[0].path
    rows = pq.ParquetFile(path).read()
    pq.write_table(rows.take(list(reversed(range(rows.num_rows)))), path)
    with pytest.raises(WalGap):
        list(read_range(store_at(Path(settings.wal_uri)), plan))
