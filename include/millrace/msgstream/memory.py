"""Message streams in one process: channels in memory, with messages passed as objects.

    with MemMsgStreamFactory() as factory, factory.new_tt_msg_stream() as stream: ...

The streams are those of every log, with consumer groups, positions, seeks, time ticks, and a dispatcher of
MemUDFactory. Messages are not marshalled: a consumer gets a copy of the object (its fields are shared, its position
is its own). Nothing outlives the process. A channel holds at most `max_messages`; a further append raises BufferFull
until consumed messages are trimmed (``channels.trim_channels``).
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Final

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    BufferFull,
    ChannelExists,
    ChannelNotFound,
    InvalidArgument,
    LogUnavailable,
    Malformed,
    PositionTruncated,
)
from millrace.log.group_leases import LeasesInProcess
from millrace.message.ids import LogId, LogIds
from millrace.message.log_entries import ENTRY_SCHEMA, LogDescription, LogEntries
from millrace.msgstream.protocol import TsMsg

MAX_MESSAGES: Final = 100_000

_TOKEN: Final = struct.Struct("<4sQ")
_MAGIC: Final = b"OBJ\x00"


class MessageTable:
    """Messages by token. A channel in memory holds tokens instead of bytes. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[bytes, TsMsg] = {}
        self._entries: dict[bytes, int] = {}
        """Number of entries by token: a broadcast has one in each channel."""
        self._next = 0
        self._lock = threading.Lock()

    def put(self, msg: TsMsg) -> bytes:
        """Store a message; return its token."""
        with self._lock:
            self._next += 1
            token = _TOKEN.pack(_MAGIC, self._next)
            self._held[token] = msg
            self._entries[token] = 0
        return token

    def get(self, token: bytes) -> TsMsg:
        """Return a copy of a token's message: its fields are shared, its position is its own.

        Raises Malformed for an unknown token.
        """
        found = self._held.get(token)
        if found is None:
            raise Malformed("the channel has an entry that no stream in memory produced")
        return copy(found)

    def count_references(self, values: Iterable[bytes], change: int) -> None:
        """Count entries with these values that were added (1), removed (-1) or refused (0). Unreferenced messages are
        removed.
        """
        with self._lock:
            for token in values:
                if token in self._held:
                    self._entries[token] += change
                    if not self._entries[token]:
                        del self._held[token], self._entries[token]

    def __len__(self) -> int:
        return len(self._held)


class _Channel:
    def __init__(self) -> None:
        self.first = 0
        self.values: list[bytes] = []
        self.stamps: list[int] = []


