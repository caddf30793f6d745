"""A failure is one record's: whatever a sink refuses and wherever it crashes, all other records are in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import BatchRefused, InvalidArgument, SinkBusy, SinkRefused
from millrace.flows.batch import Batch
from millrace.flows.declare.errors import Errors
from millrace.flows.isolation import Attempts, Isolation, Outcome
from millrace.flows.records import TASK_PUT, Action, Failure, Record
from millrace.flows.sinks.sink import Verdicts

MANY = Errors(in_a_row=1_000_000)


class Crash(BaseException):
    """The process ends."""


def action(offset: int, keys: int = 3) -> Action:
    return Action(Record("in", 0, offset, b"k%d" % (offset % keys), b"{}", 0), f"k{offset % keys}", b"{}", offset)


def batch(start: int, end: int, *, keys: int = 3) -> Batch:
    return Batch("in-0", start, end, documents=[action(offset, keys) for offset in range(start, end)])


def outcome(
    write: Callable[[Batch], Verdicts],
    what: Batch,
    attempts: Attempts | None = None,
    *,
    errors: Errors = MANY,
    in_a_row: int = 0,
    numbered: bool = True,
) -> Outcome:
    way = Isolation(write, errors, numbered=numbered, lane="in-0", sleep=lambda _: None)
    return way.run(what, attempts or Attempts(), in_a_row=in_a_row)


def offsets(failures: Sequence[Failure]) -> list[int]:
    return [each.record.offset for each in failures]


@dataclass
class Once:
    """A sink that stores the lane's position, and the failures since the runner's, with what it takes."""

    refuses: frozenset[int] = frozenset()
    """As a whole with what comes along."""
    malformed: frozenset[int] = frozenset()
    """Each by itself, as a verdict."""
    events: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    position: int = 0
    failures: dict[int, str] = field(default_factory=dict)

    def write(self, what: Batch) -> Verdicts:
        event = self.events.pop() if self.events else ""
        if event == "busy before":
            raise SinkBusy("not now", retry_after=0.0)
        if event == "crash before":
            raise Crash
        documents = what.documents or ()
        new = [each for each in documents if each.record.offset >= self.position]
        verdicts = Verdicts()
        for each in documents:
            if each.record.offset < self.position:
                if each.record.offset in self.failures:
                    verdicts.failures.append(Failure(each.record, TASK_PUT, "once", "EARLIER", "an earlier attempt"))
                else:
                    verdicts.acknowledged += 1
                    verdicts.repeated += 1
        if any(each.record.offset in self.refuses for each in new):
            raise (BatchRefused if what.start % 2 else InvalidArgument)("one of them")
        bad = [each for each in new if each.record.offset in self.malformed]
        if what.end > self.position:
            known = {place: kind for place, kind in self.failures.items() if place >= what.since}
            mine = {each.record.offset: each.kind for each in what.aside}
            self.failures = known | mine | {each.record.offset: "MALFORMED" for each in bad}
            self.rows += [each.record.offset for each in new if each not in bad]
            self.position = what.end
        verdicts.failures += [Failure(each.record, TASK_PUT, "once", "MALFORMED", "of its own") for each in bad]
        verdicts.acknowledged += len(new) - len(bad)
        if event == "busy after":
            raise SinkBusy("the answer was lost", retry_after=0.0)
        if event == "crash after":
            raise Crash
        return verdicts


@dataclass
class Runner:
    """A lane's runner, with what of it outlives its process."""

    write: Callable[[Batch], Verdicts]
    end: int
    cuts: list[int]
    crashes: list[bool] = field(default_factory=list)
    """Whether the process ends between the letters and the commit of a range."""
    size: int = 7
    position: int = 0
    in_a_row: int = 0
    letters: Counter[int] = field(default_factory=Counter)
    acknowledged: int = 0
    attempts: Attempts = field(default_factory=Attempts)

    def run(self, errors: Errors = MANY) -> None:
        for _ in range(10_000):
            if self.position == self.end:
                return
            size = self.cuts.pop() if self.cuts else self.size
            what = batch(self.position, min(self.end, self.position + size))
            try:
                found = outcome(self.write, what, self.attempts, errors=errors, in_a_row=self.in_a_row)
                if found.position == self.position:
                    continue
                self.letters.update(offsets(found.verdicts.failures))
                if self.crashes and self.crashes.pop():
                    raise Crash
            except Crash:
                self.attempts = Attempts()
                continue
            done = found.position - self.position
            assert found.verdicts.acknowledged + len(found.verdicts.failures) == done
            assert all(self.position <= offset < found.position for offset in offsets(found.verdicts.failures))
            self.acknowledged += found.verdicts.acknowledged
            self.position, self.in_a_row = found.position, found.in_a_row
        raise AssertionError(f"it stands at {self.position}")


