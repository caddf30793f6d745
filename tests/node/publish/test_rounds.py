"""The publish loop looks at the collections that changed, waits for PChannels, and goes on beside one that fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish import definition, publisher
from millrace.node.publish.definition import PublishLoop, PublishState, publish_to_end
from millrace.node.publish.publisher import MAX_PAUSE_INTERVALS
from millrace.node.publish.status import published_status
from millrace.node.range_loop.batch_driver import BatchDriver
from millrace.node.range_loop.definition import run_range
from millrace.node.range_loop.runner import run_loop
from millrace.node.range_loop.schedule import START, RangeSchedule
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from millrace.tables.collections.data_tables import published_uri
from tests.node.publish.published_maker import PublishedMaker
from tests.tables.wal_maker import Collection, WalMaker
from tests.waiting import until


class Rounds:
    """Runs rounds of the loop of one process, and counts the tables that each opens."""

    def __init__(self, settings: Settings, maker: WalMaker, *, clock: Callable[[], float] = time.monotonic) -> None:
        newest = lambda: max(map(maker.last_tick, maker.pchannels))  # noqa: E731
        self.loop = PublishLoop(settings, lambda names: dict.fromkeys(names, newest()))
        self.loop.state = PublishState(settings, clock=clock)
        self.schedule = RangeSchedule(self.loop.planner())
        self.driver = BatchDriver(self.loop, metrics=Metrics(registry=CollectorRegistry()))

    def round(self) -> list[int]:
        """One round: the collections that it looked at."""
        offset = self.schedule.next_offset(START)
        plans = self.schedule.plan(offset) if offset is not START else []
        self.driver.commit([run_range(self.loop, plan) for plan in plans])
        return [each.collection_id for each in plans]

    def all(self) -> int:
        """Rounds until there is nothing to do: the number of looks."""
        count = 0
        while found := self.round():
            count += len(found)
        return count


@contextmanager
def opened() -> Iterator[list[str]]:
    """The tables that the publisher opens in the block."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "open_table", lambda uri: found.append(str(uri)) or OPEN_TABLE(uri))
        yield found


OPEN_TABLE = publisher.open_table


def many(settings: Settings, count: int) -> tuple[WalMaker, list[Collection]]:
    maker = WalMaker(settings)
    maker.open()
    made = [Collection(maker, collection_id=number + 1) for number in range(count)]
    for each in made:
        each.create()
    maker.commit()
    return maker, made


def insert(collection: Collection, count: int = 1) -> None:
    for vchannel in collection.vchannels:
        keys: list[object] = list(collection.keys_of(vchannel, count))
        rows = {"id": keys, "body": ["x" for _ in keys]}
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel))


def version_of(settings: Settings, number: int) -> int:
    table = PublishedTable.open(store_at(published_uri(settings, number)))
    return -1 if table is None else table.version


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_a_round_costs_what_the_changed_collections_cost(settings: Settings, count: int) -> None:
    maker, made = many(settings, count)
    for each in made[:30]:
        insert(each)
    maker.commit()
    flush_to_end(settings)
    rounds = Rounds(settings, maker)
    assert rounds.all() == count, "after a start, each is looked at once"
    for each in made[:10]:
        insert(each)
    maker.commit()
    flush_to_end(settings)
    with opened() as tables:
        assert rounds.round() == [each.id for each in made[:10]]
        assert rounds.round() == []
    assert len(tables) <= 2 * 10
    assert all(version_of(settings, each.id) == 2 for each in made[:10])
    assert version_of(settings, made[11].id) == 1


def test_a_collection_whose_rows_wait_for_a_pchannel_stays_until_they_are_published(settings: Settings) -> None:
    made = PublishedMaker(settings)
    made.flush()
    first = made.collection.vchannels[0]
    keys = made.collection.keys_of(first, 3)
    made.write(keys, "x")
    made.flush()
    asked: list[str] = []

    def silent(names: object) -> dict[str, int]:
        asked.append(str(names))
        return {}

    loop = PublishLoop(settings, silent)
    planner = loop.planner()
    schedule = RangeSchedule(planner)
    driver = BatchDriver(loop, metrics=Metrics(registry=CollectorRegistry()))
    plans = schedule.plan(schedule.next_offset(START))
    driver.commit([run_range(loop, plan) for plan in plans])
    assert asked, "the idle PChannel was asked"
    assert (found := made.table()) is not None
    assert found.row_count < len(keys)
    until(lambda: schedule.next_offset(START) is not START)  # it is looked at again without news
    made.publish()
    made.check()


