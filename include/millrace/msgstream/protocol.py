"""The interfaces of chapter 4 (A.3), in Python's names: TsMsg, unmarshalling, MsgStream and its factory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from millrace.message.ids import LogId
from millrace.message.types import MessageType
from millrace.msgstream.pack import MsgPack, MsgPosition

MsgType = MessageType
"""Chapter 4's ``MsgType``: the same enumeration as everywhere in Millrace, with the chapter's numbers."""


class TsMsg(Protocol):
    """A message with time stamps. Assigning ``trace_ctx`` and ``position`` is the chapter's SetTraceCtx and SetPosition."""

    id: int
    begin_ts: int
    end_ts: int
    source_id: int
    hash_keys: tuple[int, ...]
    trace_ctx: Mapping[str, str]
    position: MsgPosition | None

    @property
    def type(self) -> MsgType:
        """What kind of message this is."""
        ...

    def marshal(self) -> bytes:
        """The wire form (docs/msgstream.md). Raises InvalidArgument for values that it cannot hold."""
        ...

    @classmethod
    def unmarshal(cls, data: bytes) -> Self:
        """Inverse of :meth:`marshal`. Raises Malformed, UnsupportedVersion, UnsupportedMessageType."""
        ...


UnmarshalFunc = Callable[[Any], TsMsg]
"""Makes a message of its marshalled form; raises Malformed where it is none."""

RepackFunc = Callable[[Sequence[TsMsg], Sequence[Sequence[int]]], Mapping[int, MsgPack]]
"""Divides messages among channels.

Takes the messages and, for each, its hash keys modulo the number of channels; gives the pack of each channel's number.
"""


class UnmarshalDispatcher(Protocol):
    """Makes messages of their marshalled form, by type."""

    def unmarshal(self, input: Any, msg_type: MsgType) -> TsMsg:
        """The message. Raises Malformed, UnsupportedVersion; UnsupportedMessageType where the type has no template."""
        ...

    def add_msg_template(self, msg_type: MsgType, unmarshal_func: UnmarshalFunc) -> None:
        """Use `unmarshal_func` for messages of `msg_type` from now on."""
        ...


class UnmarshalDispatcherFactory(Protocol):
    """Makes a dispatcher for each stream, so that a template added to one changes no other."""

    def new_unmarshal_dispatcher(self) -> UnmarshalDispatcher: ...


class MsgStream(Protocol):
    """Messages to and from channels. Thread-safe: one thread may consume while others produce, acknowledge or close."""

    def start(self) -> None:
        """Begin; entering the stream as a context manager does the same. Idempotent."""
        ...

    def close(self) -> None:
        """End: a waiting consume raises StreamClosed, an iteration ends. Acknowledges nothing. Idempotent."""
        ...

    def as_producer(self, channels: Sequence[str]) -> None:
        """Produce to `channels` from now on, numbered in this order. Raises ChannelNotFound."""
        ...

    def as_consumer(
        self, channels: Sequence[str], sub_name: str = "", *, start: Literal["earliest", "latest"] = "earliest"
    ) -> None:
        """Consume `channels` too, as consumer group `sub_name` ("": as none), from where the group stands.

        A group without a position in a channel begins at `start`, durably. Raises ChannelNotFound.
        """
        ...

    def set_repack_func(self, repack_func: RepackFunc | None) -> None:
        """How produce divides messages among channels; None: millrace.msgstream.repack.default_repack."""
        ...

    def produce(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """Append the pack's messages, each to the channel of its hash keys; durable when this returns. The entries a channel.

        Each channel's messages are one atomic batch, the pack as a whole is not: a note on the error says which were done.
        Messages without a trace context get `trace_ctx`. Raises what the log's append raises; DeadlineExceeded.
        """
        ...

    def broadcast(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """Append all of the pack's messages to every channel; otherwise as :meth:`produce`."""
        ...

    def consume(self, *, timeout: float | None = None) -> MsgPack:
        """The next pack; acknowledges the one before (unless the stream's ``auto_ack`` is off).

        Raises DeadlineExceeded where none came within `timeout` seconds, StreamClosed, what the log's read raises
        (PositionTruncated, LogUnavailable); the next call goes on from there.
        """
        ...

    def ack(self, pack: MsgPack) -> None:
        """The pack, and all before it, is done: move the group behind it, durably. Nothing without a group."""
        ...

    def seek(self, offset: MsgPosition | Sequence[MsgPosition]) -> None:
        """Go to positions that this stream or another gave out; channels not named stay. Moves no group before an ack."""
        ...

    def chan(self, *, idle_timeout: float | None = None) -> Iterator[MsgPack]:
        """Packs as they come, until the stream is closed, or nothing came for `idle_timeout` seconds; so does iteration."""
        ...

    def __iter__(self) -> Iterator[MsgPack]: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class MsgStreamFactory(Protocol):
    """Makes streams on one log service."""

    def set_params(self, params: Mapping[str, object]) -> None:
        """Settings of the streams made from now on (millrace.msgstream.settings). Raises InvalidSettings."""
        ...

    def new_msg_stream(self) -> MsgStream:
        """A stream whose packs are what has arrived."""
        ...

    def new_tt_msg_stream(self) -> MsgStream:
        """A stream whose packs are what lies between two time ticks over all its channels."""
        ...
