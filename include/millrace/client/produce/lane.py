"""One PChannel as one producer sends to it: stamps, order, several entries in flight, and every answer settled for good.

What a lane promises:

- The messages of a VChannel take effect in the order in which they were given, each once or never.
- A lost answer is settled by sending the same sequence again (law 8). Beside one entry, at most WINDOW messages of a VChannel
  are unanswered at a time: the chain remembers that many results, so that a repeat gets the first one's.
- Where the log cannot be asked, the messages stay here with their sequences and go out before any other (AppendUnresolved).
- Messages whose numbers can no longer follow (one before them was refused without using its number; the chain forgot the
  producer) go on in a new epoch, which fences what may still be under way of the older one.
- A producer whose acknowledged sequences the log does not know any more says LogRegressed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from millrace.base.errors import (
    AppendDenied,
    AppendRejected,
    AppendUnresolved,
    EntryTooLarge,
    LogRegressed,
    MillraceError,
    PermissionDenied,
    ProducerFenced,
    RateLimited,
    ServerFull,
)
from millrace.base.metrics import Metrics
from millrace.base.pauses import jittered
from millrace.base.settings import Settings
from millrace.client.produce.identity import Identity
from millrace.client.produce.turns import Turns
from millrace.client.produce.written import Judged, Written
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.pipeline import Pipeline
from millrace.wal.reasons import Reason

WINDOW: Final = 16
"""Messages of one VChannel in flight beside one entry: results that the chain remembers (``dedup_results``)."""

_TERMS: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})
_AGAIN: Final = _TERMS | {Reason.SEQUENCE_GAP, Reason.UNKNOWN_PRODUCER}
"""Verdicts that say nothing of the message itself: it goes out again."""

_UNNUMBERED: Final = frozenset({Reason.MALFORMED, Reason.UNSUPPORTED_TYPE, Reason.TOO_LARGE})
"""Final verdicts that leave the sequence where it was, so that what follows needs new numbers."""


_REFUSED: Final = EntryTooLarge("an entry was refused for good, and settled as such: what follows goes on")
"""Stands for such a refusal, whatever it was; never raised."""

_NOT_TAKEN: Final = (RateLimited, EntryTooLarge, PermissionDenied, ServerFull)
"""Refusals of the server that prove that nothing was appended."""


class Appender(Protocol):
    """What a producer needs of an append host's client."""

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome: ...

    def append_stream(self, pchannel: str, *, deadline: float | None = None) -> Pipeline[AppendOutcome]: ...


@dataclass(slots=True, eq=False)
class Sending:
    """Messages that travel in one entry, and what became of each; `settled` is called once that is known of all."""

    messages: list[MutableMessage]
    settled: Callable[[Sending], None] | None = None
    answers: list[Judged | None] = field(default_factory=list)
    ambiguous: bool = False
    """Whether an attempt's answer was lost, so that it may have taken effect."""
    context: object = None
    """What belongs to whoever sent it."""

    @property
    def open(self) -> list[int]:
        """The places of messages that nothing is known of yet."""
        return [place for place, answer in enumerate(self.answers) if answer is None]

    def written(self) -> Written:
        """What became of the messages that are settled."""
        found = Written()
        for message, answer in zip(self.messages, self.answers, strict=True):
            if answer is not None:
                found.count(message, answer)
        return found


class _Answer(Protocol):
    def result(self) -> AppendOutcome: ...


@dataclass(frozen=True, slots=True)
class _Direct:
    """An append that is made when its answer is asked for."""

    call: Callable[[], AppendOutcome]

    def result(self) -> AppendOutcome:
        return self.call()