def test_a_later_look_that_asks_no_pchannel_finds_no_earlier_tick(settings: Settings) -> None:
    made = PublishedMaker(settings)
    made.write(range(9), "x")
    made.flush()
    made.write(range(9), "waits in the WAL")  # `wal` is further than the tables
    tick = made.publish()
    publish_to_end(settings, confirm=lambda names: {})
    made.fold()
    publish_to_end(settings, confirm=lambda names: {})
    table = made.table()
    assert table is not None
    assert table.tick == tick
    made.check()


def test_a_look_before_the_published_tick_waits(settings: Settings) -> None:
    made = PublishedMaker(settings)
    made.write(made.collection.keys_of(made.collection.vchannels[0], 3), "x")
    made.flush()
    made.publish()  # with the tick of the idle PChannel
    for number in range(9):
        made.write(made.collection.keys_of(made.collection.vchannels[0], 2), f"v{number}")
        made.flush()
    made.publish()
    made.fold()
    loop = PublishLoop(settings, lambda names: {})
    schedule = RangeSchedule(loop.planner())
    driver = BatchDriver(loop, metrics=Metrics(registry=CollectorRegistry()))
    plans = schedule.plan(schedule.next_offset(START))
    assert not driver.commit([run_range(loop, plan) for plan in plans]).refused
    assert published_status(settings, 1).error == ""
    until(lambda: schedule.next_offset(START) is not START)
    made.publish()
    made.check()


def test_one_that_fails_shows_its_error_and_the_others_are_published(settings: Settings) -> None:
    maker, made = many(settings, 3)
    for each in made:
        insert(each)
    maker.commit()
    flush_to_end(settings)
    real = definition.plan_publish

    def fails(view: publisher.PublishView, *, anew: bool = False) -> publisher.PlannedPublish:
        if view.tables.collection_id == 2:
            raise ValueError("the second one cannot be judged")
        return real(view, anew=anew)

    rounds = Rounds(settings, maker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definition, "plan_publish", fails)
        rounds.round()
    assert [version_of(settings, each.id) for each in made] == [1, -1, 1]
    shown = json.loads(settings.progress_path(definition.NAME).read_text())["pchannels"]
    assert "cannot be judged" in shown["2"]["failure"]
    until(lambda: rounds.round() == [2])
    assert version_of(settings, 2) == 1
    assert json.loads(settings.progress_path(definition.NAME).read_text())["pchannels"]["2"]["failure"] is None


def test_changes_that_the_flusher_did_not_make_are_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PublishedMaker(settings)
    for number in range(9):
        made.write([number], "x")
        made.flush()
    rounds = Rounds(settings, made.maker)
    rounds.all()
    before = version_of(settings, 1)
    made.fold()
    monkeypatch.setattr(definition, "SWEEP_SECONDS", 0.0)
    until(lambda: rounds.round() == [1] and version_of(settings, 1) == before + 1)
    made.check()


def test_metrics_say_what_publishing_costs_and_how_far_it_is_behind(settings: Settings) -> None:
    made = PublishedMaker(settings)
    made.write(range(20), "old")
    made.flush()
    metrics = Metrics(registry=CollectorRegistry())
    made.publish(metrics=metrics)
    made.delete([1, 2, 3])
    made.flush()
    made.publish(metrics=metrics)

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"millrace_{name}")

    assert value("publish_duration_seconds_count") == 2
    assert value("publish_masked_rows_total") == 3
    assert (value("publish_vector_bytes_total") or 0) > 0
    assert value("publish_lag_seconds") == 0
    made.write(made.collection.keys_of(made.collection.vchannels[0], 2), "ahead")
    made.flush()
    publish_to_end(settings, confirm=lambda names: {}, metrics=metrics)
    assert (value("publish_lag_seconds") or 0) > 0, "the other PChannel did not answer"


def test_the_loop_publishes_beside_a_flusher(settings: Settings) -> None:
    made = PublishedMaker(replace(settings, publish_interval=0.0))
    stop = threading.Event()
    loop = PublishLoop(made.settings, made.confirm)
    thread = threading.Thread(
        target=run_loop, args=(loop,), kwargs={"metrics": Metrics(registry=CollectorRegistry()), "stop": stop}
    )
    thread.start()
    try:
        for number in range(3):
            made.write(range(number, number + 4), f"v{number}")
            made.flush()
            until(partial(_shows, made, number + 4))
    finally:
        stop.set()
        thread.join()
    publish_to_end(made.settings, confirm=made.confirm)
    made.check()


