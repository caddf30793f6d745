"""A large cluster that loses nodes moves what they had, and nothing else."""

from __future__ import annotations

from bench import coord_scale


def test_what_lost_nodes_had_is_all_that_moves_and_it_is_even_afterwards() -> None:
    found = coord_scale.lose_nodes(pchannels=1_000, nodes=100)
    assert found["moves"] == found["moves_at_least"] == 100
    assert found["owned"] == {"least": 11, "most": 12, "by": 90}
    assert found["rounds"] == 2, "the second finds nothing to do"


def test_a_round_of_balance_among_channels_that_are_all_different_looks_at_few_of_them() -> None:
    found = coord_scale.balance_rounds(pchannels=2_000, nodes=40, collections=200, rounds=1)
    assert found["moves"] >= 2
    assert (
        found["round_s"]["max"] < 20
    )  # 2 s on a machine that others use; every exchange tried by itself takes minutes
