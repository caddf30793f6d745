"""Sequencing of a lane's sends as a state machine without threads, clock or I/O.

It covers numbers, windows, answers, resends and epochs.

A delivery (:meth:`Sequencer.delivery`) is a generator. It yields one action at a time and receives its result; failures
of a remote call come back as values. The driver (`lane.py`; a property test) may close it at any action: entries that
were drawn and have no final outcome are then `unresolved`, in order.

Only this module decides what is resent, how often and after which pause. Everything below it sends an append once.
Appends that no lane numbers use :func:`single_delivery`, with the same rules.
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
    ServerStopping,
)
from millrace.client.produce.written import MessageOutcome, Written
from millrace.message.model import MutableMessage
from millrace.wal.reasons import Reason

WINDOW: Final = 16
"""Messages of one VChannel in flight besides one entry: the results that the chain keeps (``dedup_results``)."""

_TERMS: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})
_AGAIN: Final = _TERMS | {Reason.SEQUENCE_GAP, Reason.UNKNOWN_PRODUCER}
"""Verdicts that do not concern the message itself: it is sent again."""

_UNNUMBERED: Final = frozenset({Reason.MALFORMED, Reason.UNSUPPORTED_TYPE, Reason.TOO_LARGE})
"""Final verdicts that do not use the sequence, so the following messages need new numbers."""


_LEAST_PAUSE: Final = 0.001
"""Minimum seconds between two attempts, even if the server asks for less: an attempt without a pause spins."""

PASSING_PAUSE: Final = 0.1
"""Seconds between two attempts while the PChannel moves between nodes, or its server restarts."""

_REFUSED: Final = EntryTooLarge("an entry was refused for good, and settled as such: what follows goes on")
"""Placeholder for any refusal that settles an entry for good. Never raised."""

_NOT_TAKEN: Final = (AssignmentStale, ServerStopping, RateLimited, EntryTooLarge, PermissionDenied, ServerFull)
"""Refusals that prove that nothing was appended."""

_PASSING: Final = (AssignmentStale, ServerStopping)
"""Refusals that end by themselves: the PChannel moves, or the server restarts."""


@dataclass(slots=True, eq=False)
class OutboundEntry:
    """Messages that are sent in one entry, and the outcome of each.

    `on_settled` is called once all outcomes are known.
    """

    messages: list[MutableMessage]
    on_settled: Callable[[OutboundEntry], None] | None = None
    answers: list[MessageOutcome | None] = field(default_factory=list)
    ambiguous: bool = False
    """Whether an attempt's answer was lost, so that it may have taken effect."""
    context: object = None
    """Data of the caller."""
    entry: bytes = b""
    """The encoded entry for the first attempt, if the caller has it."""

    @property
    def unanswered(self) -> list[int]:
        """The indexes of the messages without an outcome."""
        return [place for place, answer in enumerate(self.answers) if answer is None]

    def written(self) -> Written:
        """Return the outcome of the messages that have one."""
        found = Written()
        for message, answer in zip(self.messages, self.answers, strict=True):
            if answer is not None:
                found.count(message, answer)
        return found


# --- actions for the driver of a delivery; each docstring says what the driver sends back -----------------------------


@dataclass(frozen=True, slots=True)
class Pull:
    """Return the next entry to send, or None if there is none now."""


@dataclass(slots=True)
class Send:
    """Send the unanswered messages of an entry after all that are in flight.

    Returns None, or the failure: then it was not sent.
    """

    sending: OutboundEntry


@dataclass(frozen=True, slots=True)
class Receive:
    """Return the answer to the oldest entry in flight: an outcome per unanswered message, or the failure."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Notify the caller that an entry has all its outcomes. Returns None."""

    sending: OutboundEntry


@dataclass(frozen=True, slots=True)
class FetchTerm:
    """Return the PChannel's open term, or the failure."""


