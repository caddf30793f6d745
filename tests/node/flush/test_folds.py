"""Folds between flushes: rows and deletes stay what they are at every tick, for pinned readers and after any crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush import committer
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.definition import FlushLoop
from millrace.node.flush.flusher import run_flush
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.recovery.table_repair import rebuild_collection
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.storage.table import open_table, table_at
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.read.arrow import read_arrow, read_pieces
from millrace.tables.read.plan import plan_read
from millrace.tables.rewrite.fold import FAN_IN, fold_files
from millrace.tables.rewrite.rewrite import merge_job
from tests.failpoints import at_failpoints
from tests.laws.profile import spread
from tests.node.flush.plans import plans_of
from tests.tables.wal_maker import START_MS, Collection, WalMaker

MINUTE_MS = 60_000
TO_FOLD = 2 * FAN_IN + 1
"""Flushes after which each table was folded: the first look at it comes at any of the first FAN_IN files."""


class _Died(Exception):
    pass


class Trickle:
    """Upserts and deletes on two VChannels, one flush a minute, with the folds of a supervised flusher."""

    def __init__(self, settings: Settings) -> None:
        self.maker = WalMaker(settings)
        self.maker.open()
        self.collection = Collection(self.maker)
        self.collection.create()
        self.maker.commit()
        self.minutes = 0
        self.on(settings)

    def on(self, settings: Settings) -> None:
        """A flusher that has just started."""
        self.settings = settings
        loop = FlushLoop(settings)
        self.metrics = Metrics()
        self.committer = loop.committer(self.metrics)
        self.record: Callable[[Any], None] = loop.watch(self.metrics)

    def write(self) -> None:
        self.minutes += 1
        self.maker.ms = START_MS + self.minutes * MINUTE_MS
        for vchannel in self.collection.vchannels:
            keys = self.collection.keys_of(vchannel, 8)
            key = keys[self.minutes % 8]
            rows: dict[str, list[object]] = {"id": [key], "body": [f"{self.minutes}"]}
            self.collection.append(vchannel, self.collection.insert(rows, vchannel=vchannel, upsert=True))
            if self.minutes % 5 == 0:
                self.collection.append(vchannel, self.collection.delete([keys[3]], vchannel=vchannel))
        self.maker.commit()

    def flush(self) -> None:
        result = self.committer.commit([run_flush(self.settings, plan) for plan in plans_of(self.settings)])
        assert not result.fenced
        self.record(result.committed)

    def minute(self) -> None:
        self.write()
        self.flush()

    def tick(self) -> int:
        return min(self.maker.confirmed().values())

    def read(self, tick: int) -> list[tuple[int, str]]:
        rows = read_arrow(self.settings, self.collection.id, at=tick, confirmed=self.maker.confirmed())
        return sorted(zip(rows["id"].to_pylist(), rows["body"].to_pylist(), strict=True))

    def live(self) -> list[int]:
        """The live files of rows and of deletes."""
        found = (open_table(uri(self.settings, self.collection.id)) for uri in (rows_uri, deletes_uri))
        return [0 if table is None else len(table.live_files()) for table in found]


def test_rows_and_deletes_stay_what_they_are_at_every_tick(settings: Settings) -> None:
    trickle = Trickle(settings)
    seen: dict[int, list[tuple[int, str]]] = {}
    pinned = None
    for minute in range(TO_FOLD):
        trickle.minute()
        seen[trickle.tick()] = trickle.read(trickle.tick())
        if minute == 3:
            pinned = plan_read(settings, 1, confirmed=trickle.maker.confirmed())
    assert max(trickle.live()) < 32
    assert trickle.metrics.flusher_folded_bytes_total._value.get() > 0  # type: ignore[attr-defined]
    for tick in spread(1, list(seen), first=0):
        assert trickle.read(tick) == seen[tick], f"at {tick}"
    assert pinned is not None
    again = [key for piece in read_pieces(pinned) for key in piece["id"].to_pylist()]
    assert sorted(again) == [key for key, _ in seen[pinned.tick]]
    assert all(each.ok for each in verify_collections(settings).values())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("place", "joining"),
    [("commit.checked", False), ("compact.written", False), ("compact.replaced", False), ("compact.written", True)],
)
def test_a_flusher_that_dies_in_a_fold_or_a_join_is_made_good_by_the_next(
    settings: Settings, place: str, joining: bool
) -> None:
    trickle = Trickle(settings)
    flushed = folding = False

    def act(name: str) -> None:
        nonlocal flushed, folding
        if name in ("flush.written", "flush.checkpoints"):
            flushed = name == "flush.checkpoints"
        folding |= flushed and name == "compact.written"
        if name == place and (folding or joining):
            raise _Died

    def trickling() -> None:
        for _ in range(TO_FOLD):
            trickle.minute()

    with pytest.raises(_Died), at_failpoints(act):
        trickling()
    expected = trickle.read(trickle.tick())
    assert (len(expected) >= 8) is not joining
    assert all(each.ok for each in verify_collections(settings).values())
    died = trickle.tick()
    trickle.on(settings)
    trickling()
    assert trickle.read(died) == expected
    assert max(trickle.live()) < 32
    assert all(each.ok for each in verify_collections(settings).values())


def test_compaction_and_folds_work_on_the_same_tables(settings: Settings) -> None:
    trickle = Trickle(settings)
    params = CompactionParams(fold="always", keep_history_hours=0, vacuum=False, min_files=2)
    for minute in range(12):
        trickle.minute()
        expected = trickle.read(trickle.tick())
        if minute % 5 == 4:
            compact(settings, params, history=trickle.tick())
            assert trickle.read(trickle.tick()) == expected
    assert all(each.ok for each in verify_collections(settings).values())


@pytest.mark.slow
def test_a_day_of_trickle_leaves_few_files(settings: Settings) -> None:
    trickle = Trickle(settings)
    most = 0
    for _ in range(24 * 60):
        trickle.minute()
        most = max(most, sum(trickle.live()))
    assert most <= 64
    rows = table_at(rows_uri(settings, 1))
    written = sum(path.stat().st_size for path in Path(rows.uri).rglob("part-*.parquet"))
    first = 24 * 60 * 2 * 4_000
    assert written <= 3 * first, "bytes of files per byte that flushes wrote"


def names(settings: Settings) -> tuple[set[str], set[str]]:
    """The live files of rows, and those on disk."""
    table = table_at(rows_uri(settings, 1))
    on_disk = {str(path.relative_to(table.uri)) for path in Path(table.uri).rglob("part-*.parquet")}
    return set(table.live_files()), on_disk


def test_a_flush_adds_one_file_for_each_collection_however_many_pchannels(settings: Settings) -> None:
    trickle = Trickle(settings)
    trickle.minute()
    assert trickle.live() == [1, 1]
    live, on_disk = names(settings)
    assert on_disk == live, "what the tasks wrote is gone"
    trickle.minute()
    assert trickle.live() == [2, 2]
    assert trickle.metrics.flusher_folded_bytes_total._value.get() == 0  # type: ignore[attr-defined]
    assert all(each.ok for each in verify_collections(settings).values())


def test_large_files_of_a_flush_are_not_joined(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "JOIN_BYTES", 1)
    trickle = Trickle(settings)
    trickle.minute()
    assert trickle.live() == [2, 2]


def test_files_that_were_joined_are_fenced_together(settings: Settings) -> None:
    trickle = Trickle(settings)
    trickle.write()
    late = [run_flush(settings, plan) for plan in plans_of(settings)]
    [first] = [plan for plan in plans_of(settings) if plan.channel == "p1"]
    assert FlushCommitter(settings).commit([run_flush(settings, first)]).committed
    result = trickle.committer.commit(late)
    assert (result.committed, {report.channel for report in result.fenced}) == ([], {"p0", "p1"})
    live, on_disk = names(settings)
    assert on_disk == live
    trickle.flush()
    assert len(trickle.read(trickle.tick())) == 2
    assert all(each.ok for each in verify_collections(settings).values())


def test_a_rebuild_that_a_fold_overtakes_is_done_again(settings: Settings) -> None:
    trickle = Trickle(settings)
    trickle.record = lambda committed: None
    for _ in range(FAN_IN):
        trickle.minute()
    expected = trickle.read(trickle.tick())
    visits: list[str] = []

    def act(name: str) -> None:
        if name == "recovery.written":
            visits.append(name)
            if len(visits) == 2:  # the new deletes are in their table, and the new rows are not
                table = table_at(rows_uri(settings, 1))
                assert fold_files(table, merge_job(table, ("id",)))[0]

    with at_failpoints(act):
        assert rebuild_collection(settings, 1, progress=Progress()) > 0
    assert len(visits) == 4
    assert trickle.read(trickle.tick()) == expected
    assert all(each.ok for each in verify_collections(settings).values())
