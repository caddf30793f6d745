"""The seal policies in the order in which they are asked: where several hold, the first one's name stands in the Flush.

A policy of size is asked after each insert, one of time for the tick at which it holds, blocking deletes after each delete; the
others hold by the message that fences or commands. docs/chain.md, "Segments".
"""

from __future__ import annotations

from typing import Final, Protocol

from millrace.wal.config import ChainConfig
from millrace.wal.segments.policies.blocking_deletes import BlockingDeletes
from millrace.wal.segments.policies.capacity import Capacity
from millrace.wal.segments.policies.command import COMMANDED
from millrace.wal.segments.policies.fenced import FENCED
from millrace.wal.segments.policies.idle import Idle
from millrace.wal.segments.policies.lifetime import Lifetime
from millrace.wal.segments.policies.rows import Rows
from millrace.wal.segments.segment import NEVER, Segment


class BySize(Protocol):
    """Holds by what is in the segment; once it holds, it holds with more in it."""

    name: str

    def full(self, segment: Segment, config: ChainConfig) -> bool: ...


class ByTime(Protocol):
    """Holds from a tick on, as long as nothing else comes into the segment."""

    name: str

    def deadline(self, segment: Segment, config: ChainConfig) -> int: ...


BY_SIZE: Final[tuple[BySize, ...]] = (Capacity(), Rows())
BY_TIME: Final[tuple[ByTime, ...]] = (Lifetime(), Idle())
BY_DELETES: Final = BlockingDeletes()
BY_MESSAGE: Final = COMMANDED | FENCED


def full(segment: Segment, config: ChainConfig) -> str:
    """The policy by which its size seals `segment`, or ""."""
    for policy in BY_SIZE:
        if policy.full(segment, config):
            return policy.name
    return ""


def deadline(segment: Segment, config: ChainConfig) -> int:
    """The tick at which time seals `segment`; NEVER while an open transaction has rows in it."""
    if segment.txns:
        return NEVER
    end = NEVER
    for policy in BY_TIME:
        end = min(end, policy.deadline(segment, config))
    return end


def timed_out(segment: Segment, config: ChainConfig, tick: int) -> str:
    """The policy of time that holds for `segment` at `tick`, which is its deadline or later."""
    return next(policy.name for policy in BY_TIME if policy.deadline(segment, config) <= tick)