@dataclass(frozen=True, slots=True)
class FetchEpochs:
    """Return by VChannel an epoch above the given one, or the failure."""

    above: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Wait `pause` seconds; another round follows.

    Returns the seconds since the last such wait ended (or since the delivery began), or None if no more than `pause`
    seconds passed.
    """

    pause: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """Send the entry of a single delivery once. Returns its outcome, or the failure."""


Action: TypeAlias = Pull | Send | Receive | Settle | FetchTerm | FetchEpochs | RetryAfter
Steps: TypeAlias = Generator[Action, Any, None]

PULL: Final = Pull()
RECEIVE: Final = Receive()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of a delivery: `attempts` rounds without progress, `pause` seconds apart.

    While the server only postpones appends (rate limit, moving PChannel, restart), attempts continue until
    `throttle_seconds` have passed without progress.
    """

    attempts: int
    pause: float
    throttle_seconds: float

    def delay(self, failure: MillraceError, failures: int, postponed: float) -> float | None:
        """Return the seconds before the next attempt, or None if there is none.

        `failures` counts the rounds without progress, this one included; `postponed` is how many seconds the server has
        only postponed them.
        """
        delay, patient = self.pause, False
        if isinstance(failure, RateLimited):
            delay, patient = max(failure.retry_after, _LEAST_PAUSE), True
        elif isinstance(failure, _PASSING):
            delay, patient = min(self.pause, PASSING_PAUSE), True
        return delay if failures < self.attempts or (patient and postponed < self.throttle_seconds) else None


def single_delivery(policy: RetryPolicy, *, numbered: bool) -> Generator[Attempt | RetryAfter, Any, Any]:
    """Send one entry that no lane numbers, and return its outcome.

    After a refusal that proves that nothing was appended, it is sent again, as `policy` says. An entry that may be in
    the log is sent again only if its messages are `numbered` by a producer of the caller's own: the repeat has no
    effect then. So at most one attempt takes effect.

    Raises the failure of the last attempt. LogUnavailable and DeadlineExceeded mean that the entry is in the log once
    or not at all, except ServerStopping, a refusal.
    """
    failures, postponed = 0, 0.0
    while isinstance(reply := (yield Attempt()), MillraceError):
        failures += 1
        again = reply.retriable and (numbered or isinstance(reply, _NOT_TAKEN))
        pause = policy.delay(reply, failures, postponed) if again else None
        if pause is None:
            raise reply
        postponed = _postponed(reply, postponed, pause, (yield RetryAfter(pause)))
    return reply


def _postponed(failure: MillraceError | None, postponed: float, pause: float, elapsed: float | None) -> float:
    """Return how long the server has only postponed appends, after another wait of `pause` seconds."""
    if not isinstance(failure, (RateLimited, *_PASSING)):
        return 0.0
    return postponed + (pause if elapsed is None else elapsed)