def _shows(made: PublishedMaker, rows: int) -> bool:
    table = made.table()
    return table is not None and table.row_count == rows


def test_only_a_round_that_published_makes_the_next_one_wait_for_half_an_interval(settings: Settings) -> None:
    made = PublishedMaker(settings)
    rounds = Rounds(settings, made.maker)
    made.write([1, 2], "x")
    made.flush()
    assert rounds.round() == [1]
    assert rounds.loop.interval == settings.publish_interval / 2
    rounds.loop.state.add([1])
    assert rounds.round() == [1], "a look that finds nothing new"
    assert rounds.loop.interval == definition.WAIT_SECONDS
    waiting = Rounds(settings, made.maker)
    waiting.loop.confirm = lambda names: {}
    waiting.schedule = RangeSchedule(waiting.loop.planner())
    made.write(made.collection.keys_of(made.collection.vchannels[0], 2), "ahead")
    made.flush()
    assert waiting.round() == [1], "the other PChannel does not answer"
    assert waiting.loop.interval == definition.WAIT_SECONDS
    assert rounds.round() == [1]
    assert rounds.loop.interval == settings.publish_interval / 2
    made.check()


def test_vectors_that_outweigh_the_news_make_the_next_publish_wait(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "FREE_VECTOR_BYTES", 0)
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    for number in range(20):
        made.write(range(number * 100, number * 100 + 100), "old", upsert=False)
        made.flush()
    made.delete([number for number in range(1, 2_000, 2) if number % 100 > 30])
    made.flush()
    now, started = [0.0], made.maker.ms
    rounds = Rounds(settings, made.maker, clock=lambda: now[0])
    assert rounds.round() == [1]
    published = []
    for second in range(0, 121, 5):  # a flush every 5 s, which hits a row of each file
        now[0] = float(second)
        made.maker.ms = started + 1000 * second
        made.delete([second // 5 + 100 * each for each in range(20)])
        made.flush()
        if rounds.round():
            published.append(second)
    pauses = {later - earlier for earlier, later in pairwise(published[1:])}
    table = made.table()
    assert table is not None
    assert pauses, published
    assert min(pauses) > settings.publish_interval
    assert max(pauses) <= MAX_PAUSE_INTERVALS * settings.publish_interval + 5
    status = published_status(settings, 1)
    assert settings.publish_interval < status.pause_seconds <= MAX_PAUSE_INTERVALS * settings.publish_interval
    assert status.vector_bytes_per_row == pytest.approx(
        table.commit_info["vectorBytes"] / table.commit_info["maskedRows"], abs=0.1
    )
    assert "for its deletion vectors (" in status.words
    assert f"{status.vector_bytes_per_row:,.0f} bytes a changed row" in status.words
    publish_to_end(settings, confirm=made.confirm)  # a publish that somebody asks for does not wait
    made.check()


def test_vectors_of_less_than_a_mebibyte_delay_nothing(settings: Settings) -> None:
    made = PublishedMaker(settings)
    made.write(range(100), "old")
    made.flush()
    made.publish()
    made.delete([1, 2])
    made.flush()
    made.publish()
    assert published_status(settings, 1).pause_seconds == 0.0


def test_the_status_says_what_is_published_and_how_far_it_is_behind(settings: Settings) -> None:
    made = PublishedMaker(settings)
    assert published_status(settings, 1).version is None
    made.write(range(5), "x")
    made.flush()
    tick = made.publish()
    status = published_status(settings, 1)
    assert (status.version, status.tick, status.rows, status.lag_seconds) == (1, tick, 5, 0.0)
    made.delete([1])
    made.flush()
    assert published_status(settings, 1).lag_seconds > 0
    made.publish()
    status = published_status(settings, 1)
    assert (status.rows, status.lag_seconds, status.error) == (4, 0.0, "")


def test_a_dropped_collection_is_published_empty_and_a_new_one_of_its_id_anew(settings: Settings) -> None:
    made = PublishedMaker(settings)
    made.write(range(5), "first")
    made.flush()
    made.publish()
    place = {"collection_id": 1, "term": 1}
    for vchannel in made.collection.vchannels:
        made.collection.append(vchannel, builders.drop_collection(vchannel=vchannel, **place))
    made.maker.commit()
    made.flush()
    made.publish()
    assert (table := made.table()) is not None
    assert table.row_count == 0
    assert not table.files
    made.collection.create()
    made.maker.commit()
    made.write([3, 9], "second")
    made.flush()
    made.publish()
    made.check()
    assert (table := made.table()) is not None
    assert table.row_count == 2