_SUBSETS = st.frozensets(st.integers(0, 59), max_size=20)
_CUTS = st.lists(st.integers(1, 40), max_size=30)
_CRASHES = st.lists(st.booleans(), max_size=10)


@settings(max_examples=300, deadline=None)
@given(
    refuses=_SUBSETS,
    malformed=_SUBSETS,
    events=st.lists(st.sampled_from(["", "", "busy before", "busy after", "crash before", "crash after"]), max_size=40),
    cuts=_CUTS,
    crashes=_CRASHES,
)
def test_an_exactly_once_sink_stays_so_whatever_it_refuses_and_wherever_it_crashes(
    refuses: frozenset[int], malformed: frozenset[int], events: list[str], cuts: list[int], crashes: list[bool]
) -> None:
    sink = Once(refuses, malformed - refuses, events)
    runner = Runner(sink.write, 60, cuts, crashes)
    runner.run()
    bad = refuses | malformed
    assert sink.rows == [offset for offset in range(60) if offset not in bad], "each once, in their order"
    assert set(runner.letters) == bad
    assert runner.acknowledged == 60 - len(bad), "and counted as what it is"


@settings(max_examples=300, deadline=None)
@given(
    refuses=_SUBSETS,
    busy=st.lists(st.none() | st.frozensets(st.integers(0, 59)), max_size=20),
    cuts=_CUTS,
    known=st.booleans(),
)
def test_of_each_key_the_last_record_stays_and_what_was_acknowledged_is_not_sent_again(
    refuses: frozenset[int], busy: list[frozenset[int] | None], cuts: list[int], known: bool
) -> None:
    """A sink without a position, which says what it took before it was busy."""
    refuses -= {59}  # something of the last range is taken, whatever is known of the refusals
    sent: list[int] = []
    repeated: list[int] = []
    acknowledged: set[int] = set()

    def write(what: Batch) -> Verdicts:
        documents = what.documents or ()
        if any(each.record.offset in refuses for each in documents):
            raise BatchRefused("one of them") if known else ValueError("one of them")
        event = busy.pop() if busy else None
        taken = [each.record.offset for each in documents if event is None or each.record.offset in event]
        earlier = set[str]()
        for each in documents:
            offset = each.record.offset
            if offset in taken:
                if offset in acknowledged and each.id not in earlier:
                    repeated.append(offset)  # though it was acknowledged in its order
                sent.append(offset)
            else:
                earlier.add(each.id)
        if event is not None:
            acknowledged.update(_in_order(documents, set(taken)))
            raise SinkBusy("for now", retry_after=0.0, taken=taken)
        return Verdicts(acknowledged=len(documents))

    runner = Runner(write, 60, cuts, size=60)
    runner.run()
    good = [offset for offset in range(60) if offset not in refuses]
    assert set(sent) == set(good)
    assert not repeated
    assert set(runner.letters) == refuses
    for key in range(3):
        assert [each for each in sent if each % 3 == key][-1:] == [each for each in good if each % 3 == key][-1:]


def _in_order(documents: Sequence[Action], taken: set[int]) -> set[int]:
    """Those of `taken` with no document of their id before them that is not."""
    earlier, found = set[str](), set[int]()
    for each in documents:
        if each.record.offset not in taken:
            earlier.add(each.id)
        elif each.id not in earlier:
            found.add(each.record.offset)
    return found


