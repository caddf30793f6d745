"""What a node says of how its PChannels go, and what the coordinator makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millrace.base.errors import NodeUnreachable
from millrace.coord.balancer.balancer import ChannelStats
from millrace.coord.process import ClusterStats
from millrace.node.cluster.owned_channels import RATE_WINDOW_SECONDS, ChannelRate, RateMeter


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def tick(seconds: float) -> int:
    return int(seconds * 1000) << 18


def test_rates_are_of_the_last_seconds_and_a_channel_is_behind_while_it_works_or_commits_late() -> None:
    clock = Clock()
    rates = RateMeter(monotonic=clock, wall=clock)
    assert rates.of("p", running=False) == rates.of("p", running=True) == ChannelRate()
    rates.record_commit("p", rows=100, bytes=5_000, tick=tick(999.5))
    assert rates.of("p", running=False) == ChannelRate(10.0, 500.0, 0.5)
    clock.now += 4
    assert rates.of("p", running=False).lag_seconds == 0.5, "nothing is left to do"
    assert rates.of("p", running=True).lag_seconds == 4.5, "it is at work since then"
    rates.record_commit("p", rows=50, bytes=100, tick=tick(1_004.0))
    assert rates.of("p", running=False) == ChannelRate(15.0, 510.0, 0.0)
    clock.now += RATE_WINDOW_SECONDS - 3
    assert rates.of("p", running=False) == ChannelRate(5.0, 10.0, 0.0)
    clock.now += 4
    assert rates.of("p", running=False) == ChannelRate()
    rates.record_commit("p", rows=1, bytes=1, tick=tick(1_000.0))
    rates.forget("p")
    assert rates.of("p", running=True) == ChannelRate()


def test_commits_of_a_channel_that_are_kept_are_bounded() -> None:
    clock = Clock()
    rates = RateMeter(monotonic=clock, wall=clock)
    for _ in range(5_000):
        rates.record_commit("p", rows=1, bytes=1, tick=tick(1_000.0))
    assert rates.of("p", running=False).rows_per_second == pytest.approx(1_000 / RATE_WINDOW_SECONDS)


class Nodes:
    """The protocol Status."""

    def __init__(self, said: dict[str, dict[str, Any]]) -> None:
        self.said = said

    def status(self, address: str) -> dict[str, Any]:
        if address not in self.said:
            raise NodeUnreachable(address)
        return self.said[address]


def together(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def test_the_balancer_sees_what_catalog_and_nodes_say_and_nothing_of_a_node_that_does_not_answer() -> None:
    catalog = {"p": ChannelStats(vchannels=2, collections=frozenset({1})), "q": ChannelStats(vchannels=1)}
    nodes = Nodes({"a": {"rates": {"p": {"rows_per_second": 5.0, "bytes_per_second": 7.0, "lag_seconds": 3.0}}}})
    stats = ClusterStats(lambda: catalog, nodes)
    assert stats() == catalog
    stats.poll(["a", "b"], together)
    assert stats()["p"] == ChannelStats(2, frozenset({1}), 5.0, 7.0, 3.0)
    assert stats()["q"] == catalog["q"]
    nodes.said.clear()
    stats.poll(["a", "b"], together)
    assert stats() == catalog
