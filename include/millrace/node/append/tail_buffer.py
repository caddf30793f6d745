"""The write-ahead buffer: the newest decided rows of one PChannel, for readers that tail it.

It holds about the last `max_bytes`, and evicts rows older than `max_age` seconds except for the last `keep_bytes`. A
reader that asks for evicted rows gets :class:`Evicted` and reads them from the ``wal`` table. The confirmed tick says
how far the buffer has seen the log: a reader that took everything up to it has seen every message with a tick at or
below it, including ticks that became no row.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import MillraceError
from millrace.rpc.tail import Evicted, TailBatch

CHUNK_OVERHEAD = 16 << 10
"""Bytes of a chunk in addition to its payloads: two dozen Arrow columns matter if a chunk is one message."""

ROW_BYTES = 160
"""Bytes of a message in addition to its payload."""


@dataclass(frozen=True, slots=True)
class TailLimits:
    """Limits of a PChannel's buffer in bytes (payloads, and ROW_BYTES per message) and seconds."""

    max_bytes: int = 64 << 20
    keep_bytes: int = 8 << 20
    max_age: float = 30.0


@dataclass(frozen=True)
class _Chunk:
    after: int  # everything in (after, through] is in `messages`
    through: int
    build: Callable[[], pa.RecordBatch]
    bytes: int
    came: float

    @cached_property
    def messages(self) -> pa.RecordBatch:
        return self.build()


class TailBuffer:
    """The buffer of one PChannel. One thread publishes; any number tail."""

    def __init__(
        self, *, start_tick: int, limits: TailLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or TailLimits()
        self._clock = clock
        self._changed = threading.Condition()
        self._chunks: deque[_Chunk] = deque()
        self._bytes = 0
        self._earliest = start_tick
        self._confirmed = start_tick
        self._failure: MillraceError | None = None
        self._readers = 0

    @property
    def confirmed_tick(self) -> int:
        """The tick up to which everything was published."""
        return self._confirmed

    @property
    def bytes(self) -> int:
        """Size of the buffer, by its own count."""
        return self._bytes

    def publish(self, build: Callable[[], pa.RecordBatch], *, rows: int, confirmed_tick: int, bytes: int) -> None:
        """Add the next `rows` messages with `bytes` of payload. Later messages have ticks above `confirmed_tick`.

        `build` makes their batch, once, if anybody reads it.
        """
        now = self._clock()
        with self._changed:
            if rows:
                size = bytes + ROW_BYTES * rows + CHUNK_OVERHEAD
                self._chunks.append(_Chunk(self._confirmed, confirmed_tick, build, size, now))
                self._bytes += size
            self._confirmed = max(self._confirmed, confirmed_tick)
            self._evict(now)
            if self._readers:
                self._changed.notify_all()

    def confirm(self, tick: int) -> None:
        """Record that no message with a tick at or below `tick` will be published any more."""
        with self._changed:
            if tick > self._confirmed:
                self._confirmed = tick
                if self._readers:
                    self._changed.notify_all()

    def fail(self, error: MillraceError) -> None:
        """End the buffer. Readers that have taken everything get `error`."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def tail(self, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> TailBatch | Evicted:
        """Return the messages after `after_tick`, about `max_bytes` at most. Waits up to `timeout` seconds if there are
        none.

        A confirmed tick at or below `after_tick` means that the wait timed out. Raises the error that stopped the
        PChannel.
        """
        deadline = Deadline.after(timeout)
        with self._changed:
            self._readers += 1
            try:
                while self._confirmed <= after_tick:
                    if self._failure is not None:
                        raise copy(self._failure)
                    if deadline.expired() or not deadline.wait(self._changed):
                        break
                if after_tick < self._earliest:
                    return Evicted(self._earliest)
                if self._confirmed <= after_tick:
                    return TailBatch([], self._confirmed)
                chunks, confirmed = self._chunks_after(after_tick, max_bytes)
            finally:
                self._readers -= 1
        if chunks and chunks[0].after < after_tick:
            first = chunks[0].messages
            ticks = first.column("time_tick").to_numpy()
            later = first.slice(bisect_right(ticks, after_tick))
            rest = [chunk.messages for chunk in chunks[1:]]
            return TailBatch([later, *rest] if later.num_rows else rest, confirmed)
        return TailBatch([chunk.messages for chunk in chunks], confirmed)

    def _chunks_after(self, after_tick: int, max_bytes: int) -> tuple[list[_Chunk], int]:
        """Return the chunks that reach beyond `after_tick`, and the tick that they complete."""
        found: list[_Chunk] = []
        size = 0
        start = bisect_right(self._chunks, after_tick, key=lambda chunk: chunk.through)
        for place in range(start, len(self._chunks)):
            chunk = self._chunks[place]
            if found and size + chunk.bytes > max_bytes:
                return found, found[-1].through
            found.append(chunk)
            size += chunk.bytes
        return found, self._confirmed

    def _evict(self, now: float) -> None:
        limits = self._limits
        while self._chunks:
            oldest = self._chunks[0]
            aged = now - oldest.came > limits.max_age and self._bytes - oldest.bytes >= limits.keep_bytes
            if self._bytes <= limits.max_bytes and not aged:
                return
            if len(self._chunks) == 1 and not aged:
                return  # keep the newest whatever its size: a reader that keeps up never has to go back
            self._chunks.popleft()
            self._bytes -= oldest.bytes
            self._earliest = oldest.through
