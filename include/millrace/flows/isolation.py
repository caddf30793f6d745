"""Write a batch so that a failure is one record's: halve what the sink refuses as a whole until one record is left.

A record that the sink refuses by itself is put aside, and those after it are written. The order is kept: a part is
written when all before it is taken or put aside, so an exactly-once sink stores each part's position, and of a key the
last record stays. What may pass (SinkBusy, a disk, memory) is no record's fault and ends the batch; what was done
before that counts.

Whether a record or the sink is at fault is decided by evidence:

- BatchRefused and InvalidArgument are said of data. The record is put aside, unless `errors.in_a_row` records were
  refused so, one after another with none taken between: then the sink is at fault, and none of those of this batch is
  put aside. The position's row counts them, so neither small ranges nor a restart begin anew.
- Of an exception that is none of Millrace's nobody knows what it is about. The record is put aside if the sink takes
  one after it; until then it stops its lane.
- Any other error concerns the sink as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from millrace.base.backoff import Backoff
from millrace.base.errors import BatchRefused, InvalidArgument, MillraceError, SinkBusy, SinkRefused
from millrace.flows.batch import Batch
from millrace.flows.declare.errors import Errors
from millrace.flows.records import TASK_PUT, Action, Failure
from millrace.flows.sinks.sink import Verdicts

STEP: Final = "sink"
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
"""Seconds between two tries of a record."""
_WORDS: Final = 500


@dataclass(slots=True)
class Attempts:
    """What the attempts of a lane in this process teach the next one. Bounded by a range's records."""

    taken: set[int] = field(default_factory=set)
    """Positions of records after the lane's that the sink took: they are not sent again."""
    records: int | None = None
    """The most records of a range; None: as many as its declaration says."""
    too_large: bool = False
    """Whether more than `records` were refused for their number: it grows slower then."""
    life: tuple[int, int] = (0, 0)
    """Of which restart and generation of positions `taken` is."""

    def begin(self, life: tuple[int, int]) -> None:
        """Forget what was taken in another `life`: the sink may be another one."""
        if life != self.life:
            self.life = life
            self.taken.clear()

    def shrink(self, records: int) -> None:
        """Take half of so many `records` next."""
        self.records, self.too_large = max(1, records // 2), False

    def fit(self, records: int) -> None:
        """Take so many next: more were refused."""
        self.records, self.too_large = max(1, records), True

    def grow(self, most: int) -> None:
        """Take more after a success, up to `most`: a quarter, or a fiftieth if the sink refused more."""
        if self.records is not None:
            self.records += self.records // (50 if self.too_large else 4) + 1
            if self.records >= most:
                self.records = None


@dataclass(slots=True)
class Outcome:
    """What became of a batch."""

    verdicts: Verdicts
    """On the records before `position`."""
    position: int
    """All records before it are acknowledged or failures; the batch's end if all are."""
    in_a_row: int
    """Records that the sink refused, one after another, since it took one last."""
    error: Exception | None = None
    """What kept the batch from its end."""


class _Refused(NamedTuple):
    """A record that is put aside, unless the sink turns out to be at fault."""

    place: int
    failure: Failure
    error: Exception


class Isolation:
    """One lane's way into a sink. One thread at a time."""

    def __init__(
        self,
        write: Callable[[Batch], Verdicts],
        errors: Errors,
        *,
        numbered: bool = True,
        whole: bool = False,
        lane: str = "",
        place: Callable[[int], str] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`numbered`: each record has a position of its own. A part of a batch then moves the lane's position, unless
        the lane moves by `whole` batches, as a Spark query does.

        `place` returns a record's arguments of ``millrace flows skip``; by default `lane` and the position.
        """
        self._write, self._errors, self._sleep = write, errors, sleep
        self._numbered, self._moves = numbered, numbered and not whole
        self._place = place or (lambda position: f"{lane} {position}")

    def run(self, batch: Batch, attempts: Attempts, *, in_a_row: int = 0) -> Outcome:
        """Write the documents of `batch`. What the sink raises is the outcome's `error`."""
        whole, known = batch.documents or (), set(attempts.taken)
        documents = [each for each in whole if each.record.offset not in known] if known else whole
        if len(documents) < len(whole):
            batch = replace(batch, documents=documents)
        work = _Work(batch, documents, in_a_row, self._errors.in_a_row)
        parts = [(0, len(documents))]
        tries, pauses, largest = 0, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), 0
        while parts and work.error is None:
            first, after = parts.pop()
            part = self._part(work, first, after)
            if part is None:
                continue
            try:
                verdicts = self._write(part)
            except Exception as error:
                if self._numbered and isinstance(error, SinkBusy | BatchRefused):
                    work.keep(documents[first:after], error.taken)
                if after == first or not may_be_a_records(error):
                    if isinstance(error, SinkBusy):
                        attempts.taken |= work.done
                        attempts.shrink(len(documents))
                    else:
                        attempts.taken.clear()  # the sink may be replaced before it is tried again
                    work.stop(first, error)
                elif after - first > 1:
                    middle = (first + after) // 2
                    parts += [(middle, after), (first, middle)]
                elif tries + 1 < self._errors.tries:
                    tries += 1
                    parts.append((first, after))
                    self._sleep(pauses.next_delay())
                else:
                    work.refuse(first, error, tries + 1)
                    tries, pauses = 0, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
            else:
                tries = 0
                largest = max(largest, after - first)
                work.take(verdicts)
        outcome = work.outcome(self._moves, self._place)
        if outcome.error is None and largest < len(documents) and not outcome.verdicts.failures:
            attempts.fit(largest)  # the size was at fault
        if attempts.taken:
            outcome.verdicts.acknowledged += _settle(attempts, known, whole, outcome)
        return outcome

    def _part(self, work: _Work, first: int, after: int) -> Batch | None:
        """Return the documents from `first` to `after` as a batch; None if all of them were taken."""
        documents, batch = work.documents, work.batch
        if after - first == len(documents) and not work.done:
            return batch
        mine: Sequence[Action] = documents[first:after]
        if work.done:
            mine = [each for each in mine if each.record.offset not in work.done]
            if not mine:
                return None
        start = end = batch.start
        if batch.end > batch.start:
            if self._moves:
                start = batch.start if first == 0 else documents[first].record.offset
                end = batch.end if after == len(documents) else documents[after].record.offset
            elif after == len(documents):
                end = batch.end
        return replace(batch, start=start, end=end, documents=mine, recorded=batch.since, aside=work.aside())


class _Work:
    """A batch on its way: what was taken, what was refused, and what is still to be judged."""

    def __init__(self, batch: Batch, documents: Sequence[Action], in_a_row: int, most: int) -> None:
        self.batch, self.documents = batch, documents
        self.error: Exception | None = None
        self.refused_any = False
        self.done: set[int] = set()
        """Positions of documents that were taken with a part that was refused: they are not sent again."""
        self._most = most
        self._before = in_a_row
        """Records that were refused in a row before the first of `_pending`."""
        self._verdicts = Verdicts()
        self._confirmed: list[Failure] = []
        self._pending: list[_Refused] = []
        self._place = len(documents)

    def aside(self) -> tuple[Failure, ...]:
        """Return the records of the batch that are failures by now."""
        return (*self._verdicts.failures, *self._confirmed, *(each.failure for each in self._pending))

    def take(self, verdicts: Verdicts) -> None:
        """Count a part's verdicts."""
        if verdicts.acknowledged > verdicts.repeated:
            self._confirm()
        self._verdicts.add(verdicts)

    def keep(self, documents: Sequence[Action], taken: frozenset[int]) -> None:
        """Note those of a part's `documents` that were `taken`, but none after one of its id that was not.

        Of a key the last record is to stay, so those after such a one are sent again.
        """
        open_ids: set[str] = set()
        for each in documents if taken else ():
            if each.record.offset in self.done:
                continue
            if each.record.offset not in taken:
                open_ids.add(each.id)
            elif each.id not in open_ids:
                self.done.add(each.record.offset)
        if taken:
            self._confirm()

    def _confirm(self) -> None:
        """The sink took something, so it is not at fault: the records that it refused before are."""
        self._confirmed += [each.failure for each in self._pending]
        self._pending.clear()
        self._before = 0

    def refuse(self, place: int, error: Exception, tries: int) -> None:
        """Note a record that was refused alone so many times."""
        record = self.documents[place].record
        kind = error.code if isinstance(error, MillraceError) else type(error).__name__
        failure = Failure(record, TASK_PUT, STEP, kind, str(error)[:_WORDS] or kind, tries)
        self._pending.append(_Refused(place, failure, error))
        self.refused_any = True
        refused = self._before + len(self._pending)
        if refused >= self._most:
            words = (
                f"the sink refused {refused} records one after another and took none between, the last of them"
                f" {record.position}: {kind}: {failure.reason}. Correct the sink or its declaration; if the records are"
                " at fault, raise errors.in_a_row or name them in errors.skip"
            )
            self.stop(self._pending[0].place, SinkRefused(words))

    def stop(self, place: int, error: Exception) -> None:
        """End the batch before the document at `place`, which was not taken."""
        self._place, self.error = place, error
        self._pending = [each for each in self._pending if each.place < place]

    def outcome(self, parts_move: bool, place: Callable[[int], str]) -> Outcome:
        """Return what the batch came to."""
        unknown = next((each for each in self._pending if not _is_of_data(each.error)), None)
        if unknown is not None:
            self.stop(unknown.place, self.error or SinkRefused(_alone(unknown, place)))
        batch, verdicts = self.batch, self._verdicts
        verdicts.failures = [*verdicts.failures, *self._confirmed, *(each.failure for each in self._pending)]
        in_a_row = self._before + len(self._pending)
        if self.error is None:
            verdicts.acknowledged += len(self.done)
            return Outcome(verdicts, batch.end, in_a_row)
        moves = parts_move and batch.end > batch.start and self._place > 0
        position = self.documents[self._place].record.offset if moves else batch.start
        verdicts.failures = [each for each in verdicts.failures if moves and each.record.offset < position]
        verdicts.acknowledged = self._place - len(verdicts.failures) if moves else 0
        return Outcome(verdicts, position, in_a_row, self.error)


def _alone(refused: _Refused, place: Callable[[int], str]) -> str:
    failure = refused.failure
    return (
        f"{failure.kind}: {failure.reason}; the record {failure.record.position} fails so by itself,"
        f" {failure.attempts} times, and the sink took none after it. If the record is at fault, put it aside with"
        f" `millrace flows skip NAME {place(failure.record.offset)}`"
    )


def _is_of_data(error: Exception) -> bool:
    return isinstance(error, BatchRefused | InvalidArgument)


def may_be_a_records(error: Exception) -> bool:
    """Whether one record of a batch may be the cause of `error`, so that parts of it may be taken."""
    if isinstance(error, MillraceError):
        return _is_of_data(error)
    return not isinstance(error, OSError | MemoryError)


def write_apart(write: Callable[[Batch], Verdicts], batch: Batch, errors: Errors) -> Verdicts:
    """Write documents that failed before, each of which may fail again. Raises what stops a batch."""
    outcome = Isolation(write, errors.model_copy(update={"in_a_row": 1 << 62})).run(batch, Attempts())
    if outcome.error is not None:
        raise outcome.error
    return outcome.verdicts


def _settle(attempts: Attempts, known: set[int], documents: Sequence[Action], outcome: Outcome) -> int:
    """Forget what was taken before the outcome's position; return how many of `documents` an earlier attempt took."""
    attempts.taken = {each for each in attempts.taken if each >= outcome.position}
    return sum(each.record.offset in known and each.record.offset < outcome.position for each in documents)
