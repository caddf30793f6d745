"""One producer's path to one PChannel: sequences, order, several entries in flight, a final outcome for each message.

A lane guarantees:

- The messages of a VChannel take effect in the order in which they were given, each once or never.
- A lost answer is resolved by sending the same sequence again (law 8). Apart from one entry, at most WINDOW messages of
  a VChannel are unanswered at a time: the chain remembers that many results, so a repeat gets the first result.
- If the log is unreachable, messages stay here with their sequences and are sent before any other (AppendUnresolved).
- Messages whose numbers can no longer follow (an earlier one was refused without using its number, or the chain forgot
  the producer) continue in a new epoch, which fences messages of the older one that may still arrive.
- A producer whose acknowledged sequences the log no longer knows raises LogRegressed.

`sequencer.py` decides what is sent next and what an answer means. This module has the locks, streams, waits and remote
calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, AppendUnresolved, MillraceError
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.client.produce.fair_lock import FairLock
from millrace.client.produce.sequencer import (
    PASSING_PAUSE,
    Action,
    FetchEpochs,
    FetchTerm,
    OutboundEntry,
    Pull,
    Receive,
    RetryAfter,
    RetryPolicy,
    Send,
    Sequencer,
    Settle,
    Steps,
    single_delivery,
)
from millrace.client.produce.written import Written
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.rpc.append_pipeline import AppendPipeline
from millrace.rpc.outcome import AppendOutcome
from millrace.wal.reasons import Reason

if TYPE_CHECKING:
    from millrace.client.produce.producer_recovery import AppliedLookup


def _next(waiting: deque[OutboundEntry]) -> OutboundEntry | None:
    return waiting.popleft() if waiting else None


EntrySource = Callable[[], OutboundEntry | None]

T = TypeVar("T")


class TermSource(Protocol):
    """Source of the open term of a PChannel and of producer epochs: the coordinator."""

    def term(self, pchannel: str) -> int: ...

    def next_epoch(self, producer_id: int, *, held: int | None = None) -> int: ...


class ProducerIdentity:
    """A producer's id and newest epoch, shared by its lanes.

    The coordinator assigns the epochs of ids that callers choose.
    """

    def __init__(self, producer_id: int, terms: TermSource, *, owned: bool, epoch: int | None = None) -> None:
        self.id = producer_id
        self.terms = terms
        self._owned = owned
        self._lock = threading.Lock()
        self.epoch = epoch if epoch is not None else terms.next_epoch(producer_id) if owned else 1

    def renew(self, after: int) -> int:
        """Return an epoch above `after`. Raises ProducerFenced if a newer producer has the id."""
        with self._lock:
            if self.epoch <= after:
                held = self.epoch
                self.epoch = self.terms.next_epoch(self.id, held=held) if self._owned else after + 1
            return self.epoch


class Appender(Protocol):
    """The part of an append host's client that a producer needs."""

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome: ...

    def append_stream(self, pchannel: str, *, deadline: float | None = None) -> AppendPipeline[AppendOutcome]: ...


class _Answer(Protocol):
    def result(self) -> AppendOutcome: ...


@dataclass(frozen=True, slots=True)
class _Direct:
    """An append that is sent when its result is requested."""

    call: Callable[[], AppendOutcome]

    def result(self) -> AppendOutcome:
        return self.call()


def deliver_single(
    send: Callable[[Deadline], T],
    *,
    deadline: Deadline,
    attempts: int = 1,
    pause: float = PASSING_PAUSE,
    numbered: bool = False,
) -> T:
    """Send one entry that no lane numbers, by `deadline`, as :func:`single_delivery` decides.

    `send` sends once, by the deadline that it is given. Raises what :func:`single_delivery` raises.
    """
    policy = RetryPolicy(attempts, pause, throttle_seconds=deadline.remaining())
    began = deadline.clock()
    reply: Any = None
    with closing(single_delivery(policy, numbered=numbered)) as steps:
        while True:
            try:
                action = steps.send(reply)
            except StopIteration as end:
                return cast(T, end.value)
            if isinstance(action, RetryAfter):
                assert isinstance(reply, MillraceError)
                if not deadline.pause(jittered(action.pause)):
                    raise reply
                began, reply = deadline.clock(), deadline.clock() - began
                continue
            try:
                reply = send(deadline)
            except MillraceError as error:
                reply = error


