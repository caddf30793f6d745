"""Folds between flushes: rows and deletes stay what they are at every tick, for pinned readers and after any crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.definition import FlushLoop
from millrace.node.flush.flusher import run_flush
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.verification import verify_collections
from millrace.storage.table import open_table, table_at
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.read.arrow import read_arrow, read_pieces
from millrace.tables.read.plan import plan_read
from tests.failpoints import at_failpoints
from tests.node.flush.plans import plans_of
from tests.tables.wal_maker import START_MS, Collection, WalMaker

MINUTE_MS = 60_000


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
    for minute in range(14):
        trickle.minute()
        seen[trickle.tick()] = trickle.read(trickle.tick())
        if minute == 3:
            pinned = plan_read(settings, 1, confirmed=trickle.maker.confirmed())
    assert max(trickle.live()) < 32
    assert trickle.metrics.flusher_folded_bytes_total._value.get() > 0  # type: ignore[attr-defined]
    for tick, rows in seen.items():
        assert trickle.read(tick) == rows, f"at {tick}"
    assert pinned is not None
    [again] = read_pieces(pinned)
    assert sorted(again["id"].to_pylist()) == [key for key, _ in seen[pinned.tick]]
    assert all(each.ok for each in verify_collections(settings).values())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", ["compact.written", "commit.checked", "compact.replaced"])
def test_a_flusher_that_dies_in_a_fold_is_made_good_by_the_next(settings: Settings, place: str) -> None:
    trickle = Trickle(settings)
    folding = False

    def act(name: str) -> None:
        nonlocal folding
        folding |= name == "compact.written"
        if folding and name == place:
            raise _Died

    def trickling() -> None:
        for _ in range(10):
            trickle.minute()

    with pytest.raises(_Died), at_failpoints(act):
        trickling()
    expected = trickle.read(trickle.tick())
    assert len(expected) >= 8
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