class MemoryLog:
    """A handle on one channel (the Log protocol)."""

    def __init__(self, service: MemoryLogService, name: str) -> None:
        self._service = service
        self._name = name

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        """See Log.append.

        Raises BufferFull (nothing was appended).
        """
        taken: list[bytes] = values.to_pylist() if isinstance(values, pa.LargeBinaryArray) else list(values)
        with self._service.changed:
            channel = self._service.channel(self._name)
            if len(channel.values) + len(taken) > self._service.max_messages:
                self._service.message_table.count_references(taken, 0)
                raise BufferFull(
                    f"channel {self._name!r} holds {len(channel.values)} messages of {self._service.max_messages}:"
                    " trim what"
                    " its groups are done with"
                )
            self._service.message_table.count_references(taken, 1)
            begin = channel.first + len(channel.values)
            channel.values += taken
            stamp = max(time.time_ns() // 1_000_000, channel.stamps[-1] if channel.stamps else 0)
            channel.stamps += [stamp] * len(taken)
            self._service.changed.notify_all()
        return LogIds(0, range(begin, begin + len(taken)))

    def read(
        self, position: LogId, *, end: LogId | None = None, max_bytes: int = 64 << 20, timeout: float = 0.0
    ) -> LogEntries:
        """See Log.read."""
        deadline = Deadline.after(timeout)
        with self._service.changed:
            while True:
                channel = self._service.channel(self._name)
                if position.entry < channel.first:
                    raise PositionTruncated(
                        f"channel {self._name!r} begins at 0:{channel.first}: {position} was trimmed",
                        earliest=LogId(0, channel.first),
                    )
                begin = position.entry - channel.first
                stop = len(channel.values) if end is None else min(len(channel.values), end.entry - channel.first)
                if begin < stop or deadline.expired() or (end is not None and end <= position):
                    break
                deadline.wait(self._service.changed)
            stop = max(begin, min(stop, begin + max(1, max_bytes // _TOKEN.size)))
            values, stamps = channel.values[begin:stop], channel.stamps[begin:stop]
        ids = range(position.entry, position.entry + len(values))
        columns = [pa.array([0] * len(values), pa.int64()), pa.array(ids, pa.int64()), pa.array(stamps, pa.int64())]
        batch = pa.RecordBatch.from_arrays([*columns, pa.array(values, pa.large_binary())], schema=ENTRY_SCHEMA)
        return LogEntries(batch, LogId(0, position.entry + len(values)))

    def truncate(self, position: LogId) -> int:
        """See Log.truncate. Messages are removed at once."""
        with self._service.changed:
            channel = self._service.channel(self._name)
            count = position.entry - channel.first
            if count > len(channel.values):
                raise InvalidArgument(f"{position} is beyond the end of channel {self._name!r}")
            gone = channel.values[: max(0, count)]
            del channel.values[: len(gone)], channel.stamps[: len(gone)]
            channel.first += len(gone)
        self._service.message_table.count_references(gone, -1)
        return sum(map(len, gone))

    def describe(self) -> LogDescription:
        """See Log.describe."""
        with self._service.changed:
            channel = self._service.channel(self._name)
            end = LogId(0, channel.first + len(channel.values))
            return LogDescription(LogId(0, channel.first), end, sum(map(len, channel.values)))

    def end(self) -> LogId:
        """See Log.end."""
        return self.describe().end

    def close(self) -> None:
        """See Log.close. There is nothing to release."""


class MemoryLogService(LeasesInProcess, Closeable):
    """Channels in memory (the LogService protocol). Thread-safe."""

    def __init__(self, *, max_messages: int = MAX_MESSAGES) -> None:
        self.max_messages = max_messages
        self.message_table = MessageTable()
        self.changed = threading.Condition(threading.RLock())
        self._channels: dict[str, _Channel] = {}
        self._groups: dict[str, dict[str, LogId]] = {}
        self._closed = False

    def channel(self, name: str) -> _Channel:
        """Return the channel `name`. Called with `changed` held.

        Raises ChannelNotFound, LogUnavailable once the service is closed.
        """
        if self._closed:
            raise LogUnavailable("the channels in memory were closed by this process: create a new factory")
        if name not in self._channels:
            raise ChannelNotFound(f"channel {name!r} does not exist in memory: create it first")
        return self._channels[name]

    def create(self, pchannel: str) -> None:
        """See LogService.create."""
        with self.changed:
            if pchannel in self._channels:
                raise ChannelExists(f"channel {pchannel!r} exists already")
            self._channels[pchannel] = _Channel()

    def open(self, pchannel: str) -> MemoryLog:
        """See LogService.open."""
        with self.changed:
            self.channel(pchannel)
        return MemoryLog(self, pchannel)

    def names(self) -> list[str]:
        """See LogService.names."""
        return sorted(self._channels)

    def drop(self, pchannel: str) -> None:
        """See LogService.drop."""
        with self.changed:
            gone = self.channel(pchannel).values
            del self._channels[pchannel]
            for positions in self._groups.values():
                positions.pop(pchannel, None)
            self.changed.notify_all()
        self.message_table.count_references(gone, -1)

    def groups(self) -> list[str]:
        """See LogService.groups."""
        return sorted(self._groups)

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """See LogService.group_position."""
        with self.changed:
            self.channel(pchannel)
            return self._groups.get(group, {}).get(pchannel)

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """See LogService.move_group. As durable as the process."""
        if position.ledger or position.entry < 0:
            raise InvalidArgument(f"{position} is not a position of a channel in memory: its ledger is 0")
        with self.changed:
            self.channel(pchannel)
            self._groups.setdefault(group, {})[pchannel] = position

    def drop_group(self, group: str) -> None:
        """See LogService.drop_group."""
        with self.changed:
            self._groups.pop(group, None)

    def close(self) -> None:
        """See LogService.close. Removes everything."""
        with self.changed:
            self._closed = True
            self._channels.clear()
            self._groups.clear()
            self.changed.notify_all()