class Lane:
    """Sends one producer's messages to one PChannel. Thread-safe: one delivery at a time, in the order of the calls."""

    def __init__(
        self,
        appender: Appender,
        identity: ProducerIdentity,
        settings: Settings,
        pchannel: str,
        *,
        metrics: Metrics | None = None,
    ) -> None:
        self.pchannel = pchannel
        self._appender = appender
        self._identity = identity
        self._settings = settings
        try:
            term = identity.terms.term(pchannel)
        except MillraceError as error:
            if not error.retriable:
                raise
            term = 0  # the source is unreachable, too: the chain fences term 0, and the term is fetched then
        self.sequencer = Sequencer(pchannel, identity.id, term=term, epoch=identity.epoch)
        self._patience = RetryPolicy(
            settings.append_attempts, settings.append_retry_delay, throttle_seconds=settings.append_deadline
        )
        self.lock = FairLock()
        self._resumed = False
        self._standing: AppliedLookup | None = None
        self._pipeline: AppendPipeline[AppendOutcome] | None = None
        self._closing = threading.Event()
        self._waited = 0.0
        """End of the last wait between two attempts, or begin of the delivery."""
        self._retries = None if metrics is None else metrics.wal_append_retry_total.labels(pchannel)

    @property
    def unresolved(self) -> list[OutboundEntry]:
        """Entries that were sent and have no final outcome, in order; they are sent again before anything else."""
        return list(self.sequencer.unresolved)

    def close(self) -> None:
        """Close the connection and end waits between attempts. Idempotent."""
        self.sequencer.closed = True
        self._closing.set()
        if self._pipeline is not None:
            self._pipeline.close()

    def take_unresolved(self) -> list[OutboundEntry]:
        """Hand the unresolved entries, in order and stamped, to a caller that settles them (a spool)."""
        with self.lock.held():
            taken, self.sequencer.unresolved = self.sequencer.unresolved, []
            return taken

    def numbers(self) -> dict[str, tuple[int, int]]:
        """Return by VChannel the epoch and the next sequence."""
        with self.lock.held():
            return self.sequencer.numbers()

    def resume(
        self, numbers: Mapping[str, tuple[int, int]], *, tick: int = 0, standing: AppliedLookup | None = None
    ) -> None:
        """Continue from the numbers of a former lane, which may have sent the next messages already.

        It sent them, if at all, with the same numbers and after `tick`.

        If the chain no longer knows those numbers, `applied_lookup` finds what took effect.
        """
        with self.lock.held():
            self.sequencer.resume(numbers)
            self.sequencer.tick = max(self.sequencer.tick, tick)
            self._resumed = True
            self._standing = standing

    @property
    def tick(self) -> int:
        """The greatest tick of any answer; messages sent from now on get a greater one."""
        return self.sequencer.tick

    def stamp(self, messages: Sequence[MutableMessage]) -> list[MutableMessage]:
        """Stamp `messages` with term, producer, epoch and the next sequences.

        For messages that are stored before they are sent.

        The caller ensures that only stamped messages are being delivered.
        """
        if self.sequencer.needs_new_epoch(messages):
            self.sequencer.begin_epochs(self._renewed(FetchEpochs(self.sequencer.epochs_to_renew())))
        self.sequencer.epoch = self._identity.epoch
        return self.sequencer.stamp(
            messages, barrier=0
        )  # stamped numbers cannot change later, so no verdict may require others

    @property
    def resumed(self) -> bool:
        """Whether the next call may repeat one of a former lane: its entries are sent alone, by `send_alone`."""
        return self._resumed

    def send(self, groups: Sequence[list[MutableMessage]]) -> Written:
        """Append the groups, one entry each, in order, and return their outcome. Raises as `send_alone` does."""
        written = Written()
        for each in self.send_alone(groups):
            written.add(each.written())
        return written

    def send_alone(self, groups: Sequence[list[MutableMessage]]) -> list[OutboundEntry]:
        """Append the groups of one call, one entry each, in order, and return the entries with their outcomes.

        Raises AppendUnresolved if the outcome is unknown for now, and what the append host raises.
        """
        if self._resumed and self._standing is not None:
            sent = self._send_resumed(groups, self._standing)
        else:
            sent = self._send(groups)
        self._resumed = False
        return sent

    def _send(self, groups: Sequence[list[MutableMessage]]) -> list[OutboundEntry]:
        waiting = deque(OutboundEntry(group, ambiguous=self._resumed) for group in groups)
        sent = list(waiting)
        try:
            self.deliver(lambda: waiting.popleft() if waiting else None, pipelined=len(sent) > 1)
        except AppendUnresolved:
            self.hold(waiting)
            raise
        return sent

    def _send_resumed(self, groups: Sequence[list[MutableMessage]], standing: AppliedLookup) -> list[OutboundEntry]:
        """Send like :meth:`_send` what a former lane may have sent: first under its numbers.

        Messages that did not take effect and that the chain has forgotten are sent under new numbers. After an error,
        the next call may start over.
        """
        from millrace.client.produce.producer_recovery import (  # other producers do not need it
            match_applied,
            unknown_vchannels,
        )

        sent = [OutboundEntry(list(group)) for group in groups]
        with self.lock.held():
            before, after = self.sequencer.numbers(), self.sequencer.tick
            for each in sent:
                self.sequencer.number(each)
                each.ambiguous = True
            first = {
                each.vchannel: before.get(each.vchannel, (each.epoch, 0)) for part in sent for each in part.messages
            }
        waiting = deque(sent)
        try:
            try:
                source = partial(_next, waiting)
                self.deliver(source, pipelined=len(sent) > 1, stamped=True)
            except AppendRejected as verdict:
                if verdict.reason != Reason.UNKNOWN_PRODUCER:
                    raise
                self.take_unresolved()
            names = unknown_vchannels(sent)
            if not names:
                return sent
            applied = standing(self.pchannel, self._identity.id, after)
            left, newest = match_applied(sent, {name: first[name] for name in names}, applied)
            hit("produce.forgotten")
            with self.lock.held():
                epochs = self._renewed(FetchEpochs(newest))
                self.sequencer.begin_epochs(epochs)
            again = [OutboundEntry([sending.messages[at]]) for sending, at in left]
            rest = deque(again)
            self.deliver(partial(_next, rest), pipelined=len(again) > 1)
            for (sending, at), each in zip(left, again, strict=True):
                (sending.answers[at],) = each.answers
            hit("produce.renumbered")
            return sent
        except BaseException:
            self.take_unresolved()
            self.sequencer.resume(before)
            raise

    def hold(self, rest: Iterable[OutboundEntry]) -> None:
        """Keep unsent entries after those that were sent. Their callers learn that all of it is held."""
        with self.lock.held():
            for sending in rest:
                self.sequencer.number(sending)
                self.sequencer.unresolved.append(sending)

    def deliver(
        self, source: EntrySource, *, pipelined: bool = True, stamped: bool = False, attempts: int | None = None
    ) -> None:
        """Send what `source` returns until it returns None with nothing in flight; unresolved entries go first.

        Every entry of the source is settled when this returns. `stamped` entries keep their numbers, and a verdict that
        requires others is raised.

        Raises AppendUnresolved after `attempts` (default: the setting) without progress; LogRegressed.
        """
        patience = self._patience if attempts is None else replace(self._patience, attempts=attempts)
        with self.lock.held():
            self._drive(self.sequencer.delivery(patience, pipelined=pipelined, stamped=stamped), source, pipelined)

    def _drive(self, steps: Steps, source: EntrySource, pipelined: bool) -> None:
        flight: deque[_Answer] = deque()
        self._waited = time.monotonic()
        reply: Any = None
        with closing(steps):
            while True:
                try:
                    action = steps.send(reply)
                except StopIteration:
                    return
                if isinstance(action, Pull):
                    self.sequencer.epoch = self._identity.epoch
                    reply = source()
                elif isinstance(action, Settle):
                    reply = action.sending.on_settled and action.sending.on_settled(action.sending)
                else:
                    try:
                        reply = self._done(action, flight, pipelined)
                    except MillraceError as error:
                        reply = error

    def _done(self, action: Action, flight: deque[_Answer], pipelined: bool) -> Any:
        """Perform an action and return its result. Raises what prevented it."""
        if isinstance(action, Send):
            flight.append(self._submitted(action.sending, pipelined))
        elif isinstance(action, Receive):
            outcome = flight.popleft().result()
            self.sequencer.tick = max(self.sequencer.tick, outcome.last_tick)
            return list(outcome.message_outcomes())
        elif isinstance(action, FetchTerm):
            return self._identity.terms.term(self.pchannel)
        elif isinstance(action, FetchEpochs):
            return self._renewed(action)
        elif isinstance(action, RetryAfter):
            self._closing.wait(jittered(action.pause))
            if self._retries is not None:
                self._retries.inc()
            before, self._waited = self._waited, time.monotonic()
            return self._waited - before
        return None

    def _renewed(self, asked: FetchEpochs) -> dict[str, int]:
        return {name: self._identity.renew(epoch) for name, epoch in asked.above.items()}

    def _submitted(self, sending: OutboundEntry, pipelined: bool) -> _Answer:
        entry = sending.entry or encode_entry([sending.messages[place] for place in sending.unanswered])
        sending.entry = b""
        if not pipelined:
            return _Direct(
                lambda: self._appender.append(self.pchannel, [entry], deadline=self._settings.append_deadline)
            )
        if self._pipeline is None:
            self._pipeline = self._appender.append_stream(self.pchannel, deadline=self._settings.append_deadline)
        return self._pipeline.submit(entry)
