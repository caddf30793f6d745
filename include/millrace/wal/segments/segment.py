"""A segment of a VChannel as the channel state holds it, from its CreateSegment to its Flush."""

from __future__ import annotations

from typing import Final, NamedTuple

NEVER: Final = 1 << 62
"""The deadline of what no time ends."""


class Segment(NamedTuple):
    """A segment that is not flushed yet. `sealed` names the policy once it takes no more inserts; "" while it grows."""

    id: int
    partition_id: int
    rows: int
    bytes: int
    last_insert_tick: int
    deletes_before: int
    txns: frozenset[int]
    seal_policy: str
