"""Group commit: the calls of one producer that wait for a PChannel share its next messages.

Threads, tasks and batches put the pieces of their calls into one queue for each PChannel. One thread at a time leads:
it takes what is queued, delivers it through the lane and ends every call of it. While a message is in flight, the calls
that arrive form the next one. A thread whose call finds no leader leads at once, so a caller that is alone pays for no
hand-over and no delay. It leads until its own call has ended and then hands over to the first thread that still waits,
so that no caller serves others for long. What no thread waits for (a batch, tasks, calls for several PChannels) is led
by a thread of the sender.

One caller's calls keep their order, because the queue does. The calls of an entry whose outcome is unknown fail with
AppendUnresolved, as do the threads that wait after it: all of it is held by the lane and sent before anything else.
Calls of a batch or of tasks that were not sent yet keep waiting for the log.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from millrace.base.backoff import jittered
from millrace.base.errors import AppendUnresolved, Closed, LogUnavailable, SpoolFull
from millrace.client.produce.channel_queue import Call, ChannelQueue, EntryContents, Piece, fail_pieces
from millrace.client.produce.lane import Lane
from millrace.client.produce.rows import ENTRY_BYTES, MESSAGE_BYTES
from millrace.client.produce.sequencer import OutboundEntry
from millrace.client.produce.written import Written

if TYPE_CHECKING:
    from millrace.client.spool.sender import SpoolSender

GATHER_SECONDS: Final = 0.002
"""Maximum time for which a leader lets the callers of the last message come back for the next one.

