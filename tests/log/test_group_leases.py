"""Leases of a log's groups: never two holders of a channel at one time, whatever they do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import GroupBusy, InvalidArgument
from millrace.log import group_leases
from millrace.log.group_leases import GroupLeases

STEPS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["x", "y"]), st.floats(0, 5), st.floats(0, 6)),
    max_size=40,
)


@given(STEPS)
def test_a_channel_has_one_holder_until_its_lease_ends_or_is_given_back(
    steps: list[tuple[str, str, float, float]],
) -> None:
    now = 0.0
    leases = GroupLeases(clock=lambda: now)
    model: dict[str, tuple[str, float]] = {}
    for holder, channel, seconds, later in steps:
        now += later
        owner, until = model.get(channel, ("", 0.0))
        free = owner in ("", holder) or until <= now
        try:
            leases.hold("g", channel, holder, seconds=seconds)
        except GroupBusy:
            assert not free
            assert seconds
            continue
        if seconds:
            assert free
            model[channel] = (holder, now + seconds)
        elif free:
            model.pop(channel, None)


def test_groups_hold_the_same_channel_side_by_side() -> None:
    leases = GroupLeases()
    leases.hold("g", "x", "a", seconds=60)
    leases.hold("h", "x", "b", seconds=60)
    with pytest.raises(GroupBusy, match="'x'") as caught:
        leases.hold("g", "x", "b", seconds=60)
    leases.hold("g", "x", "a", seconds=60)
    with pytest.raises(GroupBusy) as again:
        leases.hold("g", "x", "b", seconds=60)
    assert again.value.renewals == caught.value.renewals + 1


def test_the_leases_are_bounded_and_those_that_ended_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_leases, "MAX_LEASES", 3)
    now = 0.0
    leases = GroupLeases(clock=lambda: now)
    for number in range(3):
        leases.hold("g", str(number), "a", seconds=number + 1)
    with pytest.raises(GroupBusy, match="the limit"):
        leases.hold("g", "more", "a", seconds=1)
    leases.hold("g", "2", "a", seconds=9)
    now = 2.5
    leases.hold("g", "more", "a", seconds=1)
    with pytest.raises(GroupBusy):
        leases.hold("g", "2", "b", seconds=1)


@pytest.mark.parametrize(
    ("holder", "seconds"), [("", 1.0), ("x" * 256, 1.0), ("a", -1.0), ("a", 601.0), ("a", float("nan"))]
)
def test_what_is_no_lease_is_refused(holder: str, seconds: float) -> None:
    with pytest.raises(InvalidArgument):
        GroupLeases().hold("g", "x", holder, seconds=seconds)