class Lane:
    """Sends one producer's messages to one PChannel. Thread-safe: one delivery at a time, in the order they came."""

    def __init__(
        self,
        appender: Appender,
        identity: Identity,
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
            self._term = identity.terms.term(pchannel)
        except MillraceError as error:
            if not error.retriable:
                raise
            self._term = 0  # who knows it cannot be reached either: the chain fences 0, and it is asked for then
        self.turns = Turns()
        self._epochs: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._renumber: set[str] = set()
        self._verdict: tuple[str, AppendRejected] | None = None
        self._unresolved: list[Sending] = []
        self._pipeline: Pipeline[AppendOutcome] | None = None
        self._closing = threading.Event()
        self._retries = None if metrics is None else metrics.wal_append_retry_total.labels(pchannel)

    @property
    def unresolved(self) -> list[Sending]:
        """What was sent and could not be settled, in order: it goes out again before anything else."""
        return list(self._unresolved)

    def close(self) -> None:
        """Give up the connection; who waits between two attempts stops waiting. Idempotent."""
        self._closing.set()
        if self._pipeline is not None:
            self._pipeline.close()

    def take_unresolved(self) -> list[Sending]:
        """Hand what is unresolved, in order and with its stamps, to somebody who will settle it (a spool)."""
        with self.turns.taken():
            taken, self._unresolved = self._unresolved, []
            return taken

    def stamp(self, messages: Sequence[MutableMessage]) -> list[MutableMessage]:
        """`messages` with term, producer, epoch and the next sequences: for what is kept elsewhere before it is sent.

        The caller sees to it that no delivery but of stamped messages is under way.
        """
        return self._stamped(messages)

    def send(self, groups: Sequence[list[MutableMessage]]) -> Written:
        """Append the groups, one entry each, in order; what became of their messages.

        Raises AppendUnresolved where that cannot be known now, and what the append host raises.
        """
        waiting = deque(Sending(group) for group in groups)
        sent = list(waiting)
        try:
            self.deliver(lambda: waiting.popleft() if waiting else None, pipelined=len(sent) > 1)
        except AppendUnresolved:
            self._hold(waiting)
            raise
        written = Written()
        for each in sent:
            written.add(each.written())
        return written

    def _hold(self, rest: Iterable[Sending]) -> None:
        """Keep what a call had not sent yet behind what it sent: its caller is told that all of it is held."""
        with self.turns.taken():
            for sending in rest:
                self._number(sending, renew=False)
                self._unresolved.append(sending)

    def deliver(
        self,
        source: Callable[[], Sending | None],
        *,
        pipelined: bool = True,
        stamped: bool = False,
        attempts: int | None = None,
    ) -> None:
        """Send what `source` gives until it gives None with nothing in flight; first what was unresolved before.

        Each Sending of the source is settled when this returns. `stamped` ones keep the numbers they have, and the verdict
        that asks for others is raised. Raises AppendUnresolved after `attempts` (default: the setting) without progress;
        LogRegressed.
        """
        with self.turns.taken():
            self._deliver(source, pipelined, stamped, attempts or self._settings.append_attempts)

    # --- one delivery ---------------------------------------------------------------------------------------------------

    def _deliver(self, source: Callable[[], Sending | None], pipelined: bool, stamped: bool, attempts: int) -> None:
        again: deque[Sending] = deque(self._unresolved)
        self._unresolved = []
        failures = 0
        try:
            while True:
                failure, progress = self._pass(source, again, pipelined, stamped)
                if failure is None and not again:
                    return
                failures = 0 if progress else failures + 1
                if failure is None:
                    try:
                        failure = self._mend(again, failures, attempts, stamped)
                    except AppendRejected:
                        raise
                    except MillraceError as error:  # who knows the term, or gives epochs, cannot be reached
                        failure = error
                if failure is not None:
                    self._pause(failure, failures, attempts, again)
                if self._retries is not None:
                    self._retries.inc()
        finally:
            self._unresolved = [sending for sending in again if sending.open]

    def _pass(
        self, source: Callable[[], Sending | None], again: deque[Sending], pipelined: bool, stamped: bool
    ) -> tuple[MillraceError | None, bool]:
        """Send while all goes well; what stopped that, and whether anything was settled. `again` is then what to repeat.

        Whatever ends it, an interrupt too: what was sent and has no answer is in `again`, in its order.
        """
        flight: deque[tuple[Sending, _Answer]] = deque()
        back: list[Sending] = []
        try:
            return self._send(source, again, flight, back, pipelined, stamped)
        finally:
            for sending, _ in flight:
                sending.ambiguous = True
            again.extendleft(reversed([*back, *(sending for sending, _ in flight)]))

    def _send(
        self,
        source: Callable[[], Sending | None],
        again: deque[Sending],
        flight: deque[tuple[Sending, _Answer]],
        back: list[Sending],
        pipelined: bool,
        stamped: bool,
    ) -> tuple[MillraceError | None, bool]:
        held: Counter[str] = Counter()
        failure: MillraceError | None = None
        progress = False
        self._verdict = None
        while True:
            while failure is None and not back and (not flight or pipelined):
                if self._renumber and flight and not again and not stamped:
                    break  # what follows begins an epoch, once it is known of all before it what becomes of them
                if not again:
                    failure = self._draw(source, again, stamped)
                if failure is not None or not again or (flight and not _fits(again[0], held)):
                    break
                sending = again[0]
                try:
                    answer = self._submitted(sending, pipelined)
                except MillraceError as error:
                    failure = error
                    break
                except BaseException:  # interrupted while it went out
                    sending.ambiguous = True
                    raise
                flight.append((sending, answer))
                again.popleft()
                held.update(message.vchannel for message in sending.messages)
            if not flight:
                return failure, progress
            sending, answer = flight[0]
            before = len(sending.open)
            try:
                self._settle(sending, answer.result())
            except MillraceError as error:
                if isinstance(error, EntryTooLarge):
                    self._refuse(sending, AppendRejected(str(error), reason=Reason.TOO_LARGE))
                    error = _REFUSED
                elif isinstance(error, PermissionDenied) and not (sending.ambiguous or stamped):
                    self._refuse(sending, AppendDenied(str(error)))
                    error = _REFUSED
                sending.ambiguous |= not isinstance(error, _NOT_TAKEN)
                failure = failure or error
            flight.popleft()
            held.subtract(message.vchannel for message in sending.messages)
            progress |= len(sending.open) < before
            if sending.open:
                back.append(sending)
            elif sending.settled is not None:
                sending.settled(sending)

    def _draw(self, source: Callable[[], Sending | None], again: deque[Sending], stamped: bool) -> MillraceError | None:
        """Put what `source` gives, if anything, behind `again`; why it could not be numbered as it should be."""
        sending = source()
        if sending is None:
            return None
        again.append(sending)
        if stamped:
            sending.answers = sending.answers or [None] * len(sending.messages)
            return None
        try:
            self._number(sending)
        except MillraceError as error:  # no epoch is to be had now: the old one's numbers hold its place
            self._number(sending, renew=False)
            if isinstance(error, AppendRejected):
                raise
            return error
        return None

    def _number(self, sending: Sending, *, renew: bool = True) -> None:
        sending.messages[:] = self._stamped(sending.messages, renew=renew)
        sending.answers = [None] * len(sending.messages)

    def _submitted(self, sending: Sending, pipelined: bool) -> _Answer:
        entry = encode_entry([sending.messages[place] for place in sending.open])
        if not pipelined:
            return _Direct(
                lambda: self._appender.append(self.pchannel, [entry], deadline=self._settings.append_deadline)
            )
        if self._pipeline is None:
            self._pipeline = self._appender.append_stream(self.pchannel, deadline=self._settings.append_deadline)
        return self._pipeline.submit(entry)

    def _settle(self, sending: Sending, outcome: AppendOutcome) -> None:
        for place, judged in zip(sending.open, outcome.judged(), strict=True):
            message = sending.messages[place]
            if isinstance(judged, AppendRejected):
                if judged.reason in _AGAIN:
                    self._note(message.vchannel, judged)
                    continue
                if judged.reason == Reason.PRODUCER_FENCED:
                    judged = self._fenced(sending)
                if judged.reason in _UNNUMBERED:
                    self._renumber.add(message.vchannel)
            sending.answers[place] = judged

    def _refuse(self, sending: Sending, answer: AppendRejected) -> None:
        """Nothing of this entry is in the log, nor ever will be."""
        for place in sending.open:
            sending.answers[place] = answer
            self._renumber.add(sending.messages[place].vchannel)

    def _fenced(self, sending: Sending) -> ProducerFenced:
        words = f"a newer producer took over the id {self._identity.id}: close this one"
        if sending.ambiguous:
            words += "; whether these messages took effect before, read: their first answer was lost"
        return ProducerFenced(words)

    # --- what a verdict asks for ----------------------------------------------------------------------------------------

    def _note(self, vchannel: str, judged: AppendRejected) -> None:
        """Keep the first verdict of a pass that sends messages out again."""
        if self._verdict is None:
            self._verdict = (vchannel, judged)

    def _mend(self, again: deque[Sending], failures: int, attempts: int, stamped: bool) -> MillraceError | None:
        """Make what is to go out again acceptable; the failure where only waiting can."""
        if self._verdict is None:
            return None
        vchannel, judged = self._verdict
        if judged.reason in _TERMS:
            term = self._identity.terms.term(self.pchannel)
            if term == self._term:  # an opening is under way, or the log is not the coordinator's
                if failures < attempts:
                    return judged
                self._give_up(again, judged, None)
                return None
            self._term = term
            for sending in again:
                for place in sending.open:
                    sending.messages[place] = replace(sending.messages[place], term=term)
            return None
        first = next(
            (each for each in again if any(each.messages[place].vchannel == vchannel for place in each.open)), None
        )
        if stamped and failures > 1:
            raise judged  # numbers that are kept elsewhere too cannot change here
        if stamped:
            return None
        if judged.reason == Reason.UNKNOWN_PRODUCER and (first is None or not first.ambiguous):
            self._renumber.add(vchannel)
        if self._renumber:
            self._begin_epoch(again)
            return None
        if failures <= 1:
            return None  # what came before it goes out first this time
        if judged.reason == Reason.SEQUENCE_GAP:
            return LogRegressed(
                f"{self.pchannel} does not know sequences of producer {self._identity.id} that it acknowledged ({judged}):"
                " the log lost its tail. Compare it with the WAL (`millrace verify`) before anything is sent again"
            )
        if failures < attempts:
            return judged
        self._give_up(again, judged, vchannel)
        return None

    def _give_up(self, again: deque[Sending], judged: AppendRejected, vchannel: str | None) -> None:
        """What is to go out again, on one VChannel or on all, was refused for good."""
        unknown = f"{judged}; whether these messages took effect before, read: their first answer was lost"
        for sending in list(again):
            answer = AppendRejected(unknown, reason=judged.reason) if sending.ambiguous else judged
            for place in sending.open:
                name = sending.messages[place].vchannel
                if vchannel is None or name == vchannel:
                    sending.answers[place] = answer
                    self._renumber.add(name)
            if not sending.open:
                again.remove(sending)
                if sending.settled is not None:
                    sending.settled(sending)

    def _begin_epoch(self, again: deque[Sending]) -> None:
        """Number what is to go out again on the VChannels to renumber from 0 in a new epoch; all of it, or nothing changes."""
        names = self._renumber
        epochs = {name: self._identity.renew(self._epochs.get(name, 0)) for name in names}
        self._renumber = set()
        self._epochs |= epochs
        self._sequences |= dict.fromkeys(names, 0)
        for sending in again:
            for place in sending.open:
                if sending.messages[place].vchannel in names:
                    (sending.messages[place],) = self._stamped([sending.messages[place]])

    def _stamped(self, messages: Sequence[MutableMessage], *, renew: bool = True) -> list[MutableMessage]:
        if renew and not self._unresolved and any(message.vchannel in self._renumber for message in messages):
            self._begin_epoch(deque())  # nothing of this producer is under way here
        stamped = []
        for message in messages:
            name = message.vchannel
            sequence = self._sequences.get(name, 0)
            self._sequences[name] = sequence + 1
            epoch = self._epochs.setdefault(name, self._identity.epoch)
            stamped.append(
                replace(message, term=self._term, producer_id=self._identity.id, epoch=epoch, sequence=sequence)
            )
        return stamped

    def _pause(self, failure: MillraceError, failures: int, attempts: int, again: Iterable[Sending]) -> None:
        """Wait before the next attempt. Raises where there is none left, or where none can help."""
        if isinstance(failure, RateLimited):
            delay, patience = failure.retry_after, self._settings.append_deadline
            attempts = max(attempts, int(patience / max(delay, 0.001)))
        else:
            delay = self._settings.append_retry_delay
        if failure is _REFUSED:
            return
        verdict = isinstance(failure, AppendRejected)
        if not failure.retriable and not verdict:
            raise failure
        if failures >= attempts or self._closing.is_set():
            known = isinstance(failure, _NOT_TAKEN) and not any(sending.ambiguous for sending in again)
            words = "nothing of" if known else "it is unknown what became of"
            raise AppendUnresolved(
                f"after {failures} attempts {words} the newest appends to {self.pchannel}"
                f"{' was taken' if known else ''}: {failure.code}, {failure}."
                " They keep their sequences; settle() or the next append sends them again"
            ) from failure
        self._closing.wait(jittered(delay))


def _fits(sending: Sending, held: Counter[str]) -> bool:
    """Whether it may be sent while `held` messages of its VChannels are in flight."""
    mine = Counter(message.vchannel for message in sending.messages)
    return all(held[name] + count <= WINDOW for name, count in mine.items())
