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
from contextlib import suppress
from copy import copy
from typing import Final

import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, MillraceError
from millrace.rpc.bundles import MAX_APPENDS, Answer, BundledAppend, decode_answers, encode_bundle
from millrace.rpc.link import ConnectionLost, ExchangeStream, Link
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.wire import APPEND_ROLE

SINGLES: Final = 2
"""Appends of a connection that are in flight on their own before further ones are bundled."""
SMALL_BYTES: Final = 64 << 10
"""Size up to which an append is bundled: a larger one costs more than its message."""
BUNDLE_BYTES: Final = 1 << 20


class _Waiting:
    """An append that waits for its place in a bundle, and then for its answer."""

    __slots__ = ("answer", "bundled", "leads", "turn")

    def __init__(self, bundled: BundledAppend) -> None:
        self.bundled = bundled
        self.turn = threading.Lock()
        self.turn.acquire()
        self.leads = False
        """Whether it was woken to lead."""
        self.answer: Answer | None = None

    def outcome(self) -> AppendOutcome:
        assert self.answer is not None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class BundledAppends:
    """The appends of one connection to the append host. Thread-safe.

    `margin` is how many seconds longer than the server the client waits for an answer.
    """

    def __init__(self, link: Link, *, margin: float) -> None:
        self._link = link
        self._margin = margin
        self._lock = threading.Lock()
        self._singles = 0
        self._waiting: deque[_Waiting] = deque()
        self._leading = False
        self._refused = False
        """Whether the server is of a build that knows no bundles."""
        self._stream: ExchangeStream | None = None

    def append(
        self, pchannel: str, values: pa.LargeBinaryArray, deadline: Deadline, alone: Callable[[], AppendOutcome]
    ) -> AppendOutcome:
        """Append entries by `alone`, or in a bundle. Raises what `alone` raises."""
        own: _Waiting | None = None
        with self._lock:
            if self._refused or values.nbytes > SMALL_BYTES or (self._singles < SINGLES and not self._waiting):
                self._singles += 1
            else:
                own = _Waiting(BundledAppend(pchannel, values, deadline))
                self._waiting.append(own)
                leads, self._leading = not self._leading, True
        if own is None:
            try:
                return alone()
            finally:
                with self._lock:
                    self._singles -= 1
        if not leads:
            self._wait(own)
        if own.answer is None:
            self._lead(own)
        if self._refused and isinstance(own.answer, _Refused):
            return alone()
        return own.outcome()

    def close(self) -> None:
        """Close the stream; a bundle in flight is ambiguous. Idempotent."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _wait(self, own: _Waiting) -> None:
        """Wait for the answer, or for the lead."""
        try:
            own.turn.acquire()
        except BaseException:  # interrupted: it is not sent if it was not yet
            with self._lock:
                with suppress(ValueError):
                    self._waiting.remove(own)
                leads = own.leads
            if leads:
                self._hand_over()
            raise

    def _lead(self, own: _Waiting) -> None:
        """Send what waits until `own` has its answer; then hand over."""
        try:
            while own.answer is None:
                with self._lock:
                    taken = self._take()
                self._exchange(taken)
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            if self._waiting:
                following = self._waiting[0]
                following.leads = True
                following.turn.release()
            else:
                self._leading = False

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and len(taken) < MAX_APPENDS:
            size += self._waiting[0].bundled.values.nbytes
            if taken and size > BUNDLE_BYTES:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _exchange(self, taken: Sequence[_Waiting]) -> None:
        """Send a bundle and tell each append its answer, whatever happens."""
        answers: Sequence[Answer] = ()
        fault: Exception = ConnectionLost("the thread that sent this append for others was interrupted")
        try:
            answers = self._answers([each.bundled for each in taken])
        except Exception as error:
            fault = error
        finally:
            if not answers:
                self.close()
            for place, each in enumerate(taken):
                each.answer = answers[place] if answers else _alike(fault)
                if not each.leads:
                    with suppress(RuntimeError):
                        each.turn.release()

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


def _alike(error: Exception) -> Exception:
    """Return an error of its own for one of several callers."""
    if isinstance(error, ConnectionLost):
        return ConnectionLost(str(error), sent=error.sent)
    if isinstance(error, MillraceError):
        return copy(error)
    return ConnectionLost(f"{type(error).__name__}: {error}")
