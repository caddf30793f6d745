"""The registry of channels in a meta store: a key for each creation, in a space of the log's own, so that
logs can share a store.

The contents of the log ``_channels`` are imported once. The log's order decides: an event there names the space; the
first such event counts, with everything before it and nothing after it. The space is created in the store before that
event, so that a process with another store detects its mistake. Writes of the import are bound to the state of the
import, so that a late write cannot restore a removed channel.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidSettings, MetaAmbiguous, MetaUnavailable, MillraceError
from millrace.log.protocol import LogService
from millrace.meta.store import Delete, MetaStore, Mutation, Put, RevisionEquals
from millrace.msgstream.registry import ChannelCreation, RegistryEvents, moved_event, open_registry_log

SPACE_PREFIX: Final = "streams/"
RETRY_SECONDS: Final = 15.0
"""Time for which to retry a store that does not answer, or that others write to."""
_PART: Final = 4
"""Creations per commit: each may have 256 KiB less its envelope, and a commit 1 MiB."""
_PAUSE: Final = 0.1
_BEGUN: Final = b"begun"
_TAKEN: Final = b"taken"


class _Step(NamedTuple):
    """One commit towards the wanted state."""

    then: list[Mutation]
    when: list[RevisionEquals]


class MetaStoreRegistry:
    """The registry of `service`'s channels in `store`.

    Raises InvalidSettings if it is in another store, MetaUnavailable, MetaAmbiguous, and the log's errors.
    """

    def __init__(self, service: LogService, store: MetaStore, *, seconds: float = RETRY_SECONDS) -> None:
        self._service = service
        self._store = store
        self._seconds = seconds
        self._space = ""

    def known(self) -> list[ChannelCreation]:
        entries = sorted(self._store.list(self._of_creations()).entries, key=lambda entry: (entry.created, entry.key))
        return [ChannelCreation.decode(entry.value) for entry in entries]

    def add(self, creation: ChannelCreation) -> None:
        key, value = self._of_creations() + secrets.token_hex(8), creation.encode()
        self._until_done(lambda: None if self._store.get(key) else _Step([Put(key, value)], [RevisionEquals(key, 0)]))

    def remove(self, names: Collection[str]) -> None:
        prefix, gone = self._of_creations(), frozenset(names)

        def step() -> _Step | None:
            for entry in self._store.list(prefix).entries:
                creation = ChannelCreation.decode(entry.value)
                if not gone.isdisjoint(creation.channels):
                    left = creation.without(gone)
                    then = Put(entry.key, left.encode()) if left.channels else Delete(entry.key)
                    return _Step([then], [RevisionEquals(entry.key, entry.modified)])
            return None

        self._until_done(step)

    def _of_creations(self) -> str:
        if not self._space:
            self._space = self._import_events()
        return f"{SPACE_PREFIX}{self._space}/"

    def _import_events(self) -> str:
        """Return the space of this log, with the log's events imported."""
        with open_registry_log(self._service, make=True) as log:
            events = RegistryEvents.of(log)
            if events.moved is None:
                space = secrets.token_hex(8)
                begun = SPACE_PREFIX + space
                self._until_done(
                    lambda: None if self._store.get(begun) else _Step([Put(begun, _BEGUN)], [RevisionEquals(begun, 0)])
                )
                log.append([moved_event(space)])
                events = RegistryEvents.of(log)
                if events.space != space:  # another process was first
                    self._until_done(lambda: _Step([Delete(begun)], []) if self._store.get(begun) else None)
            assert events.moved is not None
            if self._taken_over(events.space, events.creations()):
                try:
                    log.truncate(events.moved)
                except MillraceError:
                    pass  # the events stay longer, but nobody reads them
        return events.space

    def _taken_over(self, space: str, creations: list[ChannelCreation]) -> bool:
        """Import the log's creations into the store; False if that was done before."""
        state, took = SPACE_PREFIX + space, False
        wanted = {f"{state}/{number:08}": creation for number, creation in enumerate(creations)}

        def step() -> _Step | None:
            nonlocal took
            entry = self._store.get(state)
            if entry is None:
                raise InvalidSettings(
                    "the channel registry of this log is in another meta store: set MILLRACE_META_STORE to that store"
                )
            if entry.value == _TAKEN:
                return None
            took = True
            there = {each.key for each in self._store.list(state + "/").entries}
            missing = [key for key in wanted if key not in there][:_PART]
            puts = [Put(key, wanted[key].encode()) for key in missing] or [Put(state, _TAKEN)]
            return _Step([*puts], [RevisionEquals(state, entry.modified)])

        self._until_done(step)
        return took

    def _until_done(self, step: Callable[[], _Step | None]) -> None:
        """Commit steps until none is left. Each reads the current state, so lost answers and other writers do
        no harm.
        """
        end = Deadline.after(self._seconds)
        while True:
            try:
                next_ = step()
                if next_ is None:
                    return
                if self._store.commit(next_.then, when=next_.when) is not None:
                    continue
            except (MetaUnavailable, MetaAmbiguous):
                if end.expired():
                    raise
            if not end.pause(jittered(_PAUSE)):
                raise MetaUnavailable("could not write the registry of channels: retry")
