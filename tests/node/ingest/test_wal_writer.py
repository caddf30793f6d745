"""Files of one attempt: what is in them, where they lie, and that an aborted attempt leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.message.ids import tick_physical_ms
from millrace.node.ingest.wal_writer import WalRangeWriter
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.digest import digest_rows
from tests.node.wal_samples import NOON, message, outcome, rejection, wal_rows, write_range

DAY = 86_400_000
BASE = WalPosition(0, "p0")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return Path(WalTable.create(tmp_path / "wal").uri)


def test_a_range_makes_one_file_for_each_kind(table: Path) -> None:
    report = write_range(table, BASE, outcome(BASE, messages=[message(1), message(2)], rejections=[rejection(3)]))
    assert [(item.partition["kind"], item.rows) for item in report.actions] == [
        ("message", 2),
        ("rejection", 1),
        ("state", 1),
    ]
    for item in report.actions:
        assert item.path.startswith(f"kind={item.partition['kind']}/pchannel=p0/date={item.partition['date']}/")
        assert (table / item.path).stat().st_size == item.size
        assert pq.read_metadata(table / item.path).num_rows == item.rows


def test_rows_go_to_the_utc_date_of_their_tick_and_rejections_to_that_of_their_stamp(table: Path) -> None:
    midnight = NOON - NOON % DAY + DAY
    messages = [
        message(1, physical_ms=midnight - 1),
        message(2, physical_ms=midnight),
        message(3, physical_ms=midnight),
    ]
    late = [rejection(4, tick=messages[0]["time_tick"], physical_ms=midnight + DAY)]
    report = write_range(table, BASE, outcome(BASE, messages=messages, rejections=late))
    found = {(item.partition["kind"], item.partition["date"]): item.rows for item in report.actions}
    assert found == {
        ("message", "2025-06-15"): 1,
        ("message", "2025-06-16"): 2,
        ("rejection", "2025-06-17"): 1,
        ("state", "2025-06-16"): 1,
    }


def test_statistics_bound_tick_and_entry_over_all_slices(table: Path) -> None:
    writer = WalRangeWriter(table, "p0")
    for entries in ([1, 2], [5], [7, 9]):
        writer.add(outcome(BASE, messages=[message(entry) for entry in entries]))
    made = outcome(BASE, messages=[message(9)])
    action = writer.finish(made.state, BASE)[0]
    stats = json.loads(action.stats)
    assert stats["numRecords"] == 5
    assert stats["minValues"] == {"time_tick": message(1)["time_tick"], "ledger": 0, "entry": 1}
    assert stats["maxValues"] == {"time_tick": message(9)["time_tick"], "ledger": 0, "entry": 9}
    footer = pq.read_metadata(table / action.path)
    assert footer.num_row_groups == 3, "each slice is on disk before the next is decoded"
    names = [footer.schema.column(index).name for index in range(footer.num_columns)]
    with_statistics = {names[index] for index in range(len(names)) if footer.row_group(0).column(index).statistics}
    assert with_statistics == {"time_tick", "ledger", "entry"}


def test_what_is_read_back_has_the_digest_that_was_reported(table: Path) -> None:
    report = write_range(table, BASE, outcome(BASE, messages=[message(1), message(2)], rejections=[rejection(3)]))
    read = [pq.ParquetFile(table / item.path).read() for item in report.actions if item.partition["kind"] != "state"]
    assert digest_rows(read[0]) + digest_rows(read[1]) == report.totals.digest
    assert digest_rows(wal_rows([message(1), message(2)])) == digest_rows(read[0])


def test_the_state_row_says_where_the_range_ends_and_what_all_ranges_add_up_to(table: Path) -> None:
    made = outcome(BASE, messages=[message(1)])
    report = write_range(table, BASE, made)
    (row,) = pq.ParquetFile(table / report.actions[-1].path).read().to_pylist()
    assert (row["ledger"], row["entry"], row["time_tick"]) == (*made.state.position, made.state.last_tick)
    assert row["physical_ms"] == tick_physical_ms(row["time_tick"])
    assert row["payload"] == made.state.to_bytes()
    detail = json.loads(row["detail"])
    assert isinstance(detail.pop("crc32c"), int)
    assert detail == {"commits": 1, "previous_tick": 0, **report.totals.to_json()}


def test_two_attempts_at_a_range_never_share_a_name(table: Path) -> None:
    made = outcome(BASE, messages=[message(1)])
    names = [{item.path for item in write_range(table, BASE, made).actions} for _ in range(2)]
    assert not names[0] & names[1]


def test_an_aborted_attempt_leaves_no_file(table: Path) -> None:
    writer = WalRangeWriter(table, "p0")
    writer.add(outcome(BASE, messages=[message(1)], rejections=[rejection(2)]))
    writer.abort()
    writer.abort()
    assert not list(table.rglob("*.parquet"))
