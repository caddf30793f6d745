"""When a supervised flusher takes what waits: by bytes, by age, or because a message asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.definition import FlushPlanner
from millrace.node.flush.flusher import run_flush
from millrace.node.range_loop.schedule import UNBOUNDED
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal import reader
from tests.tables.wal_maker import Collection, WalMaker


class Flusher:
    """A planner by a clock that the test sets, and a committer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0
        self.planner = FlushPlanner(settings, clock=lambda: self.now)
        self.committer = FlushCommitter(settings)

    def look(self) -> list[str]:
        """The PChannels that are due now."""
        found = self.planner.pending(without=frozenset(), target=None, max_bytes=UNBOUNDED)
        return [each.channel for each in found]

    def flush(self) -> list[str]:
        """Flush what is due now; its PChannels."""
        due = self.look()
        ends = {name: end for name, end in self.planner.ends().items() if name in due}
        plans = self.planner.plan(ends, max_bytes=UNBOUNDED)
        self.committer.commit([run_flush(self.settings, plan) for plan in plans])
        return due


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Without publishing, for which rows wait less."""
    return replace(settings, publish=False)


@pytest.fixture
def maker(settings: Settings) -> WalMaker:
    made = WalMaker(settings)
    made.open()
    made.commit()
    return made


@pytest.fixture
def collection(maker: WalMaker) -> Collection:
    made = Collection(maker)
    made.create()
    maker.commit()
    return made


def write(collection: Collection, place: int = 0) -> None:
    vchannel = collection.vchannels[place]
    keys = collection.keys_of(vchannel, 1)
    rows: dict[str, list[object]] = {"id": list(keys), "body": ["x"]}
    collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
    collection.maker.commit()


def test_what_waits_when_a_flusher_starts_is_due_at_once(settings: Settings, collection: Collection) -> None:
    write(collection)
    assert Flusher(settings).look() == ["p0", "p1"]


def test_rows_wait_for_the_interval_and_reads_have_them_meanwhile(settings: Settings, collection: Collection) -> None:
    flusher = Flusher(settings)
    flusher.flush()
    write(collection)
    assert flusher.flush() == []
    confirmed = collection.maker.confirmed()
    assert read_arrow(settings, collection.id, confirmed=confirmed).num_rows == 1
    flusher.now = settings.flush_interval - 1
    assert flusher.flush() == []
    flusher.now = settings.flush_interval
    assert flusher.flush() == ["p0"]
    assert flusher.flush() == []
    assert read_arrow(settings, collection.id, confirmed=confirmed).num_rows == 1


def test_pchannels_that_wait_for_half_the_interval_join(settings: Settings, collection: Collection) -> None:
    flusher = Flusher(settings)
    flusher.flush()
    write(collection, 0)
    flusher.look()
    flusher.now = settings.flush_interval / 2
    write(collection, 1)
    flusher.look()
    flusher.now = settings.flush_interval
    assert flusher.flush() == ["p0", "p1"]


def test_enough_bytes_are_due_at_once(settings: Settings, collection: Collection) -> None:
    flusher = Flusher(replace(settings, flush_bytes=1))
    flusher.flush()
    write(collection)
    assert flusher.flush() == ["p0"]


def test_a_manual_flush_is_due_at_once(settings: Settings, collection: Collection) -> None:
    flusher = Flusher(settings)
    flusher.flush()
    write(collection, 0)
    write(collection, 1)
    assert flusher.look() == []
    vchannel = collection.vchannels[1]
    collection.append(vchannel, builders.manual_flush(vchannel=vchannel, collection_id=collection.id, term=1))
    collection.maker.commit()
    assert flusher.flush() == ["p1"]
    assert flusher.flush() == []


def test_a_flush_all_is_due_at_once(settings: Settings, maker: WalMaker, collection: Collection) -> None:
    flusher = Flusher(settings)
    flusher.flush()
    maker.append("p0", [builders.flush_all(term=1)])
    maker.commit()
    assert flusher.flush() == ["p0"]


def test_the_lag_of_flow_control_is_not_reached_on_purpose(settings: Settings, collection: Collection) -> None:
    flusher = Flusher(replace(settings, flow_lag_slow=10.0))
    flusher.flush()
    write(collection)
    assert flusher.look() == []
    flusher.now = 5.0
    assert flusher.flush() == ["p0"]


def test_rows_that_are_published_wait_for_the_shorter_interval(settings: Settings, collection: Collection) -> None:
    flusher = Flusher(replace(settings, publish=True, publish_interval=10.0, wal_linger=3.0))
    flusher.flush()
    write(collection)
    assert flusher.look() == []
    flusher.now = 7.0  # they have waited for the WAL before
    assert flusher.flush() == ["p0"]


def test_a_look_without_news_plans_nothing(
    settings: Settings, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    flusher = Flusher(settings)
    flusher.flush()
    write(collection)
    assert flusher.look() == []
    plans: Counter[str] = Counter()
    plan = reader.WalSnapshot.plan

    def counted(self: reader.WalSnapshot, pchannel: str, **given: Any) -> reader.WalRange:
        plans[pchannel] += 1
        return plan(self, pchannel, **given)

    monkeypatch.setattr(reader.WalSnapshot, "plan", counted)
    for second in range(int(settings.flush_interval)):
        flusher.now = float(second)
        assert flusher.look() == []
    assert not plans
    flusher.now = settings.flush_interval
    assert flusher.look() == ["p0"]
