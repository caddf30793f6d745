"""A checkpoint is written once a replay confirms it; the log then gives up what stands before it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millrace.message.ids import EARLIEST, LogId
from millrace.node.retention.truncation import truncate_log
from millrace.operations.checkpoint import recovery_checkpoints, table_sync
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import CheckpointReport, checkpoint
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.results import record_run
from millrace.runtime.progress import Progress
from millrace.tables.wal.table import WalTable
from tests.operations.log_maker import Things


def take(things: Things, **params: object) -> CheckpointReport:
    return checkpoint(things.settings, things.log, CheckpointParams.parse(params), Progress())


def begin(things: Things, pchannel: str = "p0") -> LogId:
    return things.log.open(pchannel).describe().begin


@pytest.mark.slow
def test_a_checkpoint_holds_the_state_of_the_wal_and_the_log_begins_behind_it(things: Things) -> None:
    things.fill(12, size=12_000)
    planned = take(things, dry_run=True)
    assert planned.ok
    assert begin(things) == EARLIEST, "a dry run changes nothing"
    assert recovery_checkpoints.newest(things.settings) == {}
    report = take(things)
    for channel, freed, before in zip(report.channels, report.truncated, planned.truncated, strict=True):
        assert (channel.written, channel.by_log, channel.verified_by) == (True, True, "replayed")
        found = recovery_checkpoints.newest(things.settings)[channel.pchannel]
        position = WalTable.open(Path(things.settings.wal_uri)).position(channel.pchannel)
        assert (found.state_bytes, found.totals) == (position.state_bytes, position.totals)
        assert begin(things, channel.pchannel) == found.state.last_entry
        assert freed.position == before.position
        assert freed.freed_bytes > 0


@pytest.mark.slow
def test_the_next_checkpoint_is_replayed_from_the_one_before(things: Things) -> None:
    things.fill(3)
    first = take(things)
    assert not any(channel.written for channel in take(things).channels)
    things.fill(2)
    for before, channel in zip(first.channels, take(things).channels, strict=True):
        assert channel.by_log, "the log was kept from the checkpoint before on"
        assert channel.replayed_from == before.position
        earlier, later = recovery_checkpoints.history(things.settings, channel.pchannel)
        assert channel.replayed_rows == later.totals.digest.rows - earlier.totals.digest.rows


@pytest.mark.slow
def test_what_grew_beyond_the_sample_is_replayed_at_its_end(things: Things) -> None:
    things.fill(12, rows=1, size=200_000, delete=False)
    for channel in take(things, sample_mib=1).channels:
        assert (channel.verified_by, channel.problem, channel.written) == ("sampled", "", True)
        assert channel.replayed_from != "0:0"


def test_a_wal_that_holds_other_rows_than_the_log_gives_gets_no_checkpoint_and_keeps_its_log(things: Things) -> None:
    things.fill(1)
    table = DeltaTable(str(Path(things.settings.wal_uri)))
    victim = next(uri for uri in table.file_uris() if "kind=message/pchannel=p0" in uri).removeprefix("file://")
    _alter_the_terms(Path(victim))
    report = take(things)
    assert not report.ok
    problems = {channel.pchannel: channel.problem for channel in report.channels}
    assert "stores" in problems["p0"]
    assert problems["p1"] == ""
    assert recovery_checkpoints.newest(things.settings).keys() == {"p1"}
    assert begin(things) == EARLIEST
    assert begin(things, "p1") > EARLIEST, "the others go on"


@pytest.mark.slow
def test_a_channel_that_broke_behind_its_checkpoint_keeps_its_log(things: Things) -> None:
    things.fill(4, size=12_000)
    assert take(things, truncate=False).ok
    things.fill(4, size=12_000)
    newest = max(
        (
            uri.removeprefix("file://")
            for uri in DeltaTable(str(Path(things.settings.wal_uri))).file_uris()
            if "kind=message/pchannel=p0" in uri
        ),
        key=lambda path: Path(path).stat().st_mtime_ns,
    )
    _alter_the_terms(Path(newest))
    report = take(things)
    assert not report.ok
    assert begin(things) == EARLIEST, "its WAL may have to be made from the log again, from before its checkpoint even"
    assert begin(things, "p1") > EARLIEST


def test_a_log_that_was_cut_by_hand_is_made_up_for_by_the_rows_of_the_wal(things: Things) -> None:
    things.fill(3)
    truncate_log(things.settings, things.log)
    for channel in take(things).channels:
        assert (channel.by_log, channel.problem, channel.written) == (False, "", True)


def test_a_standing_block_of_quality_keeps_the_log_as_it_is(things: Things) -> None:
    things.fill(3)
    check = Check("ticks-increase", "expect_column_values_to_be_between", {"column": "tick_step"}, "ticks increase")
    record_run(
        things.settings, "run", [TableCheckResult("wal", {}, (CheckResult(check, success=False, unexpected=1),))]
    )
    report = take(things)
    assert report.channels[0].written, "a checkpoint removes nothing, so it is written all the same"
    assert len(report.blocked) == 1
    assert (report.truncated, begin(things)) == ((), EARLIEST)


@pytest.mark.slow
def test_only_the_newest_checkpoints_stay(things: Things, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_checkpoints, "RETAINED_CHECKPOINTS", 2)
    for _ in range(4):
        things.fill(1)
        take(things)
    kept = recovery_checkpoints.history(things.settings, "p0")
    assert len(kept) == 2
    assert kept[0].commits < kept[1].commits
    assert kept[1] == recovery_checkpoints.newest(things.settings)["p0"]


@pytest.mark.slow
def test_what_a_checkpoint_costs_does_not_grow_with_the_wal(things: Things) -> None:
    rows = []
    for _ in range(4):
        things.fill(2)
        rows.append([channel.replayed_rows for channel in take(things).channels])
    assert rows[1] == rows[2] == rows[3]


def test_the_tables_are_synced_once(things: Things) -> None:
    things.fill(2)
    assert table_sync.sync_tables(things.settings).files > 10
    assert table_sync.sync_tables(things.settings).files == 0
    things.fill(1)
    assert 0 < table_sync.sync_tables(things.settings).files < 40


def _alter_the_terms(path: Path) -> None:
    rows = pq.ParquetFile(path).read()
    place = rows.schema.get_field_index("term")
    altered = rows.set_column(place, rows.schema.field(place), pa.array([7] * rows.num_rows, pa.int64()))
    pq.write_table(altered, path)
