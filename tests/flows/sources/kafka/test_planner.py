"""How far a reader of topics goes: within limits, the same share of each lane, and never silently past a loss."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import LogRegressed, PositionTruncated
from millrace.flows.sources.kafka.planner import LaneRange, Place, Planner
from millrace.flows.sources.kafka.topics import Topics
from millrace.flows.sources.source import Ends


class Fake:
    """Topics whose ends a test sets."""

    def __init__(self, *ends: tuple[int, int], id_of_topic: str = "one") -> None:
        self.found = {f"a-b-{number}": Ends(*each) for number, each in enumerate(ends)}
        self.id = id_of_topic

    def partitions(self) -> list[tuple[str, int]]:
        return [("a-b", number) for number in range(len(self.found))]

    def ends(self) -> dict[str, Ends]:
        return self.found

    def ids(self) -> dict[str, str]:
        return {"a-b": self.id} if self.id else {}

    def at(self, milliseconds: int) -> dict[str, int]:
        return {lane: min(milliseconds, ends.high) for lane, ends in self.found.items()}


def planner(fake: Fake, sizes: Any = None) -> Planner:
    return Planner(cast(Topics, fake), sizes)


def test_a_reader_begins_at_an_end_a_moment_or_given_offsets() -> None:
    plan = planner(Fake((3, 10), (0, 5)))
    assert plan.begin().offsets == {"a-b-0": 3, "a-b-1": 0}
    assert plan.begin("latest").offsets == {"a-b-0": 10, "a-b-1": 5}
    assert plan.begin(7).offsets == {"a-b-0": 7, "a-b-1": 5}
    assert plan.begin(offsets={"a-b-1": 4, "gone-0": 9}).offsets == {"a-b-0": 3, "a-b-1": 4}


def test_a_step_reads_all_there_is_and_then_nothing() -> None:
    plan = planner(Fake((0, 10), (0, 5)))
    first = plan.begin()
    after = plan.next(first)
    assert plan.ranges(first, after) == [LaneRange("a-b", 0, 0, 10), LaneRange("a-b", 1, 0, 5)]
    assert plan.next(after) is after
    assert Place.from_json(after.to_json()) == after
    assert not after.begins
    assert after.start().offsets == first.offsets


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=6), st.integers(1, 3_000), st.integers(1, 1 << 20))
def test_limited_steps_reach_every_end_and_lanes_stay_together(highs: list[int], records: int, size: int) -> None:
    fake = Fake(*((0, high) for high in highs))
    plan = planner(fake, lambda few: 1_000.0)
    place, steps = plan.begin(), 0
    while (after := plan.next(place, max_records=records, max_bytes=size)) is not place:
        taken = [each.end - each.start for each in plan.ranges(place, after)]
        assert sum(taken) <= records + len(highs)
        assert sum(taken) * 1_000 <= size + 1_000 * max(100, len(highs))
        left = [1 - after.offsets[f"a-b-{number}"] / high for number, high in enumerate(highs) if high > 1_000]
        assert max(left, default=0) - min(left, default=0) <= 0.01 * (steps + 1)
        place, steps = after, steps + 1
    assert place.offsets == {f"a-b-{number}": high for number, high in enumerate(highs)}


def test_sizes_are_asked_for_only_if_they_can_matter() -> None:
    fake, asked = Fake((0, 1_000)), []

    def size(few: LaneRange) -> float:
        asked.append(few)
        return 100.0

    plan = planner(fake, size)
    place = plan.next(plan.begin(), max_bytes=1 << 30)
    for high in range(2_000, 6_000, 1_000):
        fake.found["a-b-0"] = Ends(0, high)
        place = plan.next(place, max_bytes=1 << 30)
    assert asked == [LaneRange("a-b", 0, 0, 100)]
    fake.found["a-b-0"] = Ends(0, 100_000)
    assert plan.next(place, max_bytes=1 << 20).offsets["a-b-0"] < 20_000
    assert len(asked) == 2


def test_a_target_is_the_end_and_a_new_partition_begins_at_its_beginning() -> None:
    fake = Fake((0, 10))
    plan = planner(fake)
    first = plan.begin()
    after = plan.next(first, target={"a-b-0": 4})
    assert after.offsets == {"a-b-0": 4}
    fake.found["a-b-1"] = Ends(2, 6)
    more = plan.next(after)
    assert plan.ranges(after, more) == [LaneRange("a-b", 0, 4, 10), LaneRange("a-b", 1, 2, 6)]


def test_what_is_lost_is_said_and_never_skipped() -> None:
    fake = Fake((0, 10))
    plan = planner(fake)
    place = plan.next(plan.begin(), max_records=5)
    fake.found["a-b-0"] = Ends(7, 10)
    with pytest.raises(PositionTruncated, match=r"a-b-0: offset 5 was removed by retention; the earliest is 7"):
        plan.next(place)
    fake.found["a-b-0"] = Ends(0, 3)
    with pytest.raises(LogRegressed, match="offset 5 is beyond the end 3"):
        plan.next(place)
    fake.found["a-b-0"], fake.id = Ends(0, 30), "two"
    with pytest.raises(LogRegressed, match=r"the topic was created again \(its id was one, now two\)"):
        plan.next(place)
    fake.id = ""  # the brokers do not tell: no reason to stop
    assert plan.next(place).ids == {"a-b": "one"}
    fake.found = {}
    with pytest.raises(LogRegressed, match="the partition no longer exists"):
        plan.next(place)