The callers were all answered at once and need a moment to make their next calls: without it, the first of them would
be sent alone each time. A leader waits only while calls keep coming, and not at all if the last message had one caller.
"""

_GATHER_STEP: Final = 0.0005


class WaitingCall(Call):
    """A call whose thread waits for it, on a lock of its own: no thread wakes in vain."""

    __slots__ = ("leads", "turn")

    waits = True

    def __init__(self) -> None:
        super().__init__()
        self.turn = threading.Lock()
        self.turn.acquire()
        self.leads = False
        """Whether it was woken to lead."""

    def finish(self) -> None:
        try:
            self.turn.release()
        except RuntimeError:
            pass  # it was just woken to lead


class ChannelSender:
    """The queue of one producer's calls for one PChannel, and who leads. Thread-safe."""

    def __init__(
        self,
        pchannel: str,
        lane: Callable[[], Lane],
        *,
        settling: threading.Lock,
        spool: SpoolSender | None = None,
        retry_delay: float = 1.0,
    ) -> None:
        """`lane` returns the lane, which may take a remote call. `settling` is shared by the producer's senders."""
        self.pchannel = pchannel
        self._lane = lane
        self._spool = spool
        self._settling = settling
        self._retry_delay = retry_delay
        self._changed = threading.Condition(threading.Lock())
        self._queue = ChannelQueue()
        self._due = inf
        """Time at which the sender's own thread leads, if no other does."""
        self._leading = False
        self._waiting: deque[WaitingCall] = deque()
        self._drawn: list[OutboundEntry] = []
        """Entries that were taken from the queue and are not settled."""
        self._shared_calls = 0
        """Calls of threads and tasks that shared the last entry: their callers are likely to come back."""
        self._gathering = 0
        """Pieces that a leader waits for."""
        self._gathered = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    # --- callers ------------------------------------------------------------------------------------------------------

    def run(self, call: WaitingCall, pieces: Sequence[Piece]) -> Written:
        """Append the pieces and wait for their outcome. Raises the call's error."""
        with self._changed:
            self._enter(pieces)
            leads = not self._leading
            if leads:
                self._leading = True
            else:
                self._waiting.append(call)
        if not leads:
            try:
                call.turn.acquire()
            except BaseException:  # interrupted while it waited
                self.leave(call)
                raise
            leads = call.leads
        if leads:
            self._lead(call)
        return call.result()

    def add(self, pieces: Sequence[Piece], *, due: float = 0.0, bytes: int = 0, count: int = 0) -> None:
        """Queue pieces that no thread here waits for.

        They are sent at `due` (a monotonic time), or before with others, or once the queue has `bytes` bytes or `count`
        pieces (0: any).
        """
        with self._changed:
            self._enter(pieces)
            if (self._queue.bytes >= bytes and (bytes or not count)) or 0 < count <= len(self._queue.pieces):
                due = 0.0
            if due < self._due:
                self._due = due
                self._call_thread()

    def hurry(self) -> None:
        """Send the queue without waiting for its time."""
        with self._changed:
            if self._queue.pieces:
                self._due = 0.0
                self._call_thread()

    def drop(self, calls: Iterable[Call], error: BaseException) -> None:
        """End with `error` what is queued of these calls: it is not sent."""
        with self._changed:
            dropped = self._queue.remove(calls)
        fail_pieces(dropped, error, self._settling)

    def leave(self, call: WaitingCall) -> None:
        """Withdraw a call whose thread was interrupted: what is queued of it is not sent."""
        with self._settling:
            call.ended = True
        with self._changed:
            self._queue.remove([call])
            leads = call.leads
        if leads:
            self._hand_over()

    def close(self) -> None:
        """End the sender's thread; what is still queued fails with LogUnavailable. Idempotent."""
        with self._changed:
            self._closed = True
            left, self._queue = self._queue, ChannelQueue()
            self._changed.notify_all()
        words = "the producer was closed before this was sent: it is not in the log"
        fail_pieces(left.pieces, LogUnavailable(words), self._settling)

    def _enter(self, pieces: Sequence[Piece]) -> None:
        if self._closed:
            raise Closed("this producer is closed: make a new one")
        self._queue.add(pieces)
        if 0 < self._gathering <= len(self._queue.pieces):
            self._gathered.set()

    # --- the lead -----------------------------------------------------------------------------------------------------

    def _lead(self, own: WaitingCall | None) -> None:
        """Deliver what is queued until `own` has ended, or nothing is due; then hand over."""
        try:
            while True:
                self._deliver(own)
                if own is None or own.ended:
                    return
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the lead to the first thread that still waits, else to the sender's own thread if anything is left."""
        with self._changed:
            while self._waiting:
                call = self._waiting.popleft()
                if not call.ended:
                    call.leads = True
                    call.turn.release()
                    return
            self._leading = False
            if self._queue.pieces or self._drawn:
                self._call_thread()

    def _call_thread(self) -> None:
        """Have the sender's thread look at the queue, if nobody leads. The caller holds the lock."""
        if self._leading or self._closed:
            return
        if self._thread is None:
            name = f"sender-{self.pchannel}"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()
        self._changed.notify()

    def _serve(self) -> None:
        while self._wait_until_due():
            self._lead(None)

    def _wait_until_due(self) -> bool:
        """Wait until the sender's thread should lead, and take the lead; False once it is closed."""
        with self._changed:
            while not self._closed:
                if self._leading:
                    self._changed.wait()
                elif self._drawn:
                    break
                elif not self._queue.pieces:
                    self._due = inf
                    self._changed.wait()
                elif (left := self._due - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    break
            else:
                return False
            self._leading = True
            return True

    # --- sending ------------------------------------------------------------------------------------------------------

    def _deliver(self, own: WaitingCall | None) -> None:
        try:
            lane = self._lane()
            if lane.resumed and self._spool is None:
                self._send_first(lane)
                return
            several = self._has_several()
            source = partial(self._next, own, lane, several)
            if self._spool is None:
                lane.deliver(source, pipelined=several)
            else:
                self._spool.deliver(self.pchannel, source, size=self._unchecked_size, pipelined=several)
        except SpoolFull as error:
            self._refuse_waiting(error)
            if own is None:  # the others keep waiting, and their buffers fill up
                with self._changed:
                    self._changed.wait(jittered(self._retry_delay))
        except AppendUnresolved as error:
            self._hold(error)
        except Exception as error:  # even a bug: no caller may wait forever
            self._fail(error)
        except BaseException:  # interrupted
            self._recall(own)
            raise

    def _has_several(self) -> bool:
        """Return whether what is queued is worth several entries in flight; small calls are one entry at a time."""
        with self._changed:
            pieces = self._queue.pieces
            return self._queue.bytes >= MESSAGE_BYTES or (len(pieces) > 1 and pieces[0].entry is not None)

    def _next(self, own: WaitingCall | None, lane: Lane, several: bool) -> OutboundEntry | None:
        """Return the next entry, or None if there is none now or another leader should send it."""
        if own is None:
            if lane.lock.contended if self._spool is None else self._spool.contended(self.pchannel):
                return None
        elif own.ended:
            return None
        if self._shared_calls > 1 and not self._drawn:
            self._gather()
        with self._changed:
            queue = self._queue
            if not queue.pieces:
                return None
            first = queue.pieces[0]
            if self._drawn and queue.bytes < MESSAGE_BYTES and first.entry is None and first.call is not own:
                return None  # small calls wait for more, until the answer is in
            if queue.bytes >= MESSAGE_BYTES and not several:
                return None  # more came than one entry at a time is good for
            if own is None and self._due > time.monotonic() and not self._waiting:
                return None
            contents = EntryContents(queue.take(), self._settling)
            if not queue.pieces:
                self._due = inf
        return self._outbound(contents)

    def _outbound(self, contents: EntryContents) -> OutboundEntry | None:
        try:
            sending = contents.outbound()
        except Exception as error:
            contents.fail(error)
            return None
        except BaseException:  # interrupted: the next leader sends it
            with self._changed:
                self._put_back(contents.pieces)
            raise
        sending.on_settled = self._settled
        self._shared_calls = sum(piece.call.series is None for piece in contents.pieces)
        self._drawn.append(sending)
        return sending

    def _gather(self) -> None:
        """Let the callers of the last message bring their next calls."""
        end, there = time.monotonic() + GATHER_SECONDS, -1
        self._gathered.clear()
        self._gathering = self._shared_calls
        while there < len(self._queue.pieces) < self._gathering and time.monotonic() < end:
            there = len(self._queue.pieces)
            self._gathered.wait(_GATHER_STEP)
        self._gathering = 0

    def _settled(self, sending: OutboundEntry) -> None:
        if sending in self._drawn:
            self._drawn.remove(sending)
        again = _contents(sending).settle(sending, map(_contents, self._drawn))
        if again:
            with self._changed:
                self._put_back(again)

    def _put_back(self, pieces: Sequence[Piece]) -> None:
        self._queue.put_back(pieces)
        self._due = 0.0

    def _send_first(self, lane: Lane) -> None:
        """Send the first call of a resumed producer, which may repeat one of its former producer."""
        with self._changed:
            if not self._queue.pieces:
                return
            entries = self._entries_of(self._queue.remove([self._queue.pieces[0].call]))
        try:
            sent = lane.send_alone([each.messages for each in entries])
        except BaseException as error:
            words = "a call that may repeat one of a former producer was interrupted: send it again"
            for each in entries:
                _contents(each).fail(error if isinstance(error, Exception) else AppendUnresolved(words))
            if not isinstance(error, Exception):
                raise
            return
        for each, outcome in zip(entries, sent, strict=True):
            each.answers, each.ambiguous = outcome.answers, outcome.ambiguous
            self._settled(each)

    def _entries_of(self, pieces: Sequence[Piece]) -> list[OutboundEntry]:
        """Return the entries of pieces that are not in the queue."""
        queue, found = ChannelQueue(), list[OutboundEntry]()
        queue.add(pieces)
        while queue.pieces:
            found.append(EntryContents(queue.take(), self._settling).outbound())
        return found

    def _unchecked_size(self) -> int:
        """Return the size of the next entry for which the spool must have room: calls that wait checked it before."""
        with self._changed:
            if not self._queue.pieces or self._queue.pieces[0].call.waits:
                return 0
            return min(self._queue.bytes, ENTRY_BYTES)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _hold(self, error: AppendUnresolved) -> None:
        """End the calls whose outcome is unknown, and those of threads that wait after them: the lane holds all of it.

        With a spool, the latter have their turn next.
        """
        drawn, self._drawn = self._drawn, []
        calls = {id(piece.call): piece.call for each in drawn for piece in _contents(each).pieces}
        rest: list[Piece] = []
        if self._spool is None:
            with self._changed:
                calls |= {id(piece.call): piece.call for piece in self._queue.pieces if piece.call.waits}
                rest = self._queue.remove(calls.values())
            self._lane().hold(self._entries_of(rest))
        for each in drawn:
            _contents(each).fail(error)
        fail_pieces(rest, error, self._settling)

    def _fail(self, error: Exception) -> None:
        """End the calls that were being sent with `error`; if there are none, all that are queued."""
        drawn, self._drawn = self._drawn, []
        for each in drawn:
            _contents(each).fail(error)
        if not drawn:
            with self._changed:
                left, self._queue = self._queue, ChannelQueue()
            fail_pieces(left.pieces, error, self._settling)

    def _refuse_waiting(self, error: SpoolFull) -> None:
        """End the queued calls of threads, which must not wait for the spool; nothing of them was taken."""
        with self._changed:
            refused = self._queue.remove([piece.call for piece in self._queue.pieces if piece.call.waits])
        fail_pieces(refused, error, self._settling)

    def _recall(self, own: WaitingCall | None) -> None:
        """Withdraw the call of an interrupted leader, and leave the others that it had taken to the next one."""
        if own is not None:
            with self._settling:
                own.ended = True
        with self._changed:
            if own is not None:
                self._queue.remove([own])
            held = self._drawn if self._spool is not None or not self._drawn else self._lane().unresolved
            lost = [each for each in self._drawn if each not in held]
            for each in reversed(lost):
                self._put_back([piece for piece in _contents(each).pieces if not piece.call.ended])
            self._drawn = [
                each
                for each in self._drawn
                if each not in lost and any(not piece.call.ended for piece in _contents(each).pieces)
            ]


def _contents(sending: OutboundEntry) -> EntryContents:
    assert isinstance(sending.context, EntryContents)
    return sending.context
