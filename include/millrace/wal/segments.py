"""Segments as the channel state holds them, and the policies that seal them (docs/chain.md, "Segments").

The chain checks a size policy after each insert and the deletes policy after each delete. A time policy names the tick
from which it holds. A message policy seals the growing segments before the message itself takes effect. If several
policies hold, the Flush message names the first one in the order below.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from millrace.message.ids import LOGICAL_BITS
from millrace.message.types import MessageType
from millrace.wal.config import ChainConfig

NEVER: Final = 1 << 62
"""The deadline of a segment or transaction that time does not end."""

_MASK: Final = (1 << 64) - 1


class Segment(NamedTuple):
    """A segment between its CreateSegment and its Flush. `seal_policy` is "" while the segment grows."""

    id: int
    partition_id: int
    rows: int
    bytes: int
    last_insert_tick: int
    deletes_before: int
    txns: frozenset[int]
    seal_policy: str


class SizePolicy(Protocol):
    """Seals a segment by its content. Once it holds, it holds for any larger content too."""

    name: str

    def full(self, segment: Segment, config: ChainConfig) -> bool: ...


class TimePolicy(Protocol):
    """Seals a segment from a tick on, unless the segment receives another insert before."""

    name: str

    def deadline(self, segment: Segment, config: ChainConfig) -> int: ...


def splitmix64(value: int) -> int:
    """Spread a segment id over 64 bits by the finaliser of splitmix64 (the seal jitter)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class CapacityPolicy:
    """The segment is full of bytes.

    The limit is up to 10 % lower, by segment id, so that segments do not end all at once.
    """

    name = "capacity"

    def full(self, segment: Segment, config: ChainConfig) -> bool:
        return segment.bytes * 1000 >= config.segment_bytes * (1000 - splitmix64(segment.id) % 101)


class RowCountPolicy:
    """The segment is full of rows."""

    name = "rows"

    def full(self, segment: Segment, config: ChainConfig) -> bool:
        return segment.rows >= config.segment_rows


class LifetimePolicy:
    """The segment is old, in log time since its creation (its id is that tick)."""

    name = "lifetime"

    def deadline(self, segment: Segment, config: ChainConfig) -> int:
        return segment.id + (config.segment_lifetime_ms << LOGICAL_BITS)


class IdlePolicy:
    """The segment has some bytes and received no insert for a while of log time."""

    name = "idle"

    def deadline(self, segment: Segment, config: ChainConfig) -> int:
        if segment.bytes < config.segment_idle_bytes:
            return NEVER
        return segment.last_insert_tick + (config.segment_idle_ms << LOGICAL_BITS)


class BlockingDeletesPolicy:
    """Too many rows were deleted on the VChannel since its oldest growing segment was created."""

    name = "blocking_deletes"

    def remaining_rows(self, deletes_before: int, deleted: int, config: ChainConfig) -> int:
        """Return how many more rows may be deleted before growing segments are sealed.

        `deletes_before` were deleted before the oldest of them was created, `deleted` so far.
        """
        return config.blocking_delete_rows - (deleted - deletes_before)


COMMAND_POLICIES: Final = {
    MessageType.MANUAL_FLUSH: "manual",
    MessageType.FLUSH_ALL: "flush_all",
}
"""Flushes on request: of a person, or of a host that decides by memory or disk, which the log does not know."""

FENCING_POLICIES: Final = {
    MessageType.SCHEMA_CHANGE: "schema_change",
    MessageType.DROP_PARTITION: "drop_partition",
    MessageType.DROP_COLLECTION: "drop_collection",
    MessageType.IMPORT: "import",
}
"""DDL and imports: growing segments end before the message that changes what they would contain."""

# The order is part of the chain's behaviour: a Flush names the first policy that holds.
SIZE_POLICIES: Final[tuple[SizePolicy, ...]] = (CapacityPolicy(), RowCountPolicy())
TIME_POLICIES: Final[tuple[TimePolicy, ...]] = (LifetimePolicy(), IdlePolicy())
DELETES_POLICY: Final = BlockingDeletesPolicy()
MESSAGE_POLICIES: Final = COMMAND_POLICIES | FENCING_POLICIES


def size_policy(segment: Segment, config: ChainConfig) -> str:
    """Return the name of the policy that seals `segment` by its size, or ""."""
    for policy in SIZE_POLICIES:
        if policy.full(segment, config):
            return policy.name
    return ""


def seal_deadline(segment: Segment, config: ChainConfig) -> int:
    """Return the tick at which time seals `segment`; NEVER while an open transaction has rows in it."""
    if segment.txns:
        return NEVER
    end = NEVER
    for policy in TIME_POLICIES:
        end = min(end, policy.deadline(segment, config))
    return end


def time_policy(segment: Segment, config: ChainConfig, tick: int) -> str:
    """Return the name of the time policy that holds for `segment` at `tick`, which is at or after its deadline."""
    return next(policy.name for policy in TIME_POLICIES if policy.deadline(segment, config) <= tick)
