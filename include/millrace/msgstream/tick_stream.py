"""The time-tick stream: a pack holds the messages between two time ticks over all channels, in order of timestamps.

The next pack is a pure function of the logs and the positions. Let T0 be the time up to which all is delivered. Each
channel is read to its first tick after T0; T is the minimum of these ticks; the pack is all messages with T0 < end_ts
<= T. A channel that lags delays the pack, and the others are not read past their tick meanwhile.

A channel's position is its first unfinished entry (a message after T that preceded the tick, or else the tick) and
the time T. A reader that starts there skips messages with a time up to T until a tick of T or later: they were in the
log before T was complete, and were delivered. After that tick, such a message is late.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, PackTooLarge
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId
from millrace.message.log_entries import LogEntries
from millrace.msgstream.group_record import GroupRecord
from millrace.msgstream.memory import MessageTable
from millrace.msgstream.pack import MsgPack, MsgPosition, RefusedMsg
from millrace.msgstream.protocol import MsgType, TsMsg, UnmarshalDispatcherFactory
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import UNREADABLE_ERRORS, WAIT_SLICE, BaseStream, ConsumedChannel, entries_of

_log: Final = logging.getLogger(__name__)


class _Held(NamedTuple):
    """A message whose time has not come."""

    log_id: LogId
    msg: TsMsg
    size: int


class _Tick(NamedTuple):
    """A time tick and its log id."""

    ts: int
    log_id: LogId


class _TickChannel(ConsumedChannel):
    """A time-tick stream's position in a channel.

    ``floor``: the time up to which this channel's messages are delivered. ``seen``: the greatest tick read, at or
    above ``floor`` (negative: none yet, so messages not above ``floor`` were delivered before). ``tick``: the tick
    that was read to. ``at_tick``: whether ``first`` is the tick of time ``floor``.
    """

    def __init__(self, name: str, log: Log, group: str, first: LogId, floor: int) -> None:
        super().__init__(name, log, group)
        self.go(first, floor)

    def go(self, first: LogId, floor: int) -> None:
        """Move to a position, with nothing read."""
        self.first = self.next = first
        self.floor = floor
        self.seen = -1 if floor else 0
        self.at_tick = False
        self.held: list[_Held] = []
        self.tick: _Tick | None = None
        self.refused: list[RefusedMsg] = []
        self.entries: Iterator[tuple[LogId, bytes]] = iter(())

    @property
    def at(self) -> MsgPosition:
        """The position for a pack."""
        return self.position(self.first, self.floor)

    def done(self, ts: int) -> list[_Held]:
        """Mark all messages up to `ts` as delivered and return them."""
        found = [held for held in self.held if held.msg.end_ts <= ts]
        self.held = [held for held in self.held if held.msg.end_ts > ts]
        assert self.tick is not None
        self.at_tick = self.tick.ts == ts and not (self.held and self.held[0].log_id < self.tick.log_id)
        self.first = min(self.held[0].log_id, self.tick.log_id) if self.held else self.tick.log_id
        if self.tick.ts <= ts:
            self.tick = None
        self.floor = max(self.floor, ts)
        return found


class LogTtMsgStream(BaseStream[_TickChannel]):
    """See this module's docstring. Empty packs show that time advances. Packs contain no ticks.

    Buffers at most ``max_pack_bytes`` of messages whose tick has not come, and one read of ``read_bytes`` per
    channel.
    """

    def __init__(
        self,
        service: LogService,
        *,
        settings: StreamSettings | None = None,
        unmarshal: UnmarshalDispatcherFactory | None = None,
        message_table: MessageTable | None = None,
    ) -> None:
        """`service` is not closed with the stream; `message_table` as for every stream."""
        super().__init__(service, settings=settings, unmarshal=unmarshal, message_table=message_table)
        self._last = -1  # up to which time all channels are delivered; below 0: to be found from theirs
        self._size = 0
        self._records: dict[str, GroupRecord] = {}
        self._recorded: set[int] = set()  # times at which positions alone do not determine what a group has consumed

    def close(self) -> None:
        """See MsgStream.close."""
        super().close()
        for record in self._records.values():
            record.close()

    def _opened(self, name: str, log: Log, group: str, position: LogId, *, known: bool) -> _TickChannel:
        self._last = -1
        return _TickChannel(name, log, group, position, self._floor(name, log, group, position, known=known))

    def _floor(self, name: str, log: Log, group: str, position: LogId, *, known: bool) -> int:
        """Return the time up to which a group at `position` has consumed a channel; 0 if unknown."""
        if not group or not known:
            return 0
        recorded = self._record(group).time_at(name, position)
        if recorded is not None:
            return recorded
        for _, value in entries_of(log.read(position, end=position.following(), max_bytes=1)):
            try:
                msg = self._unmarshal(value)
            except UNREADABLE_ERRORS:
                continue
            return msg.end_ts if msg.type == MsgType.TIME_TICK else 0
        return 0

    def _forget(self, name: str, group: str) -> None:
        self._record(group).forget(name)

    def _record(self, group: str) -> GroupRecord:
        return self._records.setdefault(group, GroupRecord(self._service, group))

    def _acknowledging(self, pack: MsgPack) -> None:
        for group in {each.msg_group for each in pack.end_positions} - {""}:
            positions = [each for each in pack.end_positions if each.msg_group == group]
            if pack.end_ts in self._recorded or self._record(group).contradicts(positions):
                self._record(group).store(positions)
        if self._recorded:
            self._recorded = {ts for ts in self._recorded if ts > pack.end_ts}

    def _sought(self, channel: _TickChannel, position: MsgPosition) -> None:
        self._size -= sum(held.size for held in channel.held) + sum(len(each.payload) for each in channel.refused)
        channel.go(position.log_id, position.timestamp)
        self._last = -1

    def _consume(self, deadline: Deadline) -> MsgPack:
        channels = list(self._channels.values())
        if self._last < 0:
            self._last = min(channel.floor for channel in channels)
        lagging = [channel for channel in channels if not self._read_on(channel, deadline, at_most=0.0)]
        while lagging:
            if deadline.expired():
                names = ", ".join(channel.name for channel in lagging)
                raise DeadlineExceeded(f"no time tick after {self._last} came on {names}")
            self._read_on(lagging[0], deadline, at_most=WAIT_SLICE)
            lagging = [channel for channel in lagging if not self._read_on(channel, deadline, at_most=0.0)]
        return self._packed(channels)

    def _read_on(self, channel: _TickChannel, deadline: Deadline, *, at_most: float) -> bool:
        """Read a channel to its first tick after the last pack; False if it is not there yet."""
        while channel.tick is None or channel.tick.ts <= self._last:
            if self._size > self.settings.max_pack_bytes:
                raise PackTooLarge(
                    f"{self._size} bytes of messages wait for a time tick after {self._last}, and this stream buffers"
                    f" at most {self.settings.max_pack_bytes}: send ticks more often, or raise max_pack_bytes"
                )
            if not self._take(channel):
                run: LogEntries = self._wait(channel, channel.next, deadline, at_most=at_most)
                if not run.batch.num_rows:
                    return False
                channel.entries = entries_of(run)
                channel.next = run.next
                if not self._take(channel) and deadline.expired():
                    return False  # the entries are buffered; the next call continues
        return True

    def _take(self, channel: _TickChannel) -> bool:
        """Process entries up to the next relevant tick; False if they end before it."""
        for log_id, value in channel.entries:
            try:
                msg = self._unmarshal(value)
            except UNREADABLE_ERRORS as error:
                if channel.seen >= 0:
                    self._refuse(
                        channel, RefusedMsg(channel.position(log_id, self._last), "malformed", str(error), value)
                    )
                continue
            ts = msg.end_ts
            if msg.type == MsgType.TIME_TICK:
                if ts > channel.seen and ts >= channel.floor:
                    channel.seen = ts
                    if ts > self._last:
                        channel.tick = _Tick(ts, log_id)
                        return True
            elif ts > max(channel.seen, channel.floor):
                channel.held.append(_Held(log_id, msg, len(value)))
                self._size += len(value)
                if self._size > self.settings.max_pack_bytes:
                    return True  # the caller checks the size again
            elif channel.seen >= 0:
                msg.position = channel.position(log_id, self._last)
                detail = (
                    f"its time is {ts}, and the channel's time tick {channel.seen} came before it"
                    if ts
                    else "it has no time"
                )
                self._refuse(channel, RefusedMsg(msg.position, "late", detail, value, msg))
        return False

    def _refuse(self, channel: _TickChannel, refused: RefusedMsg) -> None:
        log_id = refused.position.log_id
        _log.warning("%s %s: a %s message: %s", channel.name, log_id, refused.reason, refused.detail)
        channel.refused.append(refused)
        self._size += len(refused.payload)

    def _packed(self, channels: list[_TickChannel]) -> MsgPack:
        begin, end = self._last, min(channel.tick.ts for channel in channels if channel.tick is not None)
        pack = MsgPack(begin_ts=begin, end_ts=end, start_positions=[channel.at for channel in channels])
        for channel in channels:
            for log_id, msg, size in channel.done(end):
                self._size -= size
                msg.position = channel.position(log_id, begin)
                pack.msgs.append(msg)
            pack.refused += channel.refused
            self._size -= sum(len(each.payload) for each in channel.refused)
            channel.refused = []
        pack.msgs.sort(
            key=_end_ts
        )  # keeps the order of channels, and within each that of the log, where times are equal
        pack.end_positions = [channel.at for channel in channels]
        if any(channel.group and not channel.at_tick for channel in channels):
            self._recorded.add(end)
        self._last = end
        return pack


def _end_ts(msg: TsMsg) -> int:
    return msg.end_ts
