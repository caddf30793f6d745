"""The leader's copy of all assignment records, each changed by compare-and-set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from millrace.base.errors import MetaAmbiguous
from millrace.coord.channels.record import CHANNEL_PREFIX, ChannelRecord
from millrace.coord.leadership import Leadership
from millrace.meta.store import MAX_CHANGES, Put, RevisionEquals

_AT_ONCE = MAX_CHANGES - 1
"""Records per commit; the leader's own condition takes one more."""


class ChannelManager:
    """The records as one leader knows them in one epoch.

    Only the leader writes records, so its copy is current, except after a write whose answer was lost and which may
    still arrive. Such a record is written again before it is used.
    """

    def __init__(self, leadership: Leadership, epoch: int) -> None:
        self._leadership = leadership
        self._epoch = epoch
        self.records: dict[str, ChannelRecord] = {}
        self._unsure: set[str] = set()

    def rewrite_unsure(self) -> None:
        """Write uncertain records again. A late arrival of the first write then finds another revision and fails."""
        for key in sorted(self._unsure & self.records.keys()):
            self.change(self.records[key])

    def load(self) -> None:
        listed = self._leadership.store.list(CHANNEL_PREFIX)
        self.records = {entry.key: ChannelRecord.decode(entry.value, entry.modified) for entry in listed.entries}

    def add(self, pchannels: Iterable[str], roles: Iterable[str]) -> None:
        """Store a record for each role of each PChannel that has none."""
        roles = list(roles)
        found = (ChannelRecord(pchannel, role) for pchannel in pchannels for role in roles)
        self.change_all([record for record in found if record.key not in self.records])

    def change_all(self, records: Sequence[ChannelRecord]) -> None:
        """:meth:`change` for several records, many per commit: a thousand lost roles take a few round trips."""
        left = iter(records)
        while batch := list(islice(left, _AT_ONCE)):
            try:
                revision = self._leadership.commit(
                    self._epoch,
                    [Put(each.key, each.encode()) for each in batch],
                    when=[RevisionEquals(each.key, each.revision) for each in batch],
                )
            except MetaAmbiguous:
                self._unsure.update(each.key for each in batch)
                for each in batch:
                    self._look(each.key)
                continue
            if revision is None:  # one of them had changed
                for each in batch:
                    self.change(each)
                continue
            self.records |= {each.key: replace(each, revision=revision) for each in batch}
            self._unsure.difference_update(each.key for each in batch)

    def change(self, record: ChannelRecord) -> ChannelRecord:
        """Replace the record that `record` was derived from; return the stored record, another one if it had changed.

        Raises NotLeader, MetaUnavailable (nothing was done), MetaAmbiguous (reading it back failed as well).
        """
        key = record.key
        try:
            revision = self._leadership.commit(
                self._epoch, [Put(key, record.encode())], when=[RevisionEquals(key, record.revision)]
            )
        except MetaAmbiguous:
            self._unsure.add(key)
            return self._look(key)
        if revision is None:
            self._unsure.add(key)  # until it has been read back
            found = self._look(key)
        else:
            found = self.records[key] = replace(record, revision=revision)
        self._unsure.discard(key)  # the revision has changed, so a write still in flight fails
        return found

    def _look(self, key: str) -> ChannelRecord:
        entry = self._leadership.store.get(key)
        if entry is None:
            raise MetaAmbiguous(f"{key} does not exist; a write of it may still arrive")
        self.records[key] = ChannelRecord.decode(entry.value, entry.modified)
        return self.records[key]
