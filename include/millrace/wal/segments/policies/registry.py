"""The seal policies in the order in which they are asked: where several hold, the first one's name stands in the Flush.

A policy of size is asked after each insert, one of time for the tick at which it holds, blocking deletes after each delete; the
others hold by the message that fences or commands. docs/chain.md, "Segments".
"""

from __future__ import annotations

from typing import Final, Protocol

from millrace.wal.config import ChainConfig
from millrace.wal.segments.policies.blocking_deletes import BlockingDeletesPolicy
from millrace.wal.segments.policies.capacity import CapacityPolicy
from millrace.wal.segments.policies.command import COMMAND_POLICIES
from millrace.wal.segments.policies.fenced import FENCING_POLICIES
from millrace.wal.segments.policies.idle import IdlePolicy
from millrace.wal.segments.policies.lifetime import LifetimePolicy
from millrace.wal.segments.policies.rows import RowCountPolicy
from millrace.wal.segments.segment import NEVER, Segment


class SizePolicy(Protocol):
    """Holds by what is in the segment; once it holds, it holds with more in it."""

    name: str

    def full(self, segment: Segment, config: ChainConfig) -> bool: ...


class TimePolicy(Protocol):
    """Holds from a tick on, as long as nothing else comes into the segment."""

    name: str

    def deadline(self, segment: Segment, config: ChainConfig) -> int: ...


SIZE_POLICIES: Final[tuple[SizePolicy, ...]] = (CapacityPolicy(), RowCountPolicy())
TIME_POLICIES: Final[tuple[TimePolicy, ...]] = (LifetimePolicy(), IdlePolicy())
DELETES_POLICY: Final = BlockingDeletesPolicy()
MESSAGE_POLICIES: Final = COMMAND_POLICIES | FENCING_POLICIES


def size_policy(segment: Segment, config: ChainConfig) -> str:
    """The policy by which its size seals `segment`, or ""."""
    for policy in SIZE_POLICIES:
        if policy.full(segment, config):
            return policy.name
    return ""


def seal_deadline(segment: Segment, config: ChainConfig) -> int:
    """The tick at which time seals `segment`; NEVER while an open transaction has rows in it."""
    if segment.txns:
        return NEVER
    end = NEVER
    for policy in TIME_POLICIES:
        end = min(end, policy.deadline(segment, config))
    return end


def time_policy(segment: Segment, config: ChainConfig, tick: int) -> str:
    """The policy of time that holds for `segment` at `tick`, which is its deadline or later."""
    return next(policy.name for policy in TIME_POLICIES if policy.deadline(segment, config) <= tick)
