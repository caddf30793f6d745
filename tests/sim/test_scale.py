"""Each of many PChannels moves: nothing is lost, and a move costs the same however many there are."""

from __future__ import annotations

import pytest

from tests.sim.scale import NODES, VCHANNELS, Outcome, move_each


def _assert_flat(few: Outcome, many: Outcome) -> None:
    assert many.vchannels == VCHANNELS * many.pchannels
    for outcome in (few, many):
        # Each node is drained once, so a role moves once, or again with a later node.
        assert 2 * outcome.pchannels <= outcome.moves <= 4 * outcome.pchannels
        assert outcome.rows >= outcome.seconds, "clients went on"
        assert outcome.broadcasts >= 5
    cost, before = many.per_move(), few.per_move()
    assert cost.keys() == before.keys() == {"channels the policy looked at", "entries", "requests", "written"}
    for kind, count in cost.items():
        assert count <= 1.3 * before[kind] + 1, (kind, before, cost)
    assert many.work["channels the policy looked at"] <= 4 * NODES * many.pchannels, "a few looks for each node"


def test_a_move_among_a_thousand_vchannels_costs_as_much_as_among_four_hundred() -> None:
    _assert_flat(move_each(40), move_each(100))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_of_a_thousand_pchannels_with_ten_thousand_vchannels_moves() -> None:
    _assert_flat(move_each(100), move_each(1_000))
