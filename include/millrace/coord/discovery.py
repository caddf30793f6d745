"""Discovery: the channel records as assignments, for whoever follows them (millrace.rpc.assignments)."""

from __future__ import annotations

from millrace.coord.channels.record import CHANNELS, ChannelRecord, State
from millrace.meta.store import Entry, MetaStore
from millrace.rpc.assignments import Assignment, Update


class Discovery:
    """The protocol AssignmentSource, from the meta store; a version is a revision of it."""

    def __init__(self, store: MetaStore) -> None:
        self._store = store

    def all(self) -> Update:
        listed = self._store.list(CHANNELS)
        return Update(listed.revision, True, tuple(_assignment(entry) for entry in listed.entries))

    def since(self, version: int) -> Update:
        changes = self._store.changes(CHANNELS, after=version)
        newest = {event.key: event.entry for event in changes.events if event.entry is not None}
        return Update(changes.revision, False, tuple(map(_assignment, newest.values())))


def _assignment(entry: Entry) -> Assignment:
    record = ChannelRecord.decoded(entry.value, entry.modified)
    owner = record.owner
    if record.state is not State.ASSIGNED or owner is None:
        return Assignment(record.pchannel, record.role, record.term, "", "")
    return Assignment(record.pchannel, record.role, record.term, owner.session, owner.serves or owner.address)
