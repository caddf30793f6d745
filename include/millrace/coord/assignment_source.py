"""Discovery: the channel records as assignments, for whoever follows them (millrace.rpc.assignments)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from millrace.base.errors import InvalidArgument, RevisionCompacted
from millrace.coord.channels.record import CHANNEL_PREFIX, AssignmentState, ChannelRecord
from millrace.meta.store import Entry, MetaStore
from millrace.rpc.assignments import Assignment, AssignmentSource, AssignmentUpdate


class MetaStoreAssignmentSource:
    """The protocol AssignmentSource, from the meta store; a version is a revision of it."""

    def __init__(self, store: MetaStore) -> None:
        self._store = store

    def all(self) -> AssignmentUpdate:
        listed = self._store.list(CHANNEL_PREFIX)
        return AssignmentUpdate(listed.revision, True, tuple(_assignment(entry) for entry in listed.entries))

    def since(self, version: int) -> AssignmentUpdate:
        changes = self._store.changes(CHANNEL_PREFIX, after=version)
        newest = {event.key: event.entry for event in changes.events if event.entry is not None}
        return AssignmentUpdate(changes.revision, False, tuple(map(_assignment, newest.values())))


class CoalescedAssignmentSource:
    """The protocol AssignmentSource for many who ask one process: of those that ask at the same time one looks for all, and what the
    store has to do does not grow with them. An answer is as new as its question. Thread-safe."""

    def __init__(self, look: Callable[[], AssignmentSource | None]) -> None:
        """`look` gives the source, None where nobody serves anything; one caller at a time. What it raises, who asks gets."""
        self._look = look
        self._looking = threading.Lock()
        self._begun = self._done = 0
        self._version = self._floor = -1
        """Up to where was looked, and behind what it is known when each came."""
        self._known: dict[tuple[str, str], tuple[int, Assignment]] = {}
        """With the version that brought it."""

    def all(self) -> AssignmentUpdate:
        return self.since(-1)

    def since(self, version: int) -> AssignmentUpdate:
        asked = self._begun
        with self._looking:
            if self._done <= asked:  # no look began behind this call
                self._begun += 1
                self._take(self._look())
                self._done = self._begun
            whole = version < self._floor or self._version < 0
            found = (each for came, each in self._known.values() if whole or came > version)
            return AssignmentUpdate(max(self._version, 0), whole, tuple(found))

    def _take(self, source: AssignmentSource | None) -> None:
        if source is None:
            self._known, self._version, self._floor = {}, -1, -1
            return
        try:
            update = source.all() if self._version < 0 else source.since(self._version)
        except (RevisionCompacted, InvalidArgument):
            update = source.all()  # too old, or another store's
        if update.whole:
            self._known, self._floor = {}, update.version
        self._known.update({(each.pchannel, each.role): (update.version, each) for each in update.assignments})
        self._version = update.version


def _assignment(entry: Entry) -> Assignment:
    record = ChannelRecord.decode(entry.value, entry.modified)
    owner = record.owner
    if record.state is not AssignmentState.ASSIGNED or owner is None:
        return Assignment(record.pchannel, record.role, record.term, "", "")
    return Assignment(record.pchannel, record.role, record.term, owner.session, owner.client_address or owner.address)
