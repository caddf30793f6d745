"""A lane's decisions, driven step by step without threads or a clock.

Whatever comes of each action, each message has one effect.

The chain is a model of docs/chain.md, "Producers", that knows one producer: terms, epochs, sequences, the last results.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    AppendDenied,
    AppendRejected,
    AppendUnresolved,
    AssignmentStale,
    DeadlineExceeded,
    EntryTooLarge,
    LogRegressed,
    LogUnavailable,
    MillraceError,
    PermissionDenied,
    ProducerFenced,
    RateLimited,
    ServerFull,
    ServerStopping,
)
from millrace.client.produce.lane import deliver_single
from millrace.client.produce.sequencer import (
    WINDOW,
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
)
from millrace.client.produce.written import MessageOutcome
from millrace.message.ids import MessageId
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.rpc.outcome import AppendResult
from millrace.wal.reasons import Reason

PRODUCER = 7
VCHANNELS = ("p/0", "p/1")
UNCLEAR = "whether these messages took effect before"


def message(number: int, vchannel: str, kind: str = "good") -> MutableMessage:
    """`kind`: ``good``, ``malformed`` (refused, and its number is not used) or ``mismatch`` (refused, and it is)."""
    return MutableMessage(type=MessageType.INSERT, vchannel=vchannel, payload=f"{number} {kind}".encode())


def number_of(each: MutableMessage) -> int:
    return int(bytes(each.payload).split()[0])


def kind_of(each: MutableMessage) -> str:
    return bytes(each.payload).split()[1].decode()


@dataclass
class Known:
    epoch: int
    following: int = 0
    results: dict[int, MessageOutcome] = field(default_factory=dict)


class Chain:
    """What the chain decides about one producer's messages."""

    def __init__(self) -> None:
        self.term = 1
        self.known: dict[str, Known] = {}
        self.effects: dict[str, list[int]] = {name: [] for name in VCHANNELS}
        self.ticks: dict[int, int] = {}

    def take(self, entry: list[MutableMessage]) -> list[MessageOutcome]:
        judged = [self._judged(each) for each in entry]
        for name, count in Counter(each.vchannel for each in entry).items():
            if name in self.known:
                least = self.known[name].following - max(WINDOW, count)
                self.known[name].results = {s: r for s, r in self.known[name].results.items() if s >= least}
        return judged

    def _judged(self, each: MutableMessage) -> MessageOutcome:
        if each.term != self.term:
            return rejected(Reason.TERM_FENCED if each.term < self.term else Reason.TERM_NOT_OPENED)
        if kind_of(each) == "malformed":
            return rejected(Reason.MALFORMED)
        known = self.known.get(each.vchannel)
        if known is None and each.sequence:
            return rejected(Reason.UNKNOWN_PRODUCER)
        if known is not None and each.epoch < known.epoch:
            return rejected(Reason.PRODUCER_FENCED)
        if known is not None and each.epoch > known.epoch and each.sequence:
            return rejected(Reason.SEQUENCE_GAP)
        if known is None or each.epoch > known.epoch:
            known = self.known[each.vchannel] = Known(each.epoch)
        if each.sequence < known.following:
            return known.results.get(each.sequence) or rejected(Reason.ALREADY_APPLIED)
        if each.sequence > known.following:
            return rejected(Reason.SEQUENCE_GAP)
        known.results[each.sequence] = result = self._applied(each)
        known.following += 1
        return result

    def _applied(self, each: MutableMessage) -> MessageOutcome:
        if kind_of(each) == "mismatch":
            return rejected(Reason.SCHEMA_MISMATCH)
        self.effects[each.vchannel].append(number_of(each))
        tick = self.ticks[number_of(each)] = len(self.ticks) + 1
        return AppendResult(MessageId(0, tick, 0, 0), None, tick)


def rejected(reason: Reason) -> AppendRejected:
    return AppendRejected(f"rejected: {reason}", reason=reason)


