"""Write a batch so that each failure belongs to one record: halve a refused batch until one record is left.

A record that the sink refuses alone is put aside, and those after it are written. Order is preserved: a part is written
when all records before it are written or put aside, so an exactly-once sink stores each part's position, and the last
record of a key wins. Transient errors (SinkBusy, a disk, memory) are not a record's fault and end the batch; the parts
that were written before count.

Evidence decides whether a record or the sink is at fault:

- BatchRefused and InvalidArgument concern data. The record is put aside, unless `errors.in_a_row` records in a row were
  refused with none accepted in between: then the sink is at fault, and none of this batch's records is put aside. The
  position's row stores their count, so neither small ranges nor a restart reset it.
- An exception of another family has an unknown cause. The record is put aside if the sink accepts one after it; until
  then it stops its lane.
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
"""Longest pause, in seconds, between two attempts of a record."""
_WORDS: Final = 500


@dataclass(slots=True)
class Attempts:
    """Findings of a lane's attempts in this process, for the next attempt. Bounded by a range's records."""

    taken: set[int] = field(default_factory=set)
    """Positions, after the lane's, of records that the sink accepted. They are not sent again."""
    records: int | None = None
    """The most records of a range; None: the declaration's limit."""
    too_large: bool = False
    """Whether more than `records` were refused because of their number. The limit then grows more slowly."""
    life: tuple[int, int] = (0, 0)
    """The restart and generation of positions to which `taken` belongs."""

    def begin(self, life: tuple[int, int]) -> None:
        """Clear `taken` if it belongs to another `life`, since the sink may be a different one."""
        if life != self.life:
            self.life = life
            self.taken.clear()

    def shrink(self, records: int) -> None:
        """Halve the limit, from `records`."""
        self.records, self.too_large = max(1, records // 2), False

    def fit(self, records: int) -> None:
        """Set the limit to `records`, because more were refused."""
        self.records, self.too_large = max(1, records), True

    def grow(self, most: int) -> None:
        """Raise the limit after a success, up to `most`: by a quarter, or by a fiftieth if the sink refused more."""
        if self.records is not None:
            self.records += self.records // (50 if self.too_large else 4) + 1
            if self.records >= most:
                self.records = None


@dataclass(slots=True)
class Outcome:
    """The outcome of a batch."""

    verdicts: Verdicts
    """Verdicts on the records before `position`."""
    position: int
    """All records before it are acknowledged or failed. The batch's end if that is all of them."""
    in_a_row: int
    """Records in a row that the sink refused since it last accepted one."""
    error: Exception | None = None
    """The error that ended the batch early."""


class _Refused(NamedTuple):
    """A refused record, which is put aside unless the sink turns out to be at fault."""

    place: int
    failure: Failure
    error: Exception


class Isolation:
    """Writes one lane's batches into a sink. One thread at a time."""

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
        """With `numbered`, each record has its own position. A part of a batch then moves the lane's position, unless
        the lane moves by `whole` batches, as a Spark query does.

        `place` returns a record's arguments of ``millrace flows skip``; by default `lane` and the position.
        """
        self._write, self._errors, self._sleep = write, errors, sleep
        self._numbered, self._moves = numbered, numbered and not whole
        self._place = place or (lambda position: f"{lane} {position}")

    def run(self, batch: Batch, attempts: Attempts, *, in_a_row: int = 0) -> Outcome:
        """Write the documents of `batch`. An exception of the sink becomes the outcome's `error`."""
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
                        attempts.taken.clear()  # the sink may be replaced before the retry
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
            attempts.fit(largest)  # the size was the cause
        if attempts.taken:
            outcome.verdicts.acknowledged += _settle(attempts, known, whole, outcome)
        return outcome

    def _part(self, work: _Work, first: int, after: int) -> Batch | None:
        """Return the documents from `first` to `after` as a batch; None if all of them were accepted."""
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
    """A batch in progress: accepted records, refused ones, and those whose fault is undecided."""

    def __init__(self, batch: Batch, documents: Sequence[Action], in_a_row: int, most: int) -> None:
        self.batch, self.documents = batch, documents
        self.error: Exception | None = None
        self.refused_any = False
        self.done: set[int] = set()
        """Positions of documents that were accepted in a refused part. They are not sent again."""
        self._most = most
        self._before = in_a_row
        """Records refused in a row before the first of `_pending`."""
        self._verdicts = Verdicts()
        self._confirmed: list[Failure] = []
        self._pending: list[_Refused] = []
        self._place = len(documents)

    def aside(self) -> tuple[Failure, ...]:
        """Return the records of the batch that are known failures so far."""
        return (*self._verdicts.failures, *self._confirmed, *(each.failure for each in self._pending))

    def take(self, verdicts: Verdicts) -> None:
        """Add a part's verdicts."""
        if verdicts.acknowledged > verdicts.repeated:
            self._confirm()
        self._verdicts.add(verdicts)

    def keep(self, documents: Sequence[Action], taken: frozenset[int]) -> None:
        """Record which of a part's `documents` were accepted (`taken`), except after a refused one with the same id.

        The last record of a key must win, so those after a refused one are sent again.
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
        """Confirm the pending refusals: the sink accepted a record, so the refused records are at fault."""
        self._confirmed += [each.failure for each in self._pending]
        self._pending.clear()
        self._before = 0

    def refuse(self, place: int, error: Exception, tries: int) -> None:
        """Record that the record at `place` was refused alone `tries` times."""
        record = self.documents[place].record
        kind = error.code if isinstance(error, MillraceError) else type(error).__name__
        failure = Failure(record, TASK_PUT, STEP, kind, str(error)[:_WORDS] or kind, tries)
        self._pending.append(_Refused(place, failure, error))
        self.refused_any = True
        refused = self._before + len(self._pending)
        if refused >= self._most:
            words = (
                f"the sink refused {refused} records in a row, the last of them"
                f" {record.position}: {kind}: {failure.reason}. Correct the sink or its declaration; if the records are"
                " at fault, raise errors.in_a_row or name them in errors.skip"
            )
            self.stop(self._pending[0].place, SinkRefused(words))

    def stop(self, place: int, error: Exception) -> None:
        """End the batch before the document at `place`, which was not written."""
        self._place, self.error = place, error
        self._pending = [each for each in self._pending if each.place < place]

    def outcome(self, parts_move: bool, place: Callable[[int], str]) -> Outcome:
        """Return the outcome of the batch."""
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
        f"{failure.kind}: {failure.reason}; the record {failure.record.position} fails so alone,"
        f" {failure.attempts} times, and the sink accepted none after it. If the record is at fault, put it aside with"
        f" `millrace flows skip NAME {place(failure.record.offset)}`"
    )


def _is_of_data(error: Exception) -> bool:
    return isinstance(error, BatchRefused | InvalidArgument)


def may_be_a_records(error: Exception) -> bool:
    """Return whether one record of a batch may be the cause of `error`, so that other parts may succeed."""
    if isinstance(error, MillraceError):
        return _is_of_data(error)
    return not isinstance(error, OSError | MemoryError)


def write_apart(write: Callable[[Batch], Verdicts], batch: Batch, errors: Errors) -> Verdicts:
    """Write documents that failed before, each of which may fail again. Raises an error that ends the batch."""
    outcome = Isolation(write, errors.model_copy(update={"in_a_row": 1 << 62})).run(batch, Attempts())
    if outcome.error is not None:
        raise outcome.error
    return outcome.verdicts


def _settle(attempts: Attempts, known: set[int], documents: Sequence[Action], outcome: Outcome) -> int:
    """Remove accepted positions before the outcome's; return how many `documents` an earlier attempt had written."""
    attempts.taken = {each for each in attempts.taken if each >= outcome.position}
    return sum(each.record.offset in known and each.record.offset < outcome.position for each in documents)