class Sequencer:
    """The sequence numbers of one producer on one PChannel, and its unresolved entries. One delivery at a time."""

    def __init__(self, pchannel: str, producer_id: int, *, term: int, epoch: int) -> None:
        self.pchannel = pchannel
        self.id = producer_id
        self.term = term
        self.epoch = epoch
        """The producer's newest epoch, in which it starts on a VChannel; the driver keeps it up to date."""
        self.tick = 1
        """The greatest tick of any answer; the driver keeps it up to date.

        It is the barrier of a first message, by which the chain recognizes a repeat even after it has forgotten the
        producer (docs/chain.md, "Producers").
        """
        self.closed = False
        """Whether failures are raised without further attempts."""
        self.unresolved: list[OutboundEntry] = []
        """Entries that were sent and have no final outcome, in order; they are sent again before anything else."""
        self._epochs: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._renumber: set[str] = set()
        self._verdict: tuple[str, AppendRejected] | None = None

    # --- one delivery -------------------------------------------------------------------------------------------------

    def delivery(self, patience: RetryPolicy, *, pipelined: bool = True, stamped: bool = False) -> Steps:
        """Send what `Pull` returns until it returns None with nothing in flight; unresolved entries go first.

        Without `pipelined`, one entry is in flight at a time. `stamped` entries keep their numbers, and a verdict that
        requires others is raised.

        Raises AppendUnresolved if the retry policy is exhausted, LogRegressed, and any error that another attempt
        cannot cure.
        """
        again: deque[OutboundEntry] = deque(self.unresolved)
        self.unresolved = []
        failures, postponed = 0, 0.0
        try:
            while True:
                failure, progress = yield from self._pass(again, pipelined, stamped)
                if failure is None and not again:
                    return
                failures, postponed = (0, 0.0) if progress else (failures + 1, postponed)
                if failure is None:
                    try:
                        failure = yield from self._mend(again, failures, patience.attempts, stamped)
                    except AppendRejected:
                        raise
                    except MillraceError as error:  # the source of terms or epochs is unreachable
                        failure = error
                pause = 0.0 if failure is None else self._pause(failure, failures, postponed, patience, again)
                postponed = _postponed(failure, postponed, pause, (yield RetryAfter(pause)))
        finally:
            self.unresolved = [sending for sending in again if sending.unanswered]

    def _pass(
        self, again: deque[OutboundEntry], pipelined: bool, stamped: bool
    ) -> Generator[Action, Any, tuple[MillraceError | None, bool]]:
        """Send until something stops it; return that failure, and whether anything was settled.

        `again` then holds what to resend.

        However it ends, even by an interrupt, entries that were sent and have no answer are in `again`, in order.
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
                    break  # the next entry starts an epoch, which must wait for the outcome of all earlier entries
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
                except BaseException:  # interrupted while sending
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
        """Append the next entry, if any, to `again`; return why it could not be numbered."""
        sending: OutboundEntry | None = yield PULL
        if sending is None:
            return None
        again.append(sending)
        if stamped:
            sending.answers = sending.answers or [None] * len(sending.messages)
            return None
        try:
            if self.needs_new_epoch(sending.messages):
                yield from self._begin_epoch(())  # nothing of this producer is in flight here
        except MillraceError as error:  # no epoch is available now: the old epoch's numbers keep its place
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
                    words = f"a newer producer has taken over the id {self.id}: close this one"
                    judged = ProducerFenced(_with_ambiguity(sending, words))
                if judged.reason in _UNNUMBERED:
                    self._renumber.add(message.vchannel)
            sending.answers[place] = judged

    def _failed(self, sending: OutboundEntry, error: MillraceError, stamped: bool) -> MillraceError:
        """Note that no answer came; return the failure to count."""
        if isinstance(error, EntryTooLarge):
            self._refuse(sending, AppendRejected(_with_ambiguity(sending, str(error)), reason=Reason.TOO_LARGE))
            error = _REFUSED
        elif isinstance(error, PermissionDenied) and not (sending.ambiguous or stamped):
            self._refuse(sending, AppendDenied(str(error)))
            error = _REFUSED
        sending.ambiguous |= not isinstance(error, _NOT_TAKEN)
        return error

    def _refuse(self, sending: OutboundEntry, answer: AppendRejected) -> None:
        """Settle an attempt that is not in the log and never will be."""
        for place in sending.unanswered:
            sending.answers[place] = answer
            self._renumber.add(sending.messages[place].vchannel)

    # --- reactions to verdicts ----------------------------------------------------------------------------------------

    def _note(self, vchannel: str, judged: AppendRejected) -> None:
        """Keep the first verdict of a pass that resends messages."""
        if self._verdict is None:
            self._verdict = (vchannel, judged)

    def _mend(
        self, again: deque[OutboundEntry], failures: int, attempts: int, stamped: bool
    ) -> Generator[Action, Any, MillraceError | None]:
        """Make the entries to resend acceptable; return the failure if only waiting can."""
        if self._verdict is None:
            return None
        vchannel, judged = self._verdict
        if judged.reason in _TERMS:
            term = _value_or_raise((yield FetchTerm()))
            older = any(each.messages[place].term != term for each in again for place in each.unanswered)
            if term == self.term and not older:  # a term is being opened, or the log belongs to another coordinator
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
            raise judged  # stamped numbers are also stored elsewhere and cannot change here
        if stamped:
            return None
        if judged.reason == Reason.UNKNOWN_PRODUCER and (first is None or not first.ambiguous):
            self._renumber.add(vchannel)
        if self._renumber:
            yield from self._begin_epoch(again)
            return None
        if failures <= 1:
            return None  # on this attempt, earlier messages are sent first
        if judged.reason == Reason.SEQUENCE_GAP:
            return LogRegressed(
                f"{self.pchannel} does not know sequences of producer {self.id} that it acknowledged ({judged}):"
                " the log lost its tail. Compare it with the WAL (`millrace verify`) before sending anything again"
            )
        if failures < attempts:
            return judged
        yield from self._give_up(again, judged, vchannel)
        return None

    def _give_up(self, again: deque[OutboundEntry], judged: AppendRejected, vchannel: str | None) -> Steps:
        """Settle the entries to resend, on one VChannel or on all, as refused for good."""
        for sending in list(again):
            answer = AppendRejected(_with_ambiguity(sending, str(judged)), reason=judged.reason)
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
        """Number the entries to resend from 0 in a new epoch on the VChannels that need it: all of them, or none."""
        self.begin_epochs(_value_or_raise((yield FetchEpochs(self.epochs_to_renew()))), again)

    def _pause(
        self,
        failure: MillraceError,
        failures: int,
        postponed: float,
        patience: RetryPolicy,
        again: Iterable[OutboundEntry],
    ) -> float:
        """Return the seconds before the next attempt. Raises if there is none left, or none can help."""
        if failure is _REFUSED:
            return 0.0
        delay = patience.delay(failure, failures, postponed)
        verdict = isinstance(failure, AppendRejected)
        if not failure.retriable and not verdict:
            raise failure
        if delay is None or self.closed:
            known = isinstance(failure, _NOT_TAKEN) and not any(sending.ambiguous for sending in again)
            words = "nothing of" if known else "the outcome is unknown of"
            raise AppendUnresolved(
                f"after {failures} attempts {words} the newest appends to {self.pchannel}"
                f"{' was accepted' if known else ''}: {failure.code}, {failure}."
                " They keep their sequences; settle() or the next append sends them again"
            ) from failure
        return delay

    # --- numbers ------------------------------------------------------------------------------------------------------

    def needs_new_epoch(self, messages: Iterable[MutableMessage]) -> bool:
        """Return whether new epochs must start before `messages` are numbered.

        Never while entries of older epochs are unresolved.
        """
        return not self.unresolved and any(message.vchannel in self._renumber for message in messages)

    def epochs_to_renew(self) -> dict[str, int]:
        """Return the VChannels that need a new epoch, with their current one."""
        return {name: self._epochs.get(name, 0) for name in self._renumber}

    def begin_epochs(self, epochs: Mapping[str, int], again: Iterable[OutboundEntry] = ()) -> None:
        """Continue in these epochs; unanswered messages of `again` on their VChannels are renumbered, in order."""
        self._renumber.difference_update(epochs)
        self._epochs |= epochs
        self._sequences |= dict.fromkeys(epochs, 0)
        for sending in again:
            for place in sending.unanswered:
                if sending.messages[place].vchannel in epochs:
                    (sending.messages[place],) = self.stamp([sending.messages[place]])

    def number(self, sending: OutboundEntry) -> None:
        """Give the entry's messages the next numbers; no outcome is known yet."""
        sending.messages[:] = self.stamp(sending.messages)
        sending.answers = [None] * len(sending.messages)

    def numbers(self) -> dict[str, tuple[int, int]]:
        """Return by VChannel the epoch and the next sequence."""
        return {name: (epoch, self._sequences.get(name, 0)) for name, epoch in self._epochs.items()}

    def resume(self, numbers: Mapping[str, tuple[int, int]]) -> None:
        """Continue from these numbers."""
        self._epochs = {name: epoch for name, (epoch, _) in numbers.items()}
        self._sequences = {name: sequence for name, (_, sequence) in numbers.items()}

    def stamp(self, messages: Sequence[MutableMessage], *, barrier: int | None = None) -> list[MutableMessage]:
        """Stamp `messages` with term, producer, epoch and the next sequences.

        A first message gets `barrier` (default: the greatest known tick).
        """
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


def _value_or_raise(reply: Any) -> Any:
    """Return the reply. Raises it if it is a failure."""
    if isinstance(reply, MillraceError):
        raise reply
    return reply


def _with_ambiguity(sending: OutboundEntry, words: str) -> str:
    """Add to a refusal that an earlier attempt may have taken effect, if that is so."""
    if sending.ambiguous:
        words += "; whether these messages took effect before, read: their first answer was lost"
    return words


def _counted(sending: OutboundEntry) -> dict[str, int]:
    """Count the entry's messages by VChannel."""
    found: dict[str, int] = {}
    for message in sending.messages:
        found[message.vchannel] = found.get(message.vchannel, 0) + 1
    return found


def _fits(mine: Mapping[str, int], held: Mapping[str, int]) -> bool:
    """Return whether `mine` may be sent while `held` messages of the VChannels are in flight."""
    return all(held[name] + count <= WINDOW for name, count in mine.items())
