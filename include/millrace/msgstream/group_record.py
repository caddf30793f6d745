"""State of a time-tick group beyond its positions: the time up to which all messages were delivered.

A group's position in a log is sufficient if it is at the time tick itself. If messages with a later time preceded
that tick, or another channel's tick ended the pack, the time is stored separately: as the last entry of a log of the
group's own, written before the group moves. The record covers the new and the current position of each channel,
because a consumer may crash in between. It counts for a channel only while the group is at one of both, so a manual
move of the group invalidates it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from millrace.base.errors import ChannelExists, ChannelNotFound, Malformed
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId
from millrace.msgstream.pack import MsgPosition, id_to_bytes

PREFIX: Final = "_group."
"""Prefix of the names of these logs; the group's name follows."""

_TRUNCATE_EVERY: Final = 256
_VERSION: Final = 1


class GroupRecord:
    """The record of one group. One consumer writes it; not thread-safe."""

    def __init__(self, service: LogService, group: str) -> None:
        self._service = service
        self._group = group
        self._name = PREFIX + group
        self._log: Log | None = None
        self._written = 0
        """Entries before the newest one, as far as this consumer knows."""
        self._held: dict[str, dict[LogId, int]] | None = None

    def time_at(self, channel: str, position: LogId) -> int | None:
        """Return the time up to which a channel is delivered if the group is at `position`; None if not recorded.

        Raises Malformed if another program wrote to the log.
        """
        return self._load().get(channel, {}).get(position)

    def _load(self) -> dict[str, dict[LogId, int]]:
        """Return times by channel and position, newest last."""
        if self._held is not None:
            return self._held
        if self._name not in self._service.names():
            self._held = {}
            return self._held
        log = self._open()
        position, last, self._written = log.describe().begin, b"", 0
        while (run := log.read(position)).batch.num_rows:
            last = run.batch.column("value")[-1].as_py()
            self._written += run.batch.num_rows
            position = run.next
        if not last:
            self._held = {}
            return self._held
        try:
            document = json.loads(last)
            if document["version"] != _VERSION:
                raise ValueError
            held: dict[str, dict[LogId, int]] = {}
            for part in (document.get("before", {}), document["channels"]):
                for name, (ledger, entry, ts) in part.items():
                    _put(held, str(name), LogId(int(ledger), int(entry)), int(ts))
            self._held = held
            return held
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Malformed(
                f"the log {self._name} has an entry that is not a group record of version {_VERSION}"
            ) from None

    def store(self, positions: Iterable[MsgPosition]) -> None:
        """Record positions that the group is about to move to, durably.

        Raises the log's errors, and Malformed as `time_at`.
        """
        known, held = self._load(), dict[str, dict[LogId, int]]()
        before, channels = dict[str, tuple[int, int, int]](), dict[str, tuple[int, int, int]]()
        for each in positions:
            name, standing = each.channel_name, self._standing(each.channel_name)
            if standing is not None and (ts := known.get(name, {}).get(standing)) is not None:
                before[name] = (*standing, ts)
                _put(held, name, standing, ts)
            channels[name] = (*each.log_id, each.timestamp)
            _put(held, name, each.log_id, each.timestamp)
        self._held = None  # unknown until this is durable
        log = self._open(make=True)
        document = {"version": _VERSION, "channels": channels, "before": before}
        (log_id,) = log.append([json.dumps(document).encode()])
        self._held = held
        self._written += 1
        if self._written >= _TRUNCATE_EVERY:
            log.truncate(log_id)
            self._written = 0

    def _standing(self, channel: str) -> LogId | None:
        try:
            return self._service.group_position(self._group, channel)
        except ChannelNotFound:
            return None

    def contradicts(self, positions: Iterable[MsgPosition]) -> bool:
        """Return whether the record has another time for a channel at the same position."""
        return any(self.time_at(each.channel_name, each.log_id) not in (None, each.timestamp) for each in positions)

    def forget(self, channel: str) -> None:
        """Remove what a former group of this name recorded for a channel, durably."""
        held = self._load()
        if channel in held:
            newest = {name: next(reversed(times.items())) for name, times in held.items() if name != channel}
            self.store(MsgPosition(name, id_to_bytes(log_id), "", ts) for name, (log_id, ts) in newest.items())

    def close(self) -> None:
        """Close the log. Idempotent."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _open(self, *, make: bool = False) -> Log:
        if self._log is None:
            if make and self._name not in self._service.names():
                try:
                    self._service.create(self._name)
                except ChannelExists:
                    pass  # another consumer of this group created it concurrently
            self._log = self._service.open(self._name)
        return self._log


def _put(held: dict[str, dict[LogId, int]], channel: str, position: LogId, ts: int) -> None:
    times = held.setdefault(channel, {})
    times.pop(position, None)  # the newest comes last
    times[position] = ts
