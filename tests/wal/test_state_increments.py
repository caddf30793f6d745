"""Increments of the channel state: applied to their base they give the later state, and hold only what changed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import Malformed, UnsupportedVersion
from millrace.message import builders
from millrace.wal.state import ChannelState
from millrace.wal.state_increments import apply_increment, is_increment, make_increment
from tests.laws.profile import examples
from tests.laws.real import new_state, run
from tests.laws.scribe import LOGS, Scribe
from tests.wal.busy_channel import PRODUCER, BusyChannel, name_of


@examples(80)
@given(LOGS, st.sets(st.integers(1, 24), max_size=8))
def test_law_7_every_earlier_state_and_the_increments_after_it_give_the_state(log: Scribe, cuts: set[int]) -> None:
    states = [new_state(), *(outcome.state for outcome in run(log.written, cuts).outcomes)]
    stored = [state.to_bytes() for state in states]
    steps = [make_increment(one, other) for one, other in pairwise(states)]
    for begin in range(len(states)):
        state = ChannelState.from_bytes(stored[begin])
        for place, step in enumerate(steps[begin:], begin + 1):
            state = apply_increment(state, step)
            assert state.to_bytes() == stored[place]
            assert (
                apply_increment(states[begin], make_increment(states[begin], states[place])).to_bytes() == stored[place]
            )
    assert [state.to_bytes() for state in states] == stored


@examples(40)
@given(LOGS, st.integers(1, 24))
def test_an_increment_depends_on_the_states_alone_and_not_on_what_they_share(log: Scribe, cut: int) -> None:
    states = [outcome.state for outcome in run(log.written, [cut]).outcomes]
    base, state = states[0], states[-1]
    apart = make_increment(ChannelState.from_bytes(base.to_bytes()), ChannelState.from_bytes(state.to_bytes()))
    assert make_increment(base, state) == apart


def test_it_names_only_what_changed() -> None:
    busy = BusyChannel(300, producers=10_000)
    before = busy.append(busy.insert(1, producer_id=PRODUCER, sequence=1), busy.insert(7))
    data = make_increment(before, busy.state)
    assert is_increment(data)
    assert not is_increment(busy.state.to_bytes())
    changed = json.loads(data[1:])["changed"]
    assert sorted(changed) == [name_of(1), name_of(7)]
    assert [each[0] for each in changed[name_of(1)]["producers"]] == [PRODUCER]
    assert len(data) < 1200
    assert "config" not in json.loads(data[1:])
    before = busy.append(builders.drop_collection(vchannel=name_of(5), collection_id=5, term=1))
    assert json.loads(make_increment(before, busy.state)[1:])["changed"] == {name_of(5): None}


def test_an_increment_of_another_build_or_a_damaged_one_is_refused() -> None:
    busy = BusyChannel(2)
    before = busy.append(busy.insert(1))
    data = make_increment(before, busy.state)
    with pytest.raises(UnsupportedVersion):
        apply_increment(before, bytes([data[0] + 1]) + data[1:])
    with pytest.raises(UnsupportedVersion, match="chain version 9"):
        apply_increment(before, data.replace(b'"version":4', b'"version":9'))
    for broken in (data[:-1], data.replace(b'"changed"', b'"changes"'), data.replace(name_of(1).encode(), b"p0_9v0")):
        with pytest.raises(Malformed):
            apply_increment(before, broken)
    with pytest.raises(UnsupportedVersion):
        ChannelState.from_bytes(data)


def test_the_form_is_that_of_the_golden_sample() -> None:
    """A build that writes another form needs another version, and reads this one."""
    golden = json.loads(Path("tests/laws/golden/increment-v1.json").read_text())
    base, state = (ChannelState.from_bytes(b"\x04" + golden[name].encode()) for name in ("base", "state"))
    increment = bytes.fromhex("e1") + golden["increment"].encode()
    assert apply_increment(base, increment).to_bytes() == state.to_bytes()
    assert make_increment(base, state) == increment