class Refusing:
    """Refuses batches with some records, and counts what it is given."""

    def __init__(self, refuses: Callable[[int], bool], error: Exception) -> None:
        self.refuses, self.error = refuses, error
        self.given: list[int] = []
        self.taken: list[int] = []

    def __call__(self, what: Batch) -> Verdicts:
        mine = [each.record.offset for each in what.documents or ()]
        self.given.append(len(mine))
        if any(map(self.refuses, mine)):
            raise self.error
        self.taken += mine
        return Verdicts(acknowledged=len(mine))


def test_a_batch_without_trouble_is_written_as_it_is_once() -> None:
    what = batch(3, 40)
    written: list[Batch] = []

    def write(each: Batch) -> Verdicts:
        written.append(each)
        return Verdicts(acknowledged=37, stale=2)

    found = outcome(write, what, in_a_row=5)
    assert len(written) == 1
    assert written[0] is what
    assert (found.position, found.in_a_row, found.error, found.verdicts.stale) == (40, 0, None, 2)


def test_one_record_of_many_costs_a_logarithm_and_is_tried_so_often_as_declared() -> None:
    sink = Refusing(lambda offset: offset == 700, BatchRefused("too odd"))
    found = outcome(sink, batch(0, 1024), errors=Errors(tries=5))
    (failure,) = found.verdicts.failures
    assert (failure.record.offset, failure.kind, failure.reason, failure.attempts) == (
        700, "BATCH_REFUSED", "too odd", 5,
    )  # fmt: skip
    assert (found.position, found.verdicts.acknowledged) == (1024, 1023)
    assert sink.taken == [offset for offset in range(1024) if offset != 700]
    assert len(sink.given) == 2 * 10 + 5


@pytest.mark.parametrize("error", [SinkRefused("no such place"), SinkBusy("not now", retry_after=1.0), OSError("disk")])
def test_a_fault_of_the_sink_is_no_record_s_and_nothing_is_halved(error: Exception) -> None:
    sink = Refusing(lambda offset: True, error)
    found = outcome(sink, batch(0, 100))
    assert found.error is error
    assert (sink.given, found.position, found.verdicts.failures) == ([100], 0, [])


def test_a_sink_that_refuses_everything_stops_and_puts_nothing_aside() -> None:
    sink = Refusing(lambda offset: True, BatchRefused("wrong password"))
    found = outcome(sink, batch(0, 1000), errors=Errors(tries=2))
    assert isinstance(found.error, SinkRefused)
    assert "20 records in a row" in str(found.error)
    assert "wrong password" in str(found.error)
    assert (found.position, found.verdicts.failures, found.in_a_row) == (0, [], 0)
    assert len(sink.given) < 80


def test_what_was_taken_before_a_sink_refuses_everything_counts() -> None:
    sink = Refusing(lambda offset: offset >= 40 or offset == 3, BatchRefused("no more"))
    found = outcome(sink, batch(0, 100), errors=Errors(tries=1))
    assert isinstance(found.error, SinkRefused)
    assert (found.position, offsets(found.verdicts.failures), found.verdicts.acknowledged) == (40, [3], 39)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_small_ranges_do_not_put_a_topic_aside_bit_by_bit(size: int) -> None:
    sink = Refusing(lambda offset: offset >= 10, BatchRefused("wrong password"))
    position = row = aside = 0
    for _ in range(100):
        found = outcome(sink, batch(position, position + size), errors=Errors(tries=1, in_a_row=20), in_a_row=row)
        aside += len(found.verdicts.failures)
        position, row = found.position, found.in_a_row
    assert isinstance(found.error, SinkRefused)
    assert aside == position - 10 < 20
    sink.refuses = lambda offset: False
    found = outcome(sink, batch(position, position + size), in_a_row=row)
    assert (found.error, found.in_a_row) == (None, 0)


