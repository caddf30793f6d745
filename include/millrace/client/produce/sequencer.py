"""What a lane does next: numbers, windows, answers, repeats and epochs as a state machine without threads, clock or I/O.

A delivery (:meth:`Sequencer.delivery`) is a generator. It yields one action at a time; what came of that is sent back in, and
failures of a way to somebody come back as values. Who drives it (`lane.py`; a property test) may close it at any action:
what was drawn and has no answer is then `unresolved`, in its order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from millrace.base.errors import (
    AppendDenied,
    AppendRejected,
    AppendUnresolved,
    AssignmentStale,
    EntryTooLarge,
    LogRegressed,
    MillraceError,
    PermissionDenied,
    ProducerFenced,
    RateLimited,
    ServerFull,
)
from millrace.client.produce.written import MessageOutcome, Written
from millrace.message.model import MutableMessage
from millrace.wal.reasons import Reason

WINDOW: Final = 16
"""Messages of one VChannel in flight beside one entry: results that the chain remembers (``dedup_results``)."""

_TERMS: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})
_AGAIN: Final = _TERMS | {Reason.SEQUENCE_GAP, Reason.UNKNOWN_PRODUCER}
"""Verdicts that say nothing of the message itself: it goes out again."""

_UNNUMBERED: Final = frozenset({Reason.MALFORMED, Reason.UNSUPPORTED_TYPE, Reason.TOO_LARGE})
"""Final verdicts that leave the sequence where it was, so that what follows needs new numbers."""


_MOVING_PAUSE: Final = 0.1
"""Seconds between two attempts while the PChannel goes from one node to another."""

_REFUSED: Final = EntryTooLarge("an entry was refused for good, and settled as such: what follows goes on")
"""Stands for such a refusal, whatever it was; never raised."""

_NOT_TAKEN: Final = (AssignmentStale, RateLimited, EntryTooLarge, PermissionDenied, ServerFull)
"""Refusals of the server that prove that nothing was appended."""


@dataclass(slots=True, eq=False)
class OutboundEntry:
    """Messages that travel in one entry, and what became of each; `settled` is called once that is known of all."""

    messages: list[MutableMessage]
    on_settled: Callable[[OutboundEntry], None] | None = None
    answers: list[MessageOutcome | None] = field(default_factory=list)
    ambiguous: bool = False
    """Whether an attempt's answer was lost, so that it may have taken effect."""
    context: object = None
    """What belongs to whoever sent it."""
    entry: bytes = b""
    """The messages as an entry, where whoever sends them has it: for the first attempt."""

    @property
    def unanswered(self) -> list[int]:
        """The places of messages that nothing is known of yet."""
        return [place for place, answer in enumerate(self.answers) if answer is None]

    def written(self) -> Written:
        """What became of the messages that are settled."""
        found = Written()
        for message, answer in zip(self.messages, self.answers, strict=True):
            if answer is not None:
                found.count(message, answer)
        return found


# --- what is asked of whoever drives a delivery, and what comes back ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pull:
    """Give the next Sending, or None where there is none now."""


@dataclass(slots=True)
class Send:
    """Put the open messages of a Sending on the way, behind all that is there. None, or the failure: it is not on the way."""

    sending: OutboundEntry


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the answer to the oldest that is on the way: a Judged for each message that was open, or the failure."""


@dataclass(frozen=True, slots=True)
class Settle:
    """All is known of a Sending: tell who waits for it. None."""

    sending: OutboundEntry


@dataclass(frozen=True, slots=True)
class FetchTerm:
    """The PChannel's open term, or the failure."""


@dataclass(frozen=True, slots=True)
class FetchEpochs:
    """By VChannel an epoch above the one given, or the failure."""

    above: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Another round follows: let `pause` seconds pass before. None."""

    pause: float


Action: TypeAlias = Pull | Send | Receive | Settle | FetchTerm | FetchEpochs | RetryAfter
Steps: TypeAlias = Generator[Action, Any, None]

PULL: Final = Pull()
RECEIVE: Final = Receive()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Rounds without progress before a delivery gives up, and the seconds between two; for `limited` seconds where it is
    only put off."""

    attempts: int
    pause: float
    throttle_seconds: float


