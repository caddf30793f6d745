"""The WAL gives up what its retention allows once the collections are proved to have it.

Nobody reads a gap as if it were none.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.base.errors import PositionTruncated, TickTooOld
from millrace.base.settings import Settings
from millrace.client.consume.scan import scan
from millrace.message import builders
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.node.flush.definition import flush_to_end
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import CheckpointReport, checkpoint
from millrace.operations.compaction.vacuum import tables_to_vacuum
from millrace.operations.quality.checks import TableCheckResult
from millrace.operations.quality.results import record_run
from millrace.operations.verification import verify_channel, verify_collections
from millrace.rpc.tail import Evicted, TimeTick
from millrace.runtime.progress import Progress
from millrace.tables.collections.bases import read_bases
from millrace.tables.collections.changes import table_changes
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import FIRST_ID, WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.tables.wal.trims import trimmed_totals
from millrace.wal.scanner import All
from millrace.wal.visible.changes import ChangePosition
from tests.failpoints import at_failpoints
from tests.operations.log_maker import Things
from tests.tables.collections.test_changes import fold, rows_of


class Died(BaseException):
    """Ends a run where it stands."""


def take(things: Things, settings: Settings, **params: object) -> CheckpointReport:
    return checkpoint(settings, things.log, CheckpointParams.parse(params), Progress())


def sound(things: Things, settings: Settings) -> None:
    """Rows, digests and collections hold, whatever was trimmed."""
    snapshot, wal = WalSnapshot.open(Path(settings.wal_uri)), WalTable.open(Path(settings.wal_uri))
    assert snapshot is not None
    for name in wal.pchannels():
        assert verify_channel(snapshot, wal, None, name).ok
    for report in verify_collections(settings).values():
        assert report.ok, report


def contents(settings: Settings) -> list[dict[str, object]]:
    return sorted(read_arrow(settings, 1).to_pylist(), key=lambda row: row["id"])


def test_without_a_retention_the_wal_keeps_everything(things: Things) -> None:
    things.fill(3)
    assert take(things, things.settings).trimmed == ()
    assert read_bases(Path(things.settings.wal_uri)) == {}


def test_a_wall_clock_that_leaps_trims_nothing(
    things: Things, short: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    things.fill(3)
    year = time.time() + 365 * 86_400
    monkeypatch.setattr(time, "time", lambda: year)
    assert take(things, replace(things.settings, wal_retention=86_400.0)).trimmed == ()
    assert take(things, short, dry_run=True).trimmed, "by log time this is old enough"


@pytest.mark.slow
def test_what_is_older_goes_with_a_base_and_everything_still_holds(things: Things, short: Settings) -> None:
    things.fill(4)
    before, rows = contents(short), WalTable.open(Path(short.wal_uri)).table.delta.count()
    planned = take(things, short, dry_run=True).trimmed
    assert sum(each.rows for each in planned) > 0
    assert WalTable.open(Path(short.wal_uri)).table.delta.count() == rows, "a dry run changes nothing"
    done = take(things, short).trimmed
    assert [each.rows for each in done] == [each.rows for each in planned]
    assert WalTable.open(Path(short.wal_uri)).table.delta.count() == rows - sum(each.rows for each in done)
    assert contents(short) == before
    sound(things, short)
    things.fill(2)
    take(things, short)
    sound(things, short)
    assert len(contents(short)) > len(before)
    gone = trimmed_totals(WalTable.open(Path(short.wal_uri)))
    assert all(totals.digest.rows == totals.messages + totals.rejections > 0 for totals in gone.values())


def test_who_would_begin_before_what_is_left_is_told_so(things: Things, short: Settings) -> None:
    things.fill(4)
    early = min(WalTable.open(Path(short.wal_uri)).last_tick(name) for name in ("p0", "p1")) - 1
    take(things, short)
    snapshot = WalSnapshot.open(Path(short.wal_uri))
    assert snapshot is not None
    tick, earliest = snapshot.trimmed("p0")
    assert tick == read_bases(Path(short.wal_uri))["p0"].time_tick
    with pytest.raises(PositionTruncated, match="trimmed up to tick") as caught:
        next(snapshot.messages("p0", start=FIRST_ID))
    assert caught.value.earliest == earliest
    with pytest.raises(TickTooOld, match="trimmed with the WAL"):
        read_arrow(short, 1, at=early)


class Gone:
    """A tail that has nothing of what lies behind a reader any more."""

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> Evicted:
        return Evicted(1 << 62)

    def time_tick(self, pchannel: str, *, persist: bool = True, deadline: float = 30.0) -> TimeTick:
        raise AssertionError("nobody waits for a tick here")


@pytest.mark.slow
def test_a_scan_that_stood_while_its_place_was_trimmed_is_told_so(things: Things, short: Settings) -> None:
    things.fill(2)
    with (
        scan("p0", All(), wal=Path(short.wal_uri), tail=Gone()) as slow,
        scan("p0", All(), wal=Path(short.wal_uri), tail=Gone()) as swift,
    ):
        while slow.poll(timeout=0.1) is not None:
            pass
        things.fill(4)
        while swift.poll(timeout=0.1) is not None:
            pass
        take(things, short)
        things.fill(1)
        assert swift.poll(timeout=0.1) is not None
        with pytest.raises(PositionTruncated, match="trimmed up to tick"):
            slow.poll(timeout=0.1)


@pytest.mark.slow
def test_changes_of_what_was_trimmed_are_refused_and_begin_behind_a_snapshot(things: Things, short: Settings) -> None:
    things.fill(2)
    vchannel = things.collection.vchannels[0]
    [key] = things.collection.keys_of(vchannel, 101)[100:]
    file = things.collection.stage("a/0.parquet", {"id": [key], "body": ["imported"]})
    things.collection.append(vchannel, things.collection.imported([file], vchannel=vchannel))
    things.fill(1)
    begun = table_changes(short, 1, "p0")
    next(begun)
    things.fill(2)
    take(things, short)
    assert not (short.staged_path / "a/0.parquet").exists()
    with pytest.raises(PositionTruncated, match="while this reader stood at"):
        list(begun)
    with pytest.raises(PositionTruncated, match="trimmed up to tick"):
        list(table_changes(short, 1, "p0"))
    confirmed, names = confirmed_tick(short), ("p0", "p1")
    snapshot = read_arrow(short, 1, at=confirmed, with_ticks=True).to_pylist()
    things.fill(2)
    behind = [row for name in names for row in rows_of(table_changes(short, 1, name, after=ChangePosition(confirmed)))]
    assert behind
    followed = fold(
        [*({**row, "_change": "insert", "extra": None} for row in snapshot), *behind], confirmed_tick(short)
    )
    assert sorted(key for key, *_ in followed.elements()) == [row["id"] for row in contents(short)]


def confirmed_tick(settings: Settings) -> int:
    return min(WalTable.open(Path(settings.wal_uri)).last_tick(name) for name in ("p0", "p1"))


@pytest.mark.slow
def test_an_open_transaction_stays_whole_behind_a_base(things: Things, short: Settings) -> None:
    collection = things.collection
    vchannel = collection.vchannels[0]
    things.fill(2)
    key = 10_000 + next(n for n in range(1000) if collection.home(10_000 + n) == vchannel)
    collection.append(vchannel, collection.begin(vchannel, 5))
    collection.append(vchannel, collection.insert({"id": [key], "body": ["in txn"]}, vchannel=vchannel, txn=5))
    things.fill(2)
    take(things, short)
    collection.append(vchannel, collection.end(vchannel, 5))
    things.fill(1)
    assert "in txn" in {row["body"] for row in contents(short)}
    sound(things, short)
    take(things, short)
    sound(things, short)


@pytest.mark.slow
def test_a_base_spans_a_schema_change(things: Things, short: Settings) -> None:
    things.fill(2)
    take(things, short)
    field = FieldSpec("extra", "int64", True)
    for vchannel in things.collection.vchannels:
        change = builders.schema_change([AddField(field)], vchannel=vchannel, collection_id=1, schema_version=2, term=1)
        things.collection.append(vchannel, change)
    things.fill(2)
    assert take(things, short).ok
    sound(things, short)


def test_a_collection_that_lacks_a_row_gets_no_base_and_the_wal_stays(things: Things, short: Settings) -> None:
    things.fill(3)
    rows = WalTable.open(Path(short.wal_uri)).table.delta.count()
    stored = DeltaTable(str(Path(rows_uri(short, 1))))
    stored.delete(f"id = {contents(short)[0]['id']}")
    report = take(things, short)
    assert not report.ok
    assert any("its table holds" in each.problem for each in report.trimmed)
    broken = {each.pchannel for each in report.trimmed if each.problem}
    assert not broken & read_bases(Path(short.wal_uri)).keys()
    assert WalTable.open(Path(short.wal_uri)).table.delta.count() > rows - sum(each.rows for each in report.trimmed) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("checkpoint.confirmed", marks=pytest.mark.slow),
        pytest.param("checkpoint.recorded", marks=pytest.mark.slow),
        pytest.param("checkpoint.synced", marks=pytest.mark.slow),
        pytest.param("base.proved", marks=pytest.mark.slow),
        "base.written",
        "wal_trim.recorded",
        pytest.param("wal_trim.checked", marks=pytest.mark.slow),
        "wal_trim.done",
    ],
)
def test_a_run_that_dies_anywhere_leaves_what_the_next_one_completes(
    place: str, things: Things, short: Settings
) -> None:
    things.fill(3)
    before = contents(short)

    def dies(name: str) -> None:
        if name == place:
            raise Died

    with pytest.raises(Died), at_failpoints(dies):
        take(things, short)
    assert contents(short) == before
    sound(things, short)
    report = take(things, short)
    assert report.ok
    sound(things, short)
    things.fill(1)
    take(things, short)
    sound(things, short)
    assert set(read_bases(Path(short.wal_uri))) == {"p0", "p1"}


@pytest.mark.slow
def test_a_commit_in_between_is_seen_and_the_trim_made_anew(things: Things, short: Settings) -> None:
    things.fill(3)
    once = iter([True])

    def another_commits(name: str) -> None:
        if name == "wal_trim.checked" and next(once, False):
            for vchannel in things.collection.vchannels:
                (key,) = things.collection.keys_of(vchannel, 60)[59:]
                rows: dict[str, list[object]] = {"id": [key], "body": ["late"]}
                things.collection.append(vchannel, things.collection.insert(rows, vchannel=vchannel))
            things.maker.commit()

    with at_failpoints(another_commits):
        assert take(things, short).ok
    flush_to_end(short)
    assert {row["body"] for row in contents(short)} >= {"late"}
    sound(things, short)


@pytest.mark.slow
def test_vacuum_forgets_no_table_of_the_installation(things: Things, short: Settings) -> None:
    things.fill(4)
    record_run(short, "a run", [TableCheckResult("wal", {}, ())])
    take(things, short)
    there = {log.parent for log in short.data_dir.rglob("_delta_log")}
    names = {path.relative_to(short.data_dir).as_posix() for path in there}
    assert {"wal", "bases", "wal_trims", "recovery_checkpoints", "quality/results"} <= names
    assert {str(path) for path in there} <= set(tables_to_vacuum(short, None).values())
