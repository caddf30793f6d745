"""The common part of streams (channels, consumer groups, acknowledgements, iteration), and the plain stream.

A group's position is the log's own (LogService.move_group): an acknowledgement moves it, durably, to the end of the
pack. Packs that were not acknowledged before a crash are delivered again: at least once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Generic, Literal, Self, TypeVar

from millrace.base.backoff import Backoff
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelNotFound,
    DeadlineExceeded,
    InvalidArgument,
    Malformed,
    MessagesRefused,
    StreamClosed,
    UnsupportedMessageType,
    UnsupportedVersion,
)
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId
from millrace.message.log_entries import LogEntries
from millrace.msgstream import wire
from millrace.msgstream.group_hold import GroupHold
from millrace.msgstream.memory import MessageTable
from millrace.msgstream.messages import msg_type
from millrace.msgstream.pack import MsgPack, MsgPosition, RefusedMsg, common_trace_ctx, id_to_bytes
from millrace.msgstream.pack_producer import PackProducer
from millrace.msgstream.protocol import RepackFunc, TsMsg, UnmarshalDispatcherFactory
from millrace.msgstream.repack import default_repack
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.unmarshal import ProtoUDFactory

_FIRST_WAIT: Final = 0.005
WAIT_SLICE: Final = 0.25
"""Waits for a log are split into slices of this many seconds, so that closing the stream ends them."""


class ConsumedChannel:
    """A consumed channel: its log and its acknowledged position."""

    def __init__(self, name: str, log: Log, group: str) -> None:
        self.name = name
        self.log = log
        self.group = group
        self.acked: LogId | None = None

    def position(self, log_id: LogId, timestamp: int) -> MsgPosition:
        """Return a position in this channel."""
        return MsgPosition(self.name, id_to_bytes(log_id), self.group, timestamp)


ChannelT = TypeVar("ChannelT", bound=ConsumedChannel)


class BaseStream(ABC, Generic[ChannelT]):
    """The MsgStream protocol over a LogService; subclasses define what a pack is."""

    def __init__(
        self,
        service: LogService,
        *,
        settings: StreamSettings | None = None,
        unmarshal: UnmarshalDispatcherFactory | None = None,
        message_table: MessageTable | None = None,
    ) -> None:
        """`service` is not closed with the stream. With `message_table`, messages are passed as objects, without
        marshalling.
        """
        self.settings = settings or StreamSettings()
        self._service = service
        self._dispatcher = (unmarshal or ProtoUDFactory()).new_unmarshal_dispatcher()
        self._handover = message_table
        self._producer = PackProducer(service, marshal=None if message_table is None else message_table.put)
        self._channels: dict[str, ChannelT] = {}
        self._consuming = threading.Lock()
        self._acking = threading.Lock()
        self._unacked: MsgPack | None = None
        self._hold = GroupHold(service, seconds=self.settings.group_lease)
        self._started = self._closed = False

    # Producing

    def as_producer(self, channels: Sequence[str]) -> None:
        """See MsgStream.as_producer."""
        self._check_open()
        self._producer.open(channels)

    def set_repack_func(self, repack_func: RepackFunc | None) -> None:
        """See MsgStream.set_repack_func."""
        self._producer.repack = repack_func or default_repack

    def produce(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """See MsgStream.produce."""
        self._check_started()
        return self._producer.produce(pack, timeout=self._timeout(timeout), trace_ctx=trace_ctx)

    def broadcast(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """See MsgStream.broadcast."""
        self._check_started()
        return self._producer.broadcast(pack, timeout=self._timeout(timeout), trace_ctx=trace_ctx)

    # Consuming

    def as_consumer(
        self, channels: Sequence[str], sub_name: str = "", *, start: Literal["earliest", "latest"] = "earliest"
    ) -> None:
        """See MsgStream.as_consumer."""
        self._check_open()
        if start not in ("earliest", "latest"):
            raise InvalidArgument(f"start must be 'earliest' or 'latest', not {start!r}")
        if len(set(channels)) != len(channels) or self._channels.keys() & set(channels):
            raise InvalidArgument("a channel occurs twice among those to consume from")
        with self._consuming:
            opened: dict[str, ChannelT] = {}
            for name in channels:
                log = self._service.open(name)
                if sub_name:
                    self._hold.take(sub_name, name)  # before its position is read: the holder before may move it
                position = self._service.group_position(sub_name, name) if sub_name else None
                known = position is not None
                if position is None:
                    described = log.describe()
                    position = described.end if start == "latest" else described.begin
                    if sub_name:
                        self._forget(name, sub_name)
                        # Durable at once: later messages belong to the group even if it never acknowledges anything.
                        self._service.move_group(sub_name, name, position)
                opened[name] = self._opened(name, log, sub_name, position, known=known)
            self._channels |= opened

    def consume(self, *, timeout: float | None = None) -> MsgPack:
        """See MsgStream.consume.

        Raises MessagesRefused if the setting ``on_refused`` says so.
        """
        self._check_started()
        if not self._channels:
            raise InvalidArgument("this stream consumes from no channel: call as_consumer first")
        deadline = Deadline.after(self._timeout(timeout))
        with self._consuming:
            if self.settings.auto_ack and self._unacked is not None:
                self.ack(self._unacked)
            self._hold.check()
            pack = self._consume(deadline)
            self._hold.check()  # it may have waited longer than its lease
            pack.trace_ctx = common_trace_ctx(pack.msgs)
            self._unacked = pack
        if pack.refused and self.settings.on_refused == "raise":
            first = pack.refused[0]
            raise MessagesRefused(
                f"{len(pack.refused)} messages cannot be delivered; the first, on {first.position.channel_name}, is "
                f"{first.reason}: {first.detail}",
                pack=pack,
            )
        return pack

    def ack(self, pack: MsgPack) -> None:
        """See MsgStream.ack. A pack before the acknowledged position moves nothing."""
        self._check_open()
        self._hold.check()
        with self._acking:
            for position in pack.end_positions:
                channel = self._channels.get(position.channel_name)
                if channel is None or position.msg_group != channel.group:
                    raise InvalidArgument("this pack belongs to another stream or group: acknowledge it there")
            self._acknowledging(pack)
            for position in pack.end_positions:
                channel, log_id = self._channels[position.channel_name], position.log_id
                if channel.group and (channel.acked is None or log_id > channel.acked):
                    self._service.move_group(channel.group, channel.name, log_id)
                    channel.acked = log_id
            if self._unacked is pack:
                self._unacked = None

    def seek(self, offset: MsgPosition | Sequence[MsgPosition]) -> None:
        """See MsgStream.seek.

        Raises ChannelNotFound for a channel that is not consumed.
        """
        self._check_open()
        positions = [offset] if isinstance(offset, MsgPosition) else list(offset)
        with self._consuming:
            for position in positions:
                if position.channel_name not in self._channels:
                    raise ChannelNotFound(f"this stream does not consume from {position.channel_name!r}")
                _ = position.log_id
            for position in positions:
                channel = self._channels[position.channel_name]
                channel.acked = None
                self._sought(channel, position)
            self._unacked = None

    def chan(self, *, idle_timeout: float | None = None) -> Iterator[MsgPack]:
        """See MsgStream.chan."""
        idle_until = Deadline.after(idle_timeout or 0.0)
        while not self._closed:
            left = idle_until.remaining() if idle_timeout is not None else self.settings.timeout
            try:
                pack = self.consume(timeout=left)
            except DeadlineExceeded:
                if idle_timeout is not None:
                    return
                continue
            except StreamClosed:
                return
            yield pack
            idle_until = Deadline.after(idle_timeout or 0.0)

    def __iter__(self) -> Iterator[MsgPack]:
        return self.chan()

    # Beginning and end

    def start(self) -> None:
        """See MsgStream.start."""
        self._check_open()
        self._started = True

    def close(self) -> None:
        """See MsgStream.close."""
        self._closed = True
        with self._consuming:  # a consume under way ends within WAIT_SLICE
            channels, self._channels = self._channels, {}
        self._hold.close()
        for channel in channels.values():
            channel.log.close()
        self._producer.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For the kinds of stream

    @abstractmethod
    def _opened(self, name: str, log: Log, group: str, position: LogId, *, known: bool) -> ChannelT:
        """Return a channel to consume from `position` on; `known`: the group had this position."""

    def _forget(self, name: str, group: str) -> None:
        """Make durable what must be durable before a group starts in a channel."""

    def _acknowledging(self, pack: MsgPack) -> None:
        """Make durable what must be durable before the group moves after `pack`."""

    @abstractmethod
    def _sought(self, channel: ChannelT, position: MsgPosition) -> None:
        """Move a channel."""

    @abstractmethod
    def _consume(self, deadline: Deadline) -> MsgPack:
        """Return the next pack.

        Raises DeadlineExceeded, StreamClosed, and the log's errors; the stream's position is unchanged then.
        """

    def _unmarshal(self, value: bytes) -> TsMsg:
        """Return the message of a log entry.

        Raises Malformed, UnsupportedVersion, UnsupportedMessageType.
        """
        if self._handover is not None:
            msg = self._handover.get(value)
            return self._dispatcher.unmarshal(msg, msg.type)
        return self._dispatcher.unmarshal(value, msg_type(wire.peek_type(value)))

    def _wait(self, channel: ChannelT, position: LogId, deadline: Deadline, *, at_most: float) -> LogEntries:
        """Return entries from `position` on, or none after a while."""
        if self._closed:
            raise StreamClosed("the stream was closed while it waited for messages")
        return channel.log.read(
            position, max_bytes=self.settings.read_bytes, timeout=deadline.remaining(maximum=at_most)
        )

    def _timeout(self, timeout: float | None) -> float:
        return self.settings.timeout if timeout is None else timeout

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed("this stream is closed: create another")

    def _check_started(self) -> None:
        self._check_open()
        if not self._started:
            raise InvalidArgument("this stream is not started: call start, or use it as a context manager")


UNREADABLE_ERRORS: Final = (Malformed, UnsupportedVersion, UnsupportedMessageType)
"""Errors of a template for bytes that are not a message of its type."""


class _PlainChannel(ConsumedChannel):
    """A plain stream's position in a channel."""

    def __init__(self, name: str, log: Log, group: str, position: LogId) -> None:
        super().__init__(name, log, group)
        self.at = self.position(position, 0)