class Sequencer:
    """The numbers of one producer on one PChannel, and what of it is not settled. One delivery at a time."""

    def __init__(self, pchannel: str, producer_id: int, *, term: int, epoch: int) -> None:
        self.pchannel = pchannel
        self.id = producer_id
        self.term = term
        self.epoch = epoch
        """The producer's newest epoch, in which it begins on a VChannel; whoever drives keeps it up to date."""
        self.tick = 1
        """The greatest tick that an answer had, which whoever drives keeps up to date. A first message has it as its barrier, so that
        the chain knows a repeat of it for one even when it has forgotten the producer (docs/chain.md, "Producers")."""
        self.closed = False
        """Whether a failure is not worth a pause any more."""
        self.unresolved: list[OutboundEntry] = []
        """What was sent and could not be settled, in order: it goes out again before anything else."""
        self._epochs: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._renumber: set[str] = set()
        self._verdict: tuple[str, AppendRejected] | None = None

    # --- one delivery ---------------------------------------------------------------------------------------------------

    def delivery(self, patience: RetryPolicy, *, pipelined: bool = True, stamped: bool = False) -> Steps:
        """Send what `Pull` gives until it gives None with nothing on the way; first what was unresolved before.

        One at a time is on the way without `pipelined`. `stamped` ones keep the numbers they have, and the verdict that asks
        for others is raised. Raises AppendUnresolved where patience ends; LogRegressed; what no other attempt can help.
        """
        again: deque[OutboundEntry] = deque(self.unresolved)
        self.unresolved = []
        failures = 0
        try:
            while True:
                failure, progress = yield from self._pass(again, pipelined, stamped)
                if failure is None and not again:
                    return
                failures = 0 if progress else failures + 1
                if failure is None:
                    try:
                        failure = yield from self._mend(again, failures, patience.attempts, stamped)
                    except AppendRejected:
                        raise
                    except MillraceError as error:  # who knows the term, or gives epochs, cannot be reached
                        failure = error
                yield RetryAfter(0.0 if failure is None else self._pause(failure, failures, patience, again))
        finally:
            self.unresolved = [sending for sending in again if sending.unanswered]

    def _pass(
        self, again: deque[OutboundEntry], pipelined: bool, stamped: bool
    ) -> Generator[Action, Any, tuple[MillraceError | None, bool]]:
        """Send while all goes well; what stopped that, and whether anything was settled. `again` is then what to repeat.

        Whatever ends it, an interrupt too: what was sent and has no answer is in `again`, in its order.
        """
        flight: deque[OutboundEntry] = deque()
        back: list[OutboundEntry] = []
        try:
            return (yield from self._send(again, flight, back, pipelined, stamped))
        finally:
            for sending in flight:
                sending.ambiguous = True
            again.extendleft(reversed([*back, *flight]))

    def _send(
        self,
        again: deque[OutboundEntry],
        flight: deque[OutboundEntry],
        back: list[OutboundEntry],
        pipelined: bool,
        stamped: bool,
    ) -> Generator[Action, Any, tuple[MillraceError | None, bool]]:
        held: defaultdict[str, int] = defaultdict(int)
        counts: deque[dict[str, int]] = deque()
        failure: MillraceError | None = None
        progress = False
        self._verdict = None
        while True:
            while failure is None and not back and (not flight or pipelined):
                if self._renumber and flight and not again and not stamped:
                    break  # what follows begins an epoch, once it is known of all before it what becomes of them
                if not again:
                    failure = yield from self._draw(again, stamped)
                if failure is not None or not again:
                    break
                sending = again[0]
                mine = _counted(sending)
                if flight and not _fits(mine, held):
                    break
                try:
                    failure = yield Send(sending)
                except BaseException:  # interrupted while it went out
                    sending.ambiguous = True
                    raise
                if failure is not None:
                    break
                flight.append(sending)
                again.popleft()
                counts.append(mine)
                for name, count in mine.items():
                    held[name] += count
            if not flight:
                return failure, progress
            answer = yield RECEIVE
            sending = flight[0]
            places = sending.unanswered
            if isinstance(answer, MillraceError):
                found = self._failed(sending, answer, stamped)
                failure = failure or found
            else:
                self._settle(sending, places, answer)
            flight.popleft()
            for name, count in counts.popleft().items():
                held[name] -= count
            left = len(sending.unanswered)
            progress |= left < len(places)
            if left:
                back.append(sending)
            elif sending.on_settled is not None:
                yield Settle(sending)

    def _draw(self, again: deque[OutboundEntry], stamped: bool) -> Generator[Action, Any, MillraceError | None]:
        """Put what is drawn, if anything, behind `again`; why it could not be numbered as it should be."""
        sending: OutboundEntry | None = yield PULL
        if sending is None:
            return None
        again.append(sending)
        if stamped:
            sending.answers = sending.answers or [None] * len(sending.messages)
            return None
        try:
            if self.needs_new_epoch(sending.messages):
                yield from self._begin_epoch(())  # nothing of this producer is under way here
        except MillraceError as error:  # no epoch is to be had now: the old one's numbers hold its place
            if isinstance(error, AppendRejected):
                raise
            return error
        finally:
            self.number(sending)
        return None

    def _settle(self, sending: OutboundEntry, places: Sequence[int], answer: Iterable[MessageOutcome]) -> None:
        for place, judged in zip(places, answer, strict=True):
            message = sending.messages[place]
            if isinstance(judged, AppendRejected):
                if judged.reason in _AGAIN:
                    self._note(message.vchannel, judged)
                    continue
                if judged.reason == Reason.PRODUCER_FENCED:
                    words = f"a newer producer took over the id {self.id}: close this one"
                    judged = ProducerFenced(_as_known(sending, words))
                if judged.reason in _UNNUMBERED:
                    self._renumber.add(message.vchannel)
            sending.answers[place] = judged

    def _failed(self, sending: OutboundEntry, error: MillraceError, stamped: bool) -> MillraceError:
        """Note that no answer came; the failure that is to be counted."""
        if isinstance(error, EntryTooLarge):
            self._refuse(sending, AppendRejected(_as_known(sending, str(error)), reason=Reason.TOO_LARGE))
            error = _REFUSED
        elif isinstance(error, PermissionDenied) and not (sending.ambiguous or stamped):
            self._refuse(sending, AppendDenied(str(error)))
            error = _REFUSED
        sending.ambiguous |= not isinstance(error, _NOT_TAKEN)
        return error

    def _refuse(self, sending: OutboundEntry, answer: AppendRejected) -> None:
        """This attempt is not in the log, nor ever will be."""
        for place in sending.unanswered:
            sending.answers[place] = answer
            self._renumber.add(sending.messages[place].vchannel)

    # --- what a verdict asks for ----------------------------------------------------------------------------------------

    def _note(self, vchannel: str, judged: AppendRejected) -> None:
        """Keep the first verdict of a pass that sends messages out again."""
        if self._verdict is None:
            self._verdict = (vchannel, judged)

    def _mend(
        self, again: deque[OutboundEntry], failures: int, attempts: int, stamped: bool
    ) -> Generator[Action, Any, MillraceError | None]:
        """Make what is to go out again acceptable; the failure where only waiting can."""
        if self._verdict is None:
            return None
        vchannel, judged = self._verdict
        if judged.reason in _TERMS:
            term = _given((yield FetchTerm()))
            older = any(each.messages[place].term != term for each in again for place in each.unanswered)
            if term == self.term and not older:  # an opening is under way, or the log is not the coordinator's
                if failures < attempts:
                    return judged
                yield from self._give_up(again, judged, None)
                return None
            self.term = term
            for sending in again:
                for place in sending.unanswered:
                    sending.messages[place] = replace(sending.messages[place], term=term)
            return None
        first = next(
            (each for each in again if any(each.messages[place].vchannel == vchannel for place in each.unanswered)),
            None,
        )
        if stamped and failures > 1:
            raise judged  # numbers that are kept elsewhere too cannot change here
        if stamped:
            return None
        if judged.reason == Reason.UNKNOWN_PRODUCER and (first is None or not first.ambiguous):
            self._renumber.add(vchannel)
        if self._renumber:
            yield from self._begin_epoch(again)
            return None
        if failures <= 1:
            return None  # what came before it goes out first this time
        if judged.reason == Reason.SEQUENCE_GAP:
            return LogRegressed(
                f"{self.pchannel} does not know sequences of producer {self.id} that it acknowledged ({judged}):"
                " the log lost its tail. Compare it with the WAL (`millrace verify`) before anything is sent again"
            )
        if failures < attempts:
            return judged
        yield from self._give_up(again, judged, vchannel)
        return None

    def _give_up(self, again: deque[OutboundEntry], judged: AppendRejected, vchannel: str | None) -> Steps:
        """What is to go out again, on one VChannel or on all, was refused for good."""
        for sending in list(again):
            answer = AppendRejected(_as_known(sending, str(judged)), reason=judged.reason)
            for place in sending.unanswered:
                name = sending.messages[place].vchannel
                if vchannel is None or name == vchannel:
                    sending.answers[place] = answer
                    self._renumber.add(name)
            if not sending.unanswered:
                again.remove(sending)
                if sending.on_settled is not None:
                    yield Settle(sending)

    def _begin_epoch(self, again: Iterable[OutboundEntry]) -> Steps:
        """Number what is to go out again on the VChannels to renumber from 0 in a new epoch; all of it, or nothing changes."""
        self.begin_epochs(_given((yield FetchEpochs(self.epochs_to_renew()))), again)

    def _pause(
        self, failure: MillraceError, failures: int, patience: RetryPolicy, again: Iterable[OutboundEntry]
    ) -> float:
        """Seconds before the next attempt. Raises where there is none left, or where none can help."""
        if failure is _REFUSED:
            return 0.0
        attempts, delay = patience.attempts, patience.pause
        if isinstance(failure, RateLimited):
            delay = failure.retry_after
            attempts = max(attempts, int(patience.throttle_seconds / max(delay, 0.001)))
        if isinstance(failure, AssignmentStale):  # the PChannel moves, which ends by itself
            delay = min(delay, _MOVING_PAUSE)
            attempts = max(attempts, int(patience.throttle_seconds / max(delay, 0.001)))
        verdict = isinstance(failure, AppendRejected)
        if not failure.retriable and not verdict:
            raise failure
        if failures >= attempts or self.closed:
            known = isinstance(failure, _NOT_TAKEN) and not any(sending.ambiguous for sending in again)
            words = "nothing of" if known else "it is unknown what became of"
            raise AppendUnresolved(
                f"after {failures} attempts {words} the newest appends to {self.pchannel}"
                f"{' was taken' if known else ''}: {failure.code}, {failure}."
                " They keep their sequences; settle() or the next append sends them again"
            ) from failure
        return delay

    # --- numbers --------------------------------------------------------------------------------------------------------

    def needs_new_epoch(self, messages: Iterable[MutableMessage]) -> bool:
        """Whether new epochs are to begin before `messages` get their numbers; not while anything of older ones is open."""
        return not self.unresolved and any(message.vchannel in self._renumber for message in messages)

    def epochs_to_renew(self) -> dict[str, int]:
        """The VChannels on which a new epoch is to begin, and the one that each is in."""
        return {name: self._epochs.get(name, 0) for name in self._renumber}

    def begin_epochs(self, epochs: Mapping[str, int], again: Iterable[OutboundEntry] = ()) -> None:
        """Go on in these epochs; what is open of `again` on their VChannels is numbered anew, in its order."""
        self._renumber.difference_update(epochs)
        self._epochs |= epochs
        self._sequences |= dict.fromkeys(epochs, 0)
        for sending in again:
            for place in sending.unanswered:
                if sending.messages[place].vchannel in epochs:
                    (sending.messages[place],) = self.stamp([sending.messages[place]])

    def number(self, sending: OutboundEntry) -> None:
        """Give its messages the next numbers; nothing is known of them yet."""
        sending.messages[:] = self.stamp(sending.messages)
        sending.answers = [None] * len(sending.messages)

    def numbers(self) -> dict[str, tuple[int, int]]:
        """By VChannel the epoch and the next sequence."""
        return {name: (epoch, self._sequences.get(name, 0)) for name, epoch in self._epochs.items()}

    def resume(self, numbers: Mapping[str, tuple[int, int]]) -> None:
        """Go on from these."""
        self._epochs = {name: epoch for name, (epoch, _) in numbers.items()}
        self._sequences = {name: sequence for name, (_, sequence) in numbers.items()}

    def stamp(self, messages: Sequence[MutableMessage], *, barrier: int | None = None) -> list[MutableMessage]:
        """`messages` with term, producer, epoch and the next sequences, a first one with `barrier` (default: the greatest tick known)."""
        stamped = []
        for message in messages:
            name = message.vchannel
            sequence = self._sequences.get(name, 0)
            self._sequences[name] = sequence + 1
            epoch = self._epochs.setdefault(name, self.epoch)
            least = 0 if sequence else self.tick if barrier is None else barrier
            stamps: dict[str, Any] = {"term": self.term, "producer_id": self.id, "epoch": epoch, "sequence": sequence}
            stamped.append(replace(message, **stamps, barrier_tick=max(message.barrier_tick, least)))
        return stamped


def _given(reply: Any) -> Any:
    """What was asked for. Raises the failure where that came instead."""
    if isinstance(reply, MillraceError):
        raise reply
    return reply


def _as_known(sending: OutboundEntry, words: str) -> str:
    """A refusal in words: it tells of one attempt, and an earlier one may have taken effect."""
    if sending.ambiguous:
        words += "; whether these messages took effect before, read: their first answer was lost"
    return words


def _counted(sending: OutboundEntry) -> dict[str, int]:
    """How many messages of each VChannel it carries."""
    found: dict[str, int] = {}
    for message in sending.messages:
        found[message.vchannel] = found.get(message.vchannel, 0) + 1
    return found


def _fits(mine: Mapping[str, int], held: Mapping[str, int]) -> bool:
    """Whether `mine` may be sent while `held` messages of the VChannels are in flight."""
    return all(held[name] + count <= WINDOW for name, count in mine.items())
