"""What a time-tick group must remember beyond a position of each channel: the time up to which all was delivered.

A group's position in a log says it all where it is the time tick itself. Where messages with a later time stood before that tick,
or another channel's tick ended the pack, the time is kept beside it: as the last entry of a log of the group's own, written
before the group moves. An entry counts for a channel only while the group stands where the entry says, so that whoever
moves the group by hand need not know of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from millrace.errors import ChannelExists, Malformed
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId
from millrace.msgstream.pack import MsgPosition, id_to_bytes

PREFIX: Final = "_group."
"""Of the names of these logs; the group's name follows."""

_TRUNCATE_EVERY: Final = 256
_VERSION: Final = 1


class GroupRecord:
    """The record of one group. One consumer writes it; not thread-safe."""

    def __init__(self, service: LogService, group: str) -> None:
        self._service = service
        self._name = PREFIX + group
        self._log: Log | None = None
        self._written = 0
        self._held: dict[str, tuple[LogId, int]] | None = None

    def load(self) -> dict[str, tuple[LogId, int]]:
        """Position and time of each channel at the last :meth:`store`. Raises Malformed where something else wrote there."""
        if self._held is not None:
            return dict(self._held)
        if self._name not in self._service.names():
            self._held = {}
            return {}
        log = self._open()
        position, last = log.describe().begin, b""
        while (run := log.read(position)).batch.num_rows:
            last = run.batch.column("value")[-1].as_py()
            position = run.next
        if not last:
            self._held = {}
            return {}
        try:
            document = json.loads(last)
            if document["version"] != _VERSION:
                raise ValueError
            self._held = {
                str(name): (LogId(int(ledger), int(entry)), int(ts))
                for name, (ledger, entry, ts) in document["channels"].items()
            }
            return dict(self._held)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Malformed(f"the log {self._name} has an entry that is no record of this version of a group") from None

    def store(self, positions: Iterable[MsgPosition]) -> None:
        """Remember positions, durably. Raises what the log raises."""
        held = {each.channel_name: (each.log_id, each.timestamp) for each in positions}
        channels = {name: (*log_id, ts) for name, (log_id, ts) in held.items()}
        self._held = None  # unknown until this is durable
        log = self._open(make=True)
        (log_id,) = log.append([json.dumps({"version": _VERSION, "channels": channels}).encode()])
        self._held = held
        self._written += 1
        if self._written % _TRUNCATE_EVERY == 0:
            log.truncate(log_id)

    def contradicts(self, positions: Iterable[MsgPosition]) -> bool:
        """Whether it holds another time for a channel at just this position."""
        held = self.load()
        for each in positions:
            log_id, ts = held.get(each.channel_name, (None, 0))
            if log_id == each.log_id and ts != each.timestamp:
                return True
        return False

    def forget(self, channel: str) -> None:
        """Forget what a former group of this name remembered of a channel, durably."""
        held = self.load()
        if held.pop(channel, None) is not None:
            self.store(MsgPosition(name, id_to_bytes(log_id), "", ts) for name, (log_id, ts) in held.items())

    def close(self) -> None:
        """Release the log. Idempotent."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _open(self, *, make: bool = False) -> Log:
        if self._log is None:
            if make and self._name not in self._service.names():
                try:
                    self._service.create(self._name)
                except ChannelExists:
                    pass  # another consumer of this group made it in this moment
            self._log = self._service.open(self._name)
        return self._log
