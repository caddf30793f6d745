"""The interfaces of chapter 4 (A.3) in Python names: TsMsg, unmarshalling, MsgStream and its factory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from millrace.message.ids import LogId
from millrace.message.types import MessageType
from millrace.msgstream.pack import MsgPack, MsgPosition

MsgType = MessageType
"""Chapter 4's ``MsgType``: Millrace's message types, with the chapter's numbers."""


class TsMsg(Protocol):
    """A message with timestamps. Assigning ``trace_ctx`` and ``position`` corresponds to SetTraceCtx and
    SetPosition.
    """

    id: int
    begin_ts: int
    end_ts: int
    source_id: int
    hash_keys: tuple[int, ...]
    trace_ctx: Mapping[str, str]
    position: MsgPosition | None

    @property
    def type(self) -> MsgType:
        """Type of this message."""
        ...

    def marshal(self) -> bytes:
        """Return the wire form (docs/msgstream.md).

        Raises InvalidArgument for values that it cannot hold.
        """
        ...

    @classmethod
    def unmarshal(cls, data: bytes) -> Self:
        """Inverse of :meth:`marshal`.

        Raises Malformed, UnsupportedVersion, UnsupportedMessageType.
        """
        ...


UnmarshalFunc = Callable[[Any], TsMsg]
"""Returns the message of a marshalled form; raises Malformed if it is not one."""

RepackFunc = Callable[[Sequence[TsMsg], Sequence[Sequence[int]]], Mapping[int, MsgPack]]
"""Distributes messages to channels.

Takes the messages and, for each, its hash keys modulo the number of channels; returns the pack of each channel
number.
"""


class UnmarshalDispatcher(Protocol):
    """Unmarshals messages by type."""

    def unmarshal(self, input: Any, msg_type: MsgType) -> TsMsg:
        """Return the message.

        Raises Malformed, UnsupportedVersion, UnsupportedMessageType if the type has no template.
        """
        ...

    def add_msg_template(self, msg_type: MsgType, unmarshal_func: UnmarshalFunc) -> None:
        """Use `unmarshal_func` for messages of `msg_type` from now on."""
        ...


class UnmarshalDispatcherFactory(Protocol):
    """Creates a dispatcher for each stream, so that a template added to one affects no other."""

    def new_unmarshal_dispatcher(self) -> UnmarshalDispatcher: ...


class MsgStream(Protocol):
    """Sends and receives messages on channels.

    Thread-safe: one thread may consume while others produce, acknowledge or close.
    """

    def start(self) -> None:
        """Start the stream; entering it as a context manager does the same. Idempotent."""
        ...

    def close(self) -> None:
        """Close the stream: a waiting consume raises StreamClosed, an iteration ends. Acknowledges nothing.
        Idempotent.
        """
        ...

    def as_producer(self, channels: Sequence[str]) -> None:
        """Produce to `channels` from now on, numbered in this order.

        Raises ChannelNotFound.
        """
        ...

    def as_consumer(
        self, channels: Sequence[str], sub_name: str = "", *, start: Literal["earliest", "latest"] = "earliest"
    ) -> None:
        """Also consume `channels`, as consumer group `sub_name` ("": without a group), from the group's position.

        A group without a position in a channel starts at `start`, durably. Of several streams of a group, one
        consumes a channel.
        Raises ChannelNotFound, and GroupBusy if another stream of the group consumes one of the channels.
        """
        ...

    def set_repack_func(self, repack_func: RepackFunc | None) -> None:
        """Set how produce distributes messages; None: millrace.msgstream.repack.default_repack."""
        ...

    def produce(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """Append the pack's messages, each to the channel of its hash keys; return the ids per channel when all are
        durable.

        Each channel's messages are one atomic batch; the pack as a whole is not atomic. A note on an error lists the
        finished channels. Messages without a trace context get the pack's, or else
        `trace_ctx`.
        Raises the log's append errors, DeadlineExceeded.
        """
        ...

    def broadcast(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """Append all messages of the pack to every channel; otherwise as :meth:`produce`."""
        ...

    def consume(self, *, timeout: float | None = None) -> MsgPack:
        """Return the next pack; acknowledge the previous one (unless the stream's ``auto_ack`` is off).

        Raises DeadlineExceeded if none came within `timeout` seconds, StreamClosed, and the log's read errors
        (PositionTruncated, LogUnavailable). The next call continues. Raises GroupBusy if this stream was away for
        longer than its lease and another one consumes its channels: close it.
        """
        ...

    def ack(self, pack: MsgPack) -> None:
        """Acknowledge the pack and all before it: move the group after it, durably. No effect without a group."""
        ...

    def seek(self, offset: MsgPosition | Sequence[MsgPosition]) -> None:
        """Move to positions that this or another stream returned. Other channels stay. Moves no group before an ack."""
        ...

    def chan(self, *, idle_timeout: float | None = None) -> Iterator[MsgPack]:
        """Yield packs until the stream is closed, or nothing came for `idle_timeout` seconds. Iteration does
        the same.
        """
        ...

    def __iter__(self) -> Iterator[MsgPack]: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class MsgStreamFactory(Protocol):
    """Creates streams on one log service."""

    def set_params(self, params: Mapping[str, object]) -> None:
        """Set options of streams created from now on (millrace.msgstream.settings).

        Raises InvalidSettings.
        """
        ...

    def new_msg_stream(self) -> MsgStream:
        """Return a stream whose packs are the messages that have arrived."""
        ...

    def new_tt_msg_stream(self) -> MsgStream:
        """Return a stream whose packs are the messages between two time ticks over all its channels."""
        ...
