"""Bundles: small appends to several PChannels of one server that are made at once share a message.

A call for rows of many VChannels is an append for each of their PChannels. Each message costs its client and its server
milliseconds, whatever it holds. So while SINGLES appends are in flight on a connection, further small ones wait for
each other: one of their threads leads, and sends what waits as one message. An append that is alone is not delayed.

Each append of a bundle has its own answer, and is in the log on its own. If a bundle's answer is lost, it is unknown of
each append whether it is in the log.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, TypeAlias

import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, MillraceError
from millrace.base.group_commit import GroupCommit, Waiter
from millrace.rpc.bundles import MAX_APPENDS, Answer, BundledAppend, decode_answers, encode_bundle
from millrace.rpc.link import ConnectionLost, ExchangeStream, Link
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.wire import APPEND_ROLE

SINGLES: Final = 2
"""Appends of a connection that are in flight on their own before further ones are bundled."""
SMALL_BYTES: Final = 64 << 10
"""Size up to which an append is bundled: a larger one costs more than its message."""
BUNDLE_BYTES: Final = 1 << 20

_Waiting: TypeAlias = Waiter[BundledAppend, AppendOutcome]


class BundledAppends:
    """The appends of one connection to the append host. Thread-safe.

    `margin` is how many seconds longer than the server the client waits for an answer.
    """

    def __init__(self, link: Link, *, margin: float) -> None:
        self._link = link
        self._margin = margin
        self._lock = threading.Lock()
        self._singles = 0
        self._group = GroupCommit(_take, self._exchange, interrupted=_interrupted, copy=_alike)
        self._refused = False
        """Whether the server is of a build that knows no bundles."""
        self._stream: ExchangeStream | None = None

    def append(
        self, pchannel: str, values: pa.LargeBinaryArray, deadline: Deadline, alone: Callable[[], AppendOutcome]
    ) -> AppendOutcome:
        """Append entries by `alone`, or in a bundle. Raises what `alone` raises."""
        with self._lock:
            single = self._refused or values.nbytes > SMALL_BYTES
            single = single or (self._singles < SINGLES and not self._group.waiting)
            self._singles += single
        if single:
            try:
                return alone()
            finally:
                with self._lock:
                    self._singles -= 1
        try:
            return self._group.commit(BundledAppend(pchannel, values, deadline))
        except _Refused:
            return alone()

    def close(self) -> None:
        """Close the stream; a bundle in flight is ambiguous. Idempotent."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _exchange(self, taken: Sequence[_Waiting]) -> None:
        """Send a bundle and set each append's answer."""
        try:
            answers = self._answers([each.item for each in taken])
        except BaseException:
            self.close()
            raise
        for each, answer in zip(taken, answers, strict=True):
            each.answer = answer

    def _answers(self, appends: Sequence[BundledAppend]) -> list[Answer]:
        stream = self._stream
        if stream is None or stream.ended:
            stream = self._stream = ExchangeStream(self._link, {"extension": APPEND_ROLE, "bundles": True})
        values, metadata = encode_bundle(appends)
        last = max((each.deadline for each in appends), key=lambda each: each.remaining())
        try:
            stream.request(values, metadata, deadline=last.extended(self._margin))
            chunk = stream.answer(deadline=last.extended(self._margin))
        except InvalidArgument:
            self._refused = True  # of the stream, by an earlier build: nothing was appended
            return [_Refused() for _ in appends]
        return decode_answers(chunk, len(appends))


class _Refused(Exception):
    """The server knows no bundles."""


def _take(waiting: deque[_Waiting]) -> list[_Waiting]:
    taken: list[_Waiting] = []
    size = 0
    while waiting and len(taken) < MAX_APPENDS:
        size += waiting[0].item.values.nbytes
        if taken and size > BUNDLE_BYTES:
            break
        taken.append(waiting.popleft())
    return taken


def _interrupted() -> Exception:
    return ConnectionLost("the thread that sent this append for others was interrupted")


def _alike(error: Exception) -> Exception:
    """Return an error of its own for one of several callers."""
    if isinstance(error, ConnectionLost):
        return ConnectionLost(str(error), sent=error.sent)
    if isinstance(error, MillraceError):
        return copy(error)
    return ConnectionLost(f"{type(error).__name__}: {error}")
