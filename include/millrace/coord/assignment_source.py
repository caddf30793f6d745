"""Channel records as assignments for clients and other followers (millrace.rpc.assignments)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from millrace.base.errors import InvalidArgument, RevisionCompacted
from millrace.coord.channels.record import CHANNEL_PREFIX, AssignmentState, ChannelRecord
from millrace.meta.store import Entry, MetaStore
from millrace.rpc.assignments import Assignment, AssignmentSource, AssignmentUpdate


class MetaStoreAssignmentSource:
    """AssignmentSource on the meta store. A version is a revision of the store."""

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
    """AssignmentSource for many concurrent callers in one process.

    Concurrent calls share one read of the store, so its load does not grow with the number of callers.
    An answer is never older than its call. Thread-safe.
    """

    def __init__(self, look: Callable[[], AssignmentSource | None]) -> None:
        """`look` returns the source, or None if no node serves the role. It is called by one thread at a time.

        An error of `look` is raised to the caller.
        """
        self._look = look
        self._looking = threading.Lock()
        self._begun = self._done = 0
        self._version = self._floor = -1
        """Newest version read, and the version after which every change is known."""
        self._known: dict[tuple[str, str], tuple[int, Assignment]] = {}
        """The version that brought an assignment, and the assignment, by PChannel and role."""

    def all(self) -> AssignmentUpdate:
        return self.since(-1)

    def since(self, version: int) -> AssignmentUpdate:
        asked = self._begun
        with self._looking:
            if self._done <= asked:  # no read began after this call
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
