"""Consumers of a group that divide a collection's VChannels: each row comes to one of them, and at least once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from millrace.base.errors import GroupBusy, InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.consumer import Consumer
from millrace.client.consume.delivery import CHANGES
from millrace.client.consume.positions import FilePositions
from millrace.client.database import Database
from millrace.message.ids import pchannel_of
from tests.client.conftest import ITEMS, item_rows, own_name
from tests.waiting import until


@pytest.fixture
def lanes(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    """A collection of four VChannels on two PChannels."""
    return shop.catalog.create_collection(own_name(request), ITEMS, vchannels=4)


class Reading:
    """A consumer, its thread, and what came to it."""

    def __init__(self, database: Database, lanes: CollectionInfo, group: str, **options: object) -> None:
        self.told: list[tuple[str, frozenset[str]]] = []
        self.came: list[tuple[str, int]] = []
        self.consumer: Consumer = database.consumer(
            lanes.name,
            group=group,
            filters=[CHANGES],
            on_assigned=lambda names: self.told.append(("assigned", names)),
            on_revoked=lambda names: self.told.append(("revoked", names)),
            on_lost=lambda names: self.told.append(("lost", names)),
            **options,  # type: ignore[arg-type]
        )
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop.is_set() and not self.consumer.ended:
            delivery = self.consumer.poll(timeout=0.2)
            if delivery is not None:
                for change in delivery.changes():
                    self.came += [(change.vchannel, key) for key in change.rows.column("id").to_pylist()]
                self.consumer.acknowledge(delivery)

    @property
    def lanes(self) -> frozenset[str]:
        return self.consumer.assignment

    def close(self) -> None:
        self.stop.set()
        self.thread.join(20.0)
        self.consumer.close()


@pytest.fixture
def readings() -> Iterator[list[Reading]]:
    made: list[Reading] = []
    yield made
    for each in made:
        each.close()


def test_members_share_the_lanes_and_hand_them_over_without_loss_or_repetition(
    shop: Database, reader: Database, lanes: CollectionInfo, readings: list[Reading]
) -> None:
    """Deliveries are acknowledged, so a lane that changes hands in order repeats nothing."""
    group, producer = f"share {lanes.id}", shop.new_producer()
    producer.insert(lanes, item_rows(*range(40)))
    readings.append(Reading(shop, lanes, group))
    assert readings[0].lanes == set(lanes.vchannels), "one member has them all at once"
    until(lambda: len(readings[0].came) == 40, "all rows come")
    readings.append(Reading(reader, lanes, group))
    until(lambda: len(readings[1].lanes) == 2 and len(readings[0].lanes) == 2, "the second has half")
    assert not readings[0].lanes & readings[1].lanes
    assert readings[0].told[1] == ("revoked", readings[1].lanes)
    came = frozenset[str]
    until(
        lambda: came().union(*(lanes for what, lanes in readings[1].told if what == "assigned")) == readings[1].lanes,
        "its next poll tells of them",
    )
    producer.insert(lanes, item_rows(*range(40, 80)))
    until(lambda: len(readings[0].came) + len(readings[1].came) == 80, "all rows come to one of them")
    for each in readings:
        assert {name for name, key in each.came if key >= 40} <= each.lanes
    gone = readings.pop(0)
    gone.close()
    until(lambda: readings[0].lanes == set(lanes.vchannels), "who is left has all")
    producer.insert(lanes, item_rows(*range(80, 100)))
    until(lambda: len(gone.came) + len(readings[0].came) >= 100, "nothing is lost")
    counts = Counter(key for each in (gone, *readings) for _, key in each.came)
    assert counts == Counter(range(100)), "and nothing came twice"


def test_more_members_than_lanes_leave_some_idle_which_say_so(
    shop: Database, lanes: CollectionInfo, readings: list[Reading]
) -> None:
    group = f"idle {lanes.id}"
    readings += [Reading(shop, lanes, group) for _ in range(5)]
    until(lambda: sorted(len(each.lanes) for each in readings) == [0, 1, 1, 1, 1], "each has one lane")
    idle = next(each for each in readings if not each.lanes)
    until(lambda: idle.consumer.idle_reason == "5 members read 4 lanes: this one is in reserve", "it knows why")
    (found,) = [each for each in shop.consumer_groups() if each["group"] == group]
    assert sorted(len(member["lanes"]) for member in found["members"]) == [0, 1, 1, 1, 1]
    assert [member["reason"] for member in found["members"] if not member["lanes"]] == [idle.consumer.idle_reason]
    with pytest.raises(GroupBusy, match="close it first"):
        shop.reset_group(group, to="earliest")


def test_members_end_once_the_whole_group_has_reached_the_end(
    shop: Database, lanes: CollectionInfo, readings: list[Reading]
) -> None:
    group = f"end {lanes.id}"
    shop.new_producer().insert(lanes, item_rows(*range(40)))
    end = shop.current_tick(lanes.pchannels)
    readings += [Reading(shop, lanes, group, until=end, commit_interval=0.7) for _ in range(3)]
    for each in readings:
        each.thread.join(30.0)
        assert each.consumer.ended, "nobody waits for what another has done and not committed"
    assert {key for each in readings for _, key in each.came} == set(range(40))


def test_a_member_that_polls_no_more_gives_up_its_lanes_with_what_it_acknowledged(
    shop: Database, lanes: CollectionInfo, readings: list[Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.client.consume.consumer.SILENT_SECONDS", 0.5)
    group = f"silent {lanes.id}"
    shop.new_producer().insert(lanes, item_rows(*range(20)))
    with shop.consumer(lanes.name, group=group, filters=[CHANGES]) as stuck:
        assert stuck.poll(timeout=10.0) is not None  # and never acknowledged
        readings.append(Reading(shop, lanes, group))
        until(lambda: len(readings[0].lanes) == 2, "the other has its part")
        assert len(stuck.assignment) == 2
    until(lambda: {key for _, key in readings[0].came} == set(range(20)), "and all rows in the end")


def test_a_reset_group_starts_there(shop: Database, reader: Database, lanes: CollectionInfo) -> None:
    group, producer = f"reset {lanes.id}", shop.new_producer()
    producer.insert(lanes, item_rows(*range(10)))
    between = shop.current_tick(lanes.pchannels)
    producer.insert(lanes, item_rows(*range(10, 15)))

    def read(database: Database) -> list[int]:
        end = shop.current_tick(lanes.pchannels)
        with database.consumer(lanes.name, group=group, filters=[CHANGES], until=end) as consumer:
            found = []
            for delivery in consumer:
                found += [key for each in delivery.changes() for key in each.rows.column("id").to_pylist()]
                consumer.acknowledge(delivery)
        return sorted(found)

    assert read(shop) == list(range(15))
    assert read(reader) == []
    reader.reset_group(group, to="earliest")
    assert read(reader) == list(range(15))
    shop.reset_group(group, to=between)
    assert read(shop) == list(range(10, 15))
    shop.reset_group(group, to="earliest", dry_run=True)
    assert read(shop) == []
    producer.insert(lanes, item_rows(20))
    assert set(shop.reset_group(group, to="latest", collection=lanes.name)) == set(lanes.vchannels)
    assert read(reader) == []
    with pytest.raises(InvalidArgument, match="in the future"):
        shop.reset_group(group, to=1 << 62)
    with pytest.raises(InvalidArgument, match="name a collection"):
        shop.reset_group("nobody", to="latest")


def test_positions_of_earlier_builds_count_until_a_lane_has_its_own(shop: Database, lanes: CollectionInfo) -> None:
    group, producer = f"old {lanes.id}", shop.new_producer()
    producer.insert(lanes, item_rows(*range(10)))
    old = FilePositions(shop.settings.data_dir / "coord")
    old.move(group, {name: shop.current_tick([name]) for name in lanes.pchannels})
    producer.insert(lanes, item_rows(*range(10, 20)))
    end = shop.current_tick(lanes.pchannels)
    with shop.consumer(lanes.name, group=group, filters=[CHANGES], until=end) as consumer:
        found = []
        for delivery in consumer:
            found += [key for each in delivery.changes() for key in each.rows.column("id").to_pylist()]
            consumer.acknowledge(delivery)
    assert sorted(found) == list(range(10, 20))
    assert {*lanes.vchannels, *map(pchannel_of, lanes.vchannels)} == set(old.groups()[group])
    old.close()
    (told,) = [each for each in shop.consumer_groups() if each["group"] == group]
    assert set(told["positions"]) == set(lanes.vchannels)
