"""Which policy seals a segment, and in what order they are asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.message.ids import LOGICAL_BITS
from millrace.wal import segments
from millrace.wal.chain import build_interceptors
from millrace.wal.config import ChainConfig
from millrace.wal.interceptors.interceptor import DeferredEmitter, Emitter, Stamper, TimerSource
from millrace.wal.segments import NEVER, Segment

CONFIG = ChainConfig(
    segment_bytes=1000, segment_rows=10, segment_lifetime_ms=5000, segment_idle_bytes=100, segment_idle_ms=1000
)
NEW = Segment(7 << LOGICAL_BITS, 1, 0, 0, 7 << LOGICAL_BITS, 0, frozenset(), "")


def test_the_policies_are_asked_in_the_order_of_the_specification() -> None:
    text = (Path(__file__).parents[2] / "docs" / "chain.md").read_text()
    said = re.search(r"\*\*Policies:\*\* ([a-z_,\s]+)\.", text)
    assert said is not None
    names = [each.name for each in segments.SIZE_POLICIES] + [each.name for each in segments.TIME_POLICIES]
    assert re.split(r",\s+", said[1]) == [*names, segments.DELETES_POLICY.name, *segments.MESSAGE_POLICIES.values()]


@pytest.mark.parametrize(
    ("size", "rows", "policy"),
    [(0, 9, ""), (0, 10, "rows"), (1000, 0, "capacity"), (1000, 10, "capacity"), (899, 9, "")],
)
def test_what_is_full_by_bytes_and_rows_says_capacity(size: int, rows: int, policy: str) -> None:
    assert segments.size_policy(NEW._replace(bytes=size, rows=rows), CONFIG) == policy


def test_a_segment_of_few_bytes_is_never_idle_and_one_with_an_open_transaction_has_no_deadline() -> None:
    lives, idles = (7 + 5000) << LOGICAL_BITS, (7 + 1000) << LOGICAL_BITS
    assert segments.seal_deadline(NEW._replace(bytes=99), CONFIG) == lives
    assert segments.seal_deadline(NEW._replace(bytes=100), CONFIG) == idles
    assert segments.seal_deadline(NEW._replace(bytes=100, txns=frozenset({1})), CONFIG) == NEVER


def test_what_is_idle_and_old_says_lifetime() -> None:
    segment = NEW._replace(bytes=100)
    at = segments.seal_deadline(segment, CONFIG)
    assert segments.time_policy(segment, CONFIG, at) == "idle"
    assert segments.time_policy(segment, CONFIG, at + (4000 << LOGICAL_BITS)) == "lifetime"


def test_the_chain_finds_each_links_abilities_by_their_protocols() -> None:
    able = {
        ability.__name__: [link.name for link in build_interceptors() if isinstance(link, ability)]
        for ability in (TimerSource, Emitter, Stamper, DeferredEmitter)
    }
    assert able == {
        "TimerSource": ["txn", "shard"],
        "Emitter": ["lock", "shard"],
        "Stamper": ["timetick", "shard"],
        "DeferredEmitter": ["shard"],
    }