FAILURES: dict[str, Callable[[], MillraceError]] = {
    "limited": lambda: RateLimited("not now", retry_after=0.5),
    "full": lambda: ServerFull("no room"),
    "denied": lambda: PermissionDenied("not yours"),
    "too large": lambda: EntryTooLarge("too large"),
    "stale": lambda: AssignmentStale("another node has it"),
    "stopping": lambda: ServerStopping("it restarts"),
}
WAYS = (*["taken"] * 4, "lost before", "lost after", "late", "no way", *FAILURES)


class Deliveries(RuleBasedStateMachine):
    """One producer's deliveries; each rule is what came of the action that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()
        self.sequencer = Sequencer("p", PRODUCER, term=1, epoch=1)
        self.steps: Steps | None = None
        self.action: Action | None = None
        self.way: deque[tuple[list[MutableMessage], list[MessageOutcome] | MillraceError]] = deque()
        self.late: list[list[MutableMessage]] = []
        self.drawn: list[OutboundEntry] = []
        self.numbers: dict[tuple[str, int, int], int] = {}
        self.settled: Counter[int] = Counter()
        self.count = 0
        self.forgot = self.fenced = self.stuck = self.pipelined = False

    # --- the way through a delivery -----------------------------------------------------------------------------------

    def go_on(self, reply: Any) -> None:
        """Tell what came of the action; what is asked for next."""
        assert self.steps is not None
        try:
            while isinstance(action := self.steps.send(reply), Settle):
                assert not action.sending.unanswered, "settled is who knows all"
                self.settled[id(action.sending)] += 1
                reply = None
            self.action = action
            return
        except StopIteration:
            assert not self.sequencer.unresolved
        except AppendUnresolved as error:
            held = [each for each in self.sequencer.unresolved if each.unanswered]
            assert held, "nothing is left, and yet it gives up"
            if "nothing of" in str(error):
                assert not any(each.ambiguous for each in held)
        except ProducerFenced:
            assert self.fenced
        except PermissionDenied:  # of an entry that may have taken effect: it stays open
            assert any(each.ambiguous for each in self.sequencer.unresolved)
        except LogRegressed:
            pytest.fail("the chain lost nothing")
        self.ended()

    def ended(self) -> None:
        self.steps = self.action = None
        self.way.clear()

    def asks(kind: type[Any]) -> Any:  # type: ignore[misc]
        return precondition(lambda self: isinstance(self.action, kind))

    @precondition(lambda self: self.steps is None)
    @rule(pipelined=st.booleans(), attempts=st.integers(1, 3))
    def deliver(self, pipelined: bool, attempts: int) -> None:
        self.pipelined = pipelined
        self.steps = self.sequencer.delivery(RetryPolicy(attempts, 1.0, throttle_seconds=1.0), pipelined=pipelined)
        self.go_on(None)

    @asks(Pull)
    @rule(
        run=st.lists(
            st.tuples(st.sampled_from(VCHANNELS), st.sampled_from(["good"] * 8 + ["malformed", "mismatch"])),
            min_size=1,
            max_size=4,
        ),
        times=st.sampled_from([1, 1, 1, 5]),
    )
    def draw(self, run: list[tuple[str, str]], times: int) -> None:
        messages = []
        for vchannel, kind in run * times:
            messages.append(message(self.count, vchannel, kind))
            self.count += 1
        sending = OutboundEntry(messages, on_settled=lambda _: None)
        self.drawn.append(sending)
        self.go_on(sending)

    @asks(Pull)
    @rule()
    def draw_nothing(self) -> None:
        self.go_on(None)

    @asks(Send)
    @rule(how=st.sampled_from(WAYS))
    def send(self, how: str) -> None:
        assert isinstance(self.action, Send)
        entry = [self.action.sending.messages[place] for place in self.action.sending.unanswered]
        assert entry
        for each in entry:
            number = self.numbers.setdefault((each.vchannel, each.epoch, each.sequence), number_of(each))
            assert number == number_of(each), "a number was given twice"
        if how == "no way":
            self.go_on(LogUnavailable(how))
            return
        answer: list[MessageOutcome] | MillraceError = LogUnavailable(how)
        if how in ("taken", "lost after"):
            judged = self.chain.take(entry)
            answer = judged if how == "taken" else answer
        elif how == "late":
            self.late.append(entry)
        elif how in FAILURES:
            answer = FAILURES[how]()
        self.way.append((entry, answer))
        assert self.pipelined or len(self.way) == 1
        for name in VCHANNELS:
            on_the_way = [n for entry, _ in self.way if (n := sum(each.vchannel == name for each in entry))]
            assert len(on_the_way) <= 1 or sum(on_the_way) <= WINDOW, "more than the chain remembers the results of"
        self.go_on(None)

    @asks(Receive)
    @rule()
    def receive(self) -> None:
        self.go_on(self.way.popleft()[1])

    @asks(FetchTerm)
    @rule(how=st.sampled_from(["told", "told", "stale", "unknown"]))
    def tell_term(self, how: str) -> None:
        self.stuck |= how == "stale"
        stale = self.sequencer.term
        self.go_on({"told": self.chain.term, "stale": stale, "unknown": LogUnavailable(how)}[how])

    @asks(FetchEpochs)
    @rule(known=st.sampled_from([True, True, False]))
    def tell_epochs(self, known: bool) -> None:
        assert isinstance(self.action, FetchEpochs)
        assert self.action.above
        if self.fenced:
            self.go_on(ProducerFenced("another has the id"))
        elif known:
            self.go_on({name: self._renewed(above) for name, above in self.action.above.items()})
        else:
            self.go_on(LogUnavailable("the coordinator restarts"))

    def _renewed(self, above: int) -> int:
        self.sequencer.epoch = max(self.sequencer.epoch, above + 1)
        return self.sequencer.epoch

    @asks(RetryAfter)
    @rule(elapsed=st.sampled_from([None, 0.0, 0.5, 2.0]))
    def repeat(self, elapsed: float | None) -> None:
        assert isinstance(self.action, RetryAfter)
        assert self.action.pause in (0.0, 0.1, 0.5, 1.0)
        assert not self.way, "nothing is on the way between two rounds"
        self.go_on(elapsed)

    # --- what happens elsewhere ---------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["nothing"] * 12 + [*["interrupt"] * 3, "term", *["late"] * 2, *["forget"] * 3, "take over"]
        ),
        sent=st.booleans(),
    )
    def meanwhile(self, what: str, sent: bool) -> None:
        if what == "interrupt" and self.steps is not None:
            if sent and isinstance(self.action, Send):  # it had just gone out
                self.chain.take([self.action.sending.messages[place] for place in self.action.sending.unanswered])
            self.steps.close()
            self.ended()
        elif what == "term":
            self.chain.term += 1
        elif what == "late" and self.late:
            self.chain.take(self.late.pop(0))
        elif what == "forget" and self._may_forget():
            self.chain.known.clear()
            self.forgot = True
        elif what == "take over" and not self.fenced and len(self.drawn) > 2:
            self.fenced = True
            for known in self.chain.known.values():
                known.epoch, known.following, known.results = known.epoch + 100, 0, {}

    def _may_forget(self) -> bool:
        """A chain that forgot cannot tell an entry that begins an epoch from a new one, nor one that comes late."""
        return not self.late and all(
            each.sequence
            for sending in self.drawn
            for place in sending.unanswered
            for each in [sending.messages[place]]
        )

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def each_takes_effect_once_and_in_order(self) -> None:
        for numbers in self.chain.effects.values():
            assert all(one < other for one, other in pairwise(numbers))

    @invariant()
    def what_is_open_is_held_once_and_in_order(self) -> None:
        if self.steps is None:
            assert self.sequencer.unresolved == [each for each in self.drawn if each.unanswered]

    @invariant()
    def answers_are_right(self) -> None:
        for sending in self.drawn:
            assert self.settled[id(sending)] <= 1
            for each, answer in zip(sending.messages, sending.answers, strict=False):
                if isinstance(answer, AppendResult):
                    assert self.chain.ticks[number_of(each)] == answer.time_tick
                elif answer is not None:
                    assert UNCLEAR in str(answer) or number_of(each) not in self.chain.ticks, (each, answer)

    def teardown(self) -> None:
        """Once nothing is at fault any more it goes on by itself, and all is known of everything."""
        self.sequencer.closed = False
        while self.late:
            self.chain.take(self.late.pop(0))
        for _ in range(400):
            if self.steps is None:
                if not self.sequencer.unresolved:
                    break
                self.deliver(pipelined=True, attempts=3)
            elif isinstance(self.action, Pull):
                self.draw_nothing()
            elif isinstance(self.action, Send):
                self.send("taken")
            elif isinstance(self.action, Receive):
                self.receive()
            elif isinstance(self.action, FetchTerm):
                self.tell_term("told")
            elif isinstance(self.action, FetchEpochs):
                self.tell_epochs(known=True)
            else:
                self.repeat(elapsed=None)
            self.answers_are_right()
            self.each_takes_effect_once_and_in_order()
            if self.fenced and self.steps is None:
                break  # it is to be closed
        if self.fenced:
            return
        assert not self.sequencer.unresolved, "it does not come to an end"
        for sending in self.drawn:
            assert self.settled[id(sending)] == 1
            for each, answer in zip(sending.messages, sending.answers, strict=True):
                self._check_last(each, answer)

    def _check_last(self, each: MutableMessage, answer: MessageOutcome | None) -> None:
        assert answer is not None
        if isinstance(answer, AppendResult | AppendDenied):
            return
        expected = {"malformed": {Reason.MALFORMED}, "mismatch": {Reason.SCHEMA_MISMATCH}, "good": set()}[kind_of(each)]
        expected |= {Reason.TOO_LARGE}
        expected |= {Reason.TERM_FENCED, Reason.TERM_NOT_OPENED} if self.stuck else set()
        expected |= {Reason.UNKNOWN_PRODUCER} if self.forgot else set()
        assert answer.reason in expected, (each, answer)


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)


def test_a_refusal_of_a_repeat_does_not_say_that_nothing_took_effect() -> None:
    sending = OutboundEntry([message(0, VCHANNELS[0])])
    steps = Sequencer("p", PRODUCER, term=1, epoch=1).delivery(
        RetryPolicy(3, 0.0, throttle_seconds=1.0), pipelined=False
    )
    replies = [None, sending, None, LogUnavailable("lost"), None, None, EntryTooLarge("the server takes less now")]
    asked = [type(steps.send(reply)) for reply in replies]
    assert asked == [Pull, Send, Receive, RetryAfter, Send, Receive, RetryAfter]
    (answer,) = sending.answers
    assert isinstance(answer, AppendRejected)
    assert answer.reason == Reason.TOO_LARGE
    assert UNCLEAR in str(answer)


# --- bounds in time, and entries that no lane numbers -----------------------------------------------------------------

REFUSALS: dict[str, Callable[[], MillraceError]] = FAILURES
AMBIGUOUS: dict[str, Callable[[], MillraceError]] = {
    "lost before": lambda: LogUnavailable("lost"),
    "lost after": lambda: LogUnavailable("lost"),
    "late": lambda: DeadlineExceeded("not decided in time"),
}
PASSING = ("limited", "stale", "stopping")


@dataclass
class Time:
    """A clock that waiting and sending alone move."""

    now: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def deadline(self, seconds: float) -> Deadline:
        return Deadline.after(seconds, clock=lambda: self.now, sleep=self.sleep)


outcomes = st.lists(
    st.tuples(st.sampled_from(["written", *REFUSALS, *AMBIGUOUS]), st.floats(0.0, 3.0)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(outcomes, st.floats(0.0, 8.0), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.1, 1.0]))
def test_an_entry_that_no_lane_numbers_takes_effect_once_at_most_and_ends_by_its_deadline(
    script: list[tuple[str, float]], seconds: float, attempts: int, numbered: bool, pause: float
) -> None:
    time, script = Time(), [*script]
    effects, sent = 0, []

    def send(until: Deadline) -> str:
        nonlocal effects
        how, taking = script.pop(0) if len(script) > 1 else script[0]
        time.sleep(until.remaining(maximum=max(taking, 0.001)))
        sent.append(how)
        if how in ("written", "lost after", "late"):
            effects = 1 if numbered else effects + 1  # the chain recognizes the repeat of what a producer numbered
        if how == "written":
            return "done"
        raise {**REFUSALS, **AMBIGUOUS}[how]()

    deadline = time.deadline(seconds)
    try:
        answer = deliver_single(send, deadline=deadline, attempts=attempts, pause=pause, numbered=numbered)
    except MillraceError as error:
        assert sent[-1] != "written"
        if all(how in REFUSALS for how in sent):
            assert effects == 0
        if isinstance(error, LogUnavailable | DeadlineExceeded) and not isinstance(error, ServerStopping):
            assert sent[-1] in AMBIGUOUS
    else:
        assert (answer, sent[-1], effects) == ("done", "written", 1)
    assert effects <= 1
    assert time.now <= deadline.at + 1e-9, "the deadline bounds everything"
    assert numbered or not set(sent[:-1]) & AMBIGUOUS.keys(), "what may be in the log is not sent again"
    assert not {"denied", "too large"} & set(sent[:-1]), "no other attempt can cure that"
    assert sum(how not in PASSING for how in sent) <= attempts


@settings(deadline=None)
@given(outcomes, st.integers(1, 4), st.floats(0.0, 8.0), st.floats(0.0, 3.0), st.sampled_from([0.0, 0.1, 1.0]))
def test_a_delivery_that_makes_no_progress_ends_within_the_bounds_of_its_policy(
    script: list[tuple[str, float]], attempts: int, throttle: float, longest: float, pause: float
) -> None:
    failing = [each for each in script if each[0] not in ("written", "denied", "too large")] or [("stale", 0.0)]
    time, before, count = Time(), 0.0, 0
    sequencer = Sequencer("p", PRODUCER, term=1, epoch=1)
    steps = sequencer.delivery(RetryPolicy(attempts, pause, throttle_seconds=throttle), pipelined=False)
    waiting = [OutboundEntry([message(0, VCHANNELS[0])])]

    def answer(action: Action) -> Any:
        nonlocal before, count
        if isinstance(action, Pull):
            return waiting.pop() if waiting else None
        if isinstance(action, Receive):
            how, taking = failing[count % len(failing)]
            count += 1
            time.sleep(max(min(taking, longest), 0.001))
            return {**REFUSALS, **AMBIGUOUS}[how]()
        if isinstance(action, RetryAfter):
            time.sleep(action.pause)
            elapsed, before = time.now - before, time.now
            return elapsed
        return None

    action = next(steps)
    gave_up: AppendUnresolved | None = None
    while gave_up is None:
        try:
            action = steps.send(answer(action))
        except AppendUnresolved as error:
            gave_up = error
    slowest = longest + max(pause, 0.5) + 0.001
    assert time.now <= attempts * slowest + throttle + slowest
    (held,) = sequencer.unresolved
    assert held.unanswered == [0], "it keeps its place and its numbers"
    assert ("nothing of" in str(gave_up)) is not held.ambiguous
