"""Short ways to say messages, ticks and what a stream gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.log.protocol import LogService
from millrace.message.types import MessageType
from millrace.msgstream.messages import GenericMsg, TimeTickMsg
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.protocol import MsgStream


def message(ts: int, id: int = 0, *, key: int = 0, payload: bytes = b"") -> GenericMsg:
    return GenericMsg(id=id, begin_ts=ts, hash_keys=(key,), msg_type=MessageType.SEARCH, payload=payload)


def append(service: LogService, channel: str, items: Iterable[str]) -> None:
    """Append to a channel what is written as "12" (a message of that time), "12#3" (with id 3),
    "t12" (a tick), "?" (no message).
    """
    values = []
    for item in items:
        if item == "?":
            values.append(b"no message at all")
        elif item.startswith("t"):
            values.append(TimeTickMsg(begin_ts=int(item[1:])).marshal())
        else:
            ts, _, number = item.partition("#")
            values.append(message(int(ts), int(number or 0)).marshal())
    log = service.open(channel)
    log.append(values)
    log.close()


def times(pack: MsgPack) -> list[int]:
    return [msg.end_ts for msg in pack.msgs]


def consumed(stream: MsgStream, count: int, *, timeout: float = 20.0) -> list[MsgPack]:
    return [stream.consume(timeout=timeout) for _ in range(count)]


def ids(packs: Sequence[MsgPack]) -> list[int]:
    return [msg.id for pack in packs for msg in pack.msgs]