def test_an_unknown_exception_is_a_record_s_only_if_one_after_it_is_taken() -> None:
    sink = Refusing(lambda offset: offset in (5, 6, 20), ValueError("odd"))
    found = outcome(sink, batch(0, 10))
    assert (found.position, offsets(found.verdicts.failures), found.error) == (10, [5, 6], None)
    found = outcome(sink, batch(10, 21))
    assert (found.position, found.verdicts.failures, found.verdicts.acknowledged) == (20, [], 10)
    assert "millrace flows skip NAME in-0 20" in str(found.error)
    alone = outcome(sink, batch(20, 21))
    assert (alone.position, alone.in_a_row) == (20, 0)
    assert isinstance(alone.error, SinkRefused)


def test_without_positions_of_their_own_records_are_set_apart_and_an_error_repeats_the_batch() -> None:
    documents = [action(0)._replace(id=f"k{number}") for number in range(50)]
    what = Batch("in-0", 0, 9, documents=documents)
    moved: list[tuple[int, int]] = []
    taken: list[str] = []
    busy = [False]

    def write(part: Batch) -> Verdicts:
        mine = [each.id for each in part.documents or ()]
        if "k30" in mine:
            raise BatchRefused("odd")
        if busy[0] and "k40" in mine:
            raise SinkBusy("not now", retry_after=0.0)
        moved.append((part.start, part.end))
        taken.extend(mine)
        return Verdicts(acknowledged=len(mine))

    found = outcome(write, what, numbered=False)
    assert taken == [f"k{number}" for number in range(50) if number != 30]
    assert set(moved[:-1]) == {(0, 0)}
    assert moved[-1] == (0, 9)
    assert (found.position, found.verdicts.acknowledged, len(found.verdicts.failures)) == (9, 49, 1)
    busy[0] = True
    found = outcome(write, what, numbered=False)
    assert (found.position, found.verdicts.acknowledged, found.verdicts.failures) == (0, 0, [])
    assert isinstance(found.error, SinkBusy)


def test_ranges_shrink_with_each_busy_answer_and_grow_slowly_after_it() -> None:
    attempts = Attempts()
    busy = Refusing(lambda offset: True, SinkBusy("not now", retry_after=0.0))
    for expected in (500, 250, 125):
        outcome(busy, batch(0, attempts.records or 1000), attempts)
        assert attempts.records == expected
    grown = []
    while attempts.records is not None:
        attempts.grow(400)
        grown.append(attempts.records)
    assert grown == [157, 197, 247, 309, 387, None]


def test_a_size_that_is_refused_without_a_record_at_fault_is_not_offered_again() -> None:
    attempts = Attempts()

    def write(what: Batch) -> Verdicts:
        if len(what.documents or ()) > 100:
            raise BatchRefused("too much")
        return Verdicts(acknowledged=len(what.documents or ()))

    found = outcome(write, batch(0, 800), attempts)
    assert (found.position, found.verdicts.failures, attempts.records) == (800, [], 100)


def test_what_was_taken_with_a_part_that_is_refused_is_not_sent_again_but_in_the_order_of_its_key() -> None:
    """As a topic does: one message that is too large takes along those of its request, and others are there."""
    given: list[list[int]] = []

    def write(what: Batch) -> Verdicts:
        mine = [each.record.offset for each in what.documents or ()]
        given.append(mine)
        if 14 in mine and len(mine) > 1:
            raise BatchRefused("too large", taken=[each for each in mine if not 12 <= each < 16])
        failures = [Failure(each.record, TASK_PUT, "s", "LARGE", "") for each in what.documents or () if mine == [14]]
        return Verdicts(acknowledged=len(mine) - len(failures), failures=failures)

    attempts = Attempts()
    found = outcome(write, batch(0, 40, keys=20), attempts)
    assert (found.position, found.verdicts.acknowledged, offsets(found.verdicts.failures)) == (40, 39, [14])
    again = [offset for part in given[1:] for offset in part]
    assert set(again) == {12, 13, 14, 15, 32, 33, 34, 35}, "those of the request, and what came after them of a key"
    assert attempts.records is None


def test_another_generation_of_the_lane_s_position_knows_nothing_of_what_was_taken() -> None:
    attempts = Attempts()
    attempts.begin((0, 0))
    attempts.taken.add(5)
    attempts.begin((0, 0))
    assert attempts.taken == {5}
    attempts.begin((0, 1))
    assert attempts.taken == set()
