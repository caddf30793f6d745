"""Watch of assignments for many clients with one poller of the meta store.

Each client gets the changes after its version.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Final

from fastapi.concurrency import run_in_threadpool

from millrace.base.errors import InvalidArgument, MillraceError, RevisionCompacted
from millrace.rpc.assignments import AssignmentSource, AssignmentUpdate

POLL_SECONDS: Final = 0.1
KEEPALIVE_SECONDS: Final = 10.0
"""Interval of keepalives: an idle client gets the current version, from which it can continue."""
MAX_UPDATES: Final = 1_000


class AssignmentWatch:
    """Polls the source that `source` returns while there are followers. For one event loop."""

    def __init__(self, source: Callable[[], AssignmentSource]) -> None:
        self._source = source
        self._updates: deque[AssignmentUpdate] = deque()
        self._version = self._floor = -1
        """The version up to which the source was polled, and the one after which `_updates` is complete."""
        self._changed = asyncio.Event()
        self._followers = 0
        self._looking: asyncio.Task[None] | None = None

    async def first(self, after: int | None) -> AssignmentUpdate:
        """Return a follower's first update: the changes after `after`, or everything if they are unknown."""

        def ask() -> AssignmentUpdate:
            source = self._source()
            if after is not None:
                try:
                    return source.since(after)
                except (RevisionCompacted, InvalidArgument):
                    pass  # too old, or of another store
            return source.all()

        return await run_in_threadpool(ask)

    async def follow(self, first: AssignmentUpdate) -> AsyncIterator[AssignmentUpdate]:
        """Yield `first`, then later changes, and now and then only a version. Endless."""
        version = first.version
        yield first
        self._followers += 1
        if self._looking is None:
            self._version = self._floor = version
            self._changed = asyncio.Event()
            self._updates.clear()
            self._looking = asyncio.create_task(self._look())
        try:
            while True:
                changed = self._changed
                if version < self._floor:  # it continues from an old version, or was too slow
                    update = await self.first(version)
                    version = update.version
                    yield update
                    continue
                for update in [each for each in self._updates if each.version > version]:
                    version = update.version
                    yield update
                try:
                    await asyncio.wait_for(changed.wait(), KEEPALIVE_SECONDS)
                except TimeoutError:
                    version = max(version, self._version)
                    yield AssignmentUpdate(version, False, ())
        finally:
            self._followers -= 1
            if not self._followers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _look(self) -> None:
        while True:
            try:
                update = await self.first(self._version)
            except MillraceError:
                await asyncio.sleep(POLL_SECONDS)  # the store is unreachable: nothing changes
                continue
            self._version = update.version
            if update.whole or update.assignments:
                self._updates.append(update)
                if len(self._updates) > MAX_UPDATES:
                    self._floor = self._updates.popleft().version
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(POLL_SECONDS)


def sse_event(update: AssignmentUpdate) -> str:
    """Format an update as a server-sent event, even if it only has a version."""
    return f"event: assignments\nid: {update.version}\ndata: {json.dumps(asdict(update), separators=(',', ':'))}\n\n"
