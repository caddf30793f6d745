"""Positions and packs: the output of a message stream, and the input of its ``seek`` (chapter 4, A.3)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from millrace.base.errors import InvalidArgument
from millrace.message.ids import LogId

if TYPE_CHECKING:
    from millrace.msgstream.protocol import TsMsg

_ID: Final = struct.Struct(">QQ")


def id_to_bytes(position: LogId) -> bytes:
    """Return a position in a channel's log as 16 bytes, big-endian, which sort as positions do."""
    return _ID.pack(*position)


class MsgPosition(NamedTuple):
    """A position in one channel, between messages.

    ``msg_id`` (16 bytes, opaque to callers) names the first relevant log entry from here on; ``timestamp`` the time
    up to which everything was delivered (0: unknown). A plain stream uses ``msg_id`` only, a time-tick stream both.
    """

    channel_name: str
    msg_id: bytes
    msg_group: str = ""
    timestamp: int = 0

    @property
    def log_id(self) -> LogId:
        """The log entry of ``msg_id``. Raises InvalidArgument for a wrong length."""
        if len(self.msg_id) != _ID.size:
            raise InvalidArgument(f"a position's msg_id must have {_ID.size} bytes, not {len(self.msg_id)}")
        return LogId(*_ID.unpack(self.msg_id))

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON object, for a caller's own store."""
        return {
            "channel_name": self.channel_name,
            "msg_id": self.msg_id.hex(),
            "msg_group": self.msg_group,
            "timestamp": self.timestamp,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises InvalidArgument.
        """
        match value:
            case {
                "channel_name": str(name),
                "msg_id": str(msg_id),
                "msg_group": str(group),
                "timestamp": int(timestamp),
            }:
                try:
                    position = cls(name, bytes.fromhex(msg_id), group, timestamp)
                    _ = position.log_id
                    return position
                except ValueError:
                    pass
        raise InvalidArgument("a position must be an object with channel_name, msg_id, msg_group and timestamp")


@dataclass(frozen=True, slots=True)
class RefusedMsg:
    """A log entry that cannot be delivered, and the reason.

    ``late``: a time tick at or after its time preceded the message on its channel. ``malformed``: the bytes are not a
    message, or have an unknown type or version; ``msg`` is None then.
    """

    position: MsgPosition
    reason: Literal["late", "malformed"]
    detail: str
    payload: bytes
    msg: TsMsg | None = None


@dataclass(slots=True)
class MsgPack:
    """Messages with the positions of all channels of the stream before and after them.

    From a time-tick stream: all messages with begin_ts < end timestamp <= end_ts, in order of timestamps. ``refused``
    holds undeliverable entries, if there are any.
    """

    msgs: list[TsMsg] = field(default_factory=list)
    begin_ts: int = 0
    end_ts: int = 0
    start_positions: list[MsgPosition] = field(default_factory=list)
    end_positions: list[MsgPosition] = field(default_factory=list)
    refused: list[RefusedMsg] = field(default_factory=list)
    trace_ctx: Mapping[str, str] = field(default_factory=dict)
    """The pack's own trace context.

    To produce: that of its messages that have none. Consumed: what all of its messages have in common, so that a pack
    of one trace continues it; a message keeps its own.
    """


def common_trace_ctx(msgs: Sequence[TsMsg]) -> dict[str, str]:
    """Return the entries that the trace contexts of all messages have; empty for messages of different traces."""
    if not msgs or not msgs[0].trace_ctx:
        return {}
    common = dict(msgs[0].trace_ctx)
    for msg in msgs:
        if msg.trace_ctx != common:
            common = {key: value for key, value in common.items() if msg.trace_ctx.get(key) == value}
            if not common:
                break
    return common
