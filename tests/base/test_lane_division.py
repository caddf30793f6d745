"""Lanes are divided evenly, and few of them move."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millrace.base.lane_division import divide, shares

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=3), unique=True, max_size=8)


@given(lanes=NAMES, names=NAMES, chance=st.randoms(use_true_random=False))
def test_each_lane_is_one_members_and_each_member_has_as_many_or_one_more(
    lanes: list[str], names: list[str], chance: object
) -> None:
    held = {lane: chance.choice([*names, "gone"]) for lane in lanes}  # type: ignore[attr-defined]
    for owners in (None, held):
        found = shares(lanes, names, owners)
        assert found == shares(lanes[::-1], names[::-1], owners), "whoever computes it"
        assert set(found) == (set(lanes) if names else set())
        sizes = Counter(found.values())
        assert not names or max(sizes[name] for name in names) - min(sizes[name] for name in names) <= 1


def test_most_lanes_stay_where_they_are_when_a_member_goes_though_nobody_knows_the_owners() -> None:
    lanes, names = [f"c-{place}" for place in range(64)], [f"w{number}" for number in range(8)]
    before, after = shares(lanes, names), shares(lanes, names[:-1])
    moved = [lane for lane in lanes if before[lane] != after[lane] and before[lane] != names[-1]]
    assert len(moved) < 20, "8 had to"


@given(lanes=NAMES, names=NAMES.filter(bool))
def test_a_member_that_joins_moves_its_share_and_one_that_leaves_moves_only_its_own(
    lanes: list[str], names: list[str]
) -> None:
    before = shares(lanes, names)
    joined = shares(lanes, [*names, "new"], before)
    moved = {lane for lane in lanes if joined[lane] != before[lane]}
    assert len(moved) == len(lanes) // (len(names) + 1)
    assert all(joined[lane] == "new" for lane in moved)
    left = shares(lanes, names, joined)
    assert {lane for lane in lanes if left[lane] != joined[lane]} == moved


def test_members_divide_only_what_they_read() -> None:
    wanted = {"a": ["x0", "x1"], "b": ["x0", "x1", "y0"], "c": ["y0"]}
    found = divide(wanted, {"x0": "b", "y0": "c"})
    assert found == {"x0": "b", "x1": "a", "y0": "c"}
    assert divide({}, {"x0": "b"}) == {}