class LogMsgStream(BaseStream[_PlainChannel]):
    """The plain stream: a pack holds the messages that have arrived on any channel, about ``read_bytes`` of each, with
    ticks.

    Order is kept per channel. After a seek the same messages come again, perhaps in other packs.
    """

    def _opened(self, name: str, log: Log, group: str, position: LogId, *, known: bool) -> _PlainChannel:
        return _PlainChannel(name, log, group, position)

    def _sought(self, channel: _PlainChannel, position: MsgPosition) -> None:
        channel.at = channel.position(position.log_id, position.timestamp)

    def _consume(self, deadline: Deadline) -> MsgPack:
        channels = list(self._channels.values())
        runs = {channel.name: self._wait(channel, channel.at.log_id, deadline, at_most=0.0) for channel in channels}
        # Only one log can be waited for at a time: wait for each in turn, a little longer each round.
        first, longest = (_FIRST_WAIT, WAIT_SLICE / 2) if len(channels) > 1 else (WAIT_SLICE, WAIT_SLICE)
        backoff = Backoff(first, longest, jitter=False)
        pause, turn = backoff.next_delay(), 0
        while not any(run.batch.num_rows for run in runs.values()):
            if deadline.expired():
                raise DeadlineExceeded(f"no message came on {', '.join(runs)}")
            channel = channels[turn % len(channels)]
            turn += 1
            runs[channel.name] = self._wait(channel, channel.at.log_id, deadline, at_most=pause)
            if turn % len(channels) == 0:
                pause = backoff.next_delay()
        return self._packed(channels, runs)

    def _packed(self, channels: list[_PlainChannel], runs: Mapping[str, LogEntries]) -> MsgPack:
        pack = MsgPack(start_positions=[channel.at for channel in channels])
        ends: list[MsgPosition] = []
        for channel in channels:
            run, newest = runs[channel.name], channel.at.timestamp
            for log_id, value in entries_of(run):
                position = channel.position(log_id, newest)
                try:
                    msg = self._unmarshal(value)
                except UNREADABLE_ERRORS as error:
                    pack.refused.append(RefusedMsg(position, "malformed", str(error), value))
                    continue
                msg.position = position
                pack.msgs.append(msg)
                newest = max(newest, msg.end_ts)
            ends.append(channel.position(run.next, newest) if run.batch.num_rows else channel.at)
        for channel, position in zip(channels, ends, strict=True):
            channel.at = position
        pack.end_positions = ends
        pack.begin_ts = min((msg.begin_ts for msg in pack.msgs), default=0)
        pack.end_ts = max((msg.end_ts for msg in pack.msgs), default=0)
        return pack


def entries_of(run: LogEntries) -> Iterator[tuple[LogId, bytes]]:
    """Return id and value of each entry of a run."""
    batch = run.batch
    ids = map(LogId, batch.column("ledger").to_pylist(), batch.column("entry").to_pylist())
    return zip(ids, batch.column("value").to_pylist(), strict=True)
