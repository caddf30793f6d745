"""A sink of micro-batches in which a failure is one row's: what the sink refuses is a letter, and the rest goes in.

A row is put aside in three ways: the sink names it in its verdicts; the sink refuses the batch as a whole, and halves
of it show which rows are at fault (millrace.flows.isolation); or somebody named it to be skipped. Letters are durable
before the batch counts as done.

A query's position is its batch's number, so a part of a batch moves nothing:

- A sink that repeats rows without effect (ids and versions, or at least once) gets the parts themselves, all under the
  number of their batch.
- A sink that stores the number in its own transaction gets one batch, once. It tells by `fits` which rows it would
  refuse, without taking any; these are noted, and the batch is written without them.

The rows that are put aside are noted beside the sink's memory, before the batch that goes without them:

    <memory>/aside.json

So a batch that comes again after a kill is divided as before, and its letters are those of the first attempt. A row
is recognised by its number and content, since Spark may give the rows of a shuffle in another order.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.base.failpoint import hit
from millrace.flows.batch import Batch
from millrace.flows.declare.errors import SKIPPED, SKIPPED_WORDS, Errors
from millrace.flows.errors.letters import RefusedRow, RowLetters, require_few
from millrace.flows.isolation import Attempts, Isolation, may_be_a_records
from millrace.flows.records import Action, Failure, Record
from millrace.flows.sinks.memory import Folder, create_folder, keep_note, read_note
from millrace.flows.sinks.sink import Sink, Verdicts
from millrace.flows.spark_host.error_window import resets_of

FILE: Final = "aside.json"
_REASON: Final = 500

Skip = Callable[[int], frozenset[int]]
"""Returns the numbers of a micro-batch's rows to be skipped."""


@runtime_checkable
class Probed(Protocol):
    """A sink that can tell which rows it refuses without writing any."""

    def fits(self, rows: pa.Table, /) -> None:
        """Raise InvalidArgument if the sink refuses a batch with these rows. Has no effect on the sink's rows."""
        ...


@dataclass(frozen=True, slots=True)
class _Aside:
    """A row that is put aside."""

    digest: str
    """A digest of its content."""
    kind: str
    reason: str
    attempts: int = 1


@dataclass(slots=True)
class _Note:
    """The stored facts of the newest batch that put rows aside, or of which the sink accepted none."""

    batch: int = -1
    before: int = 0
    """Rows refused in a row before the batch, with none accepted in between (`errors.in_a_row`)."""
    after: int = 0
    """The same count after the batch."""
    rows: dict[int, _Aside] = field(default_factory=dict)
    resets: int = 0
    """Resets of the count before it (millrace.flows.spark_host.error_window)."""

    @classmethod
    def load(cls, memory: Folder) -> _Note:
        value = read_note(memory, FILE)
        if value is None:
            return cls()
        rows = {int(number): _Aside(**each) for number, each in value["rows"].items()}
        return cls(value["batch"], value["before"], value["after"], rows, value["resets"])

    def keep(self, memory: Folder) -> None:
        create_folder(memory)
        keep_note(memory, FILE, asdict(self))


class IsolatedSink:
    """A sink of rows with a place for failed ones. One thread at a time."""

    def __init__(
        self,
        sink: Sink,
        letters: RowLetters,
        errors: Errors,
        *,
        memory: Folder,
        lane: str,
        parts: bool,
        skip: Skip = lambda batch: frozenset(),
    ) -> None:
        """With `parts`, rows of a batch may be written again under its number, by the sink's guarantee."""
        self._sink, self._letters, self._errors = sink, letters, errors
        self._memory, self._lane, self._parts, self._skip = memory, lane, parts, skip
        self._note = _Note.load(self._memory)

    def check(self, schema: pa.Schema, /) -> None:
        """Check `schema` against the sink."""
        self._sink.check(schema)

    def open(self) -> None:
        """Open the sink."""
        self._sink.open()

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the sink's positions."""
        return self._sink.standing(lanes)

    def write(self, batch: Batch, /) -> Verdicts:
        """Write a batch. On return, rows that are put aside are letters, and count as rejected.

        Raises the sink's errors if no row is at fault, SinkRefused for more than MOST rows, and the errors of the
        letters' place.
        """
        rows = _Rows(batch.rows or (), batch.numbers)
        self._begin(batch.start)
        aside = self._placed(rows)
        named = self._skip(batch.start) - aside.keys()
        if named and (named := named & set(rows.numbers())):
            aside |= self._put(
                batch, rows, [RefusedRow(each, rows.row(each), SKIPPED, SKIPPED_WORDS) for each in named]
            )
        try:
            verdicts = self._sink.write(_without(batch, rows, aside))
        except Exception as error:
            if rows.broken or not may_be_a_records(error):
                raise
            verdicts = self._isolated(batch, rows, aside, error)
        else:
            if verdicts.acknowledged and not verdicts.again:
                self._took()
        failures = [each for each in verdicts.failures if each.record.offset not in aside]
        if failures:
            self._put(batch, rows, [_refused(each, rows) for each in failures])
        verdicts.failures = []
        verdicts.rejected += len(self._note.rows)
        return verdicts

    def close(self) -> None:
        """Close the sink and the letters' place."""
        self._sink.close()
        self._letters.close()

    @property
    def aside(self) -> Set[int]:
        """The numbers of the newest batch's rows that are put aside."""
        return self._note.rows.keys()

    # --- what is put aside -------------------------------------------------------------------------------------------

    def _begin(self, batch: int) -> None:
        resets = resets_of(self._memory)
        if self._note.batch != batch:
            self._note = _Note(batch, self._note.after, self._note.after, resets=self._note.resets)
        if self._note.resets != resets:
            self._note.before = self._note.after = 0
            self._note.resets = resets

    def _placed(self, rows: _Rows) -> dict[int, _Aside]:
        """Return the stored rows of the batch by their present numbers."""
        noted = self._note.rows
        if not noted or all(rows.digest(number) == each.digest for number, each in noted.items()):
            return dict(noted)
        places: dict[str, list[int]] = defaultdict(list)
        for number in reversed(rows.numbers()):
            places[rows.digest(number)].append(number)
        return {places[each.digest].pop(): each for each in noted.values() if places[each.digest]}

    def _put(self, batch: Batch, rows: _Rows, found: Sequence[RefusedRow]) -> dict[int, _Aside]:
        """Write letters of rows, store the rows' digests, and return them."""
        ordered = sorted(found, key=lambda each: each.number)
        require_few(batch.start, ordered)
        self._letters.put(batch.start, ordered)
        hit("isolated.letters")
        new = {
            each.number: _Aside(rows.digest(each.number), each.kind, each.reason[:_REASON], each.attempts)
            for each in ordered
        }
        self._note.rows |= new
        self._note.keep(self._memory)
        hit("isolated.noted")
        return new

    def _took(self) -> None:
        """Record that the sink accepted a row, if rows were refused in a row before."""
        if self._note.after:
            self._note.after = 0
            self._note.keep(self._memory)

    # --- a batch that is refused as a whole --------------------------------------------------------------------------

    def _isolated(self, batch: Batch, rows: _Rows, aside: Mapping[int, _Aside], error: Exception) -> Verdicts:
        """Put the rows aside that cause `error`, and write the rest. Raises `error` if no row does."""
        probe = self._sink if isinstance(self._sink, Probed) else None
        if probe is None and not self._parts:
            raise error
        if probe is not None:
            try:
                probe.fits(rows.table([]))
            except InvalidArgument:
                raise error from None  # the columns are at fault, not a row
        lane, number = batch.lane, batch.start
        documents = [
            Action(Record(lane, number, each, None, None, -1), str(each), None, None)
            for each in rows.numbers()
            if each not in aside
        ]

        def write(part: Batch) -> Verdicts:
            numbers = [each.record.offset for each in part.documents or ()]
            if probe is not None:
                probe.fits(rows.table(numbers))
                return Verdicts(acknowledged=len(numbers))
            return self._sink.write(replace(part, documents=None, rows=rows.chunks(numbers), numbers=numbers))

        isolation = Isolation(
            write,
            self._errors if probe is None else self._errors.model_copy(update={"tries": 1}),
            whole=True,
            place=lambda row: f"{self._lane} {number} --row {row}",
        )
        outcome = isolation.run(replace(batch, rows=None, documents=documents), Attempts(), in_a_row=self._note.before)
        if outcome.error is not None:
            raise outcome.error
        self._note.after = outcome.in_a_row
        refused = [_refused(each, rows) for each in outcome.verdicts.failures]
        if not refused and probe is not None:
            raise error
        new = self._put(batch, rows, refused) if refused else {}
        if probe is not None:
            return self._sink.write(_without(batch, rows, {**aside, **new}))
        outcome.verdicts.failures = []
        return outcome.verdicts


class _Rows:
    """The rows of a micro-batch, read on each access."""

    def __init__(self, given: Iterable[pa.RecordBatch], numbers: Sequence[int] | None) -> None:
        self._given = iter(given)
        self.broken = False
        """Whether the rows themselves cannot be read: no row is at fault then, and nothing may be left out."""
        self._seen: list[pa.RecordBatch] = []
        self._whole: pa.Table | None = None
        self._places = None if numbers is None else {number: place for place, number in enumerate(numbers)}

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        place = 0
        while True:
            if place == len(self._seen):
                # After a task has failed, its generator has ended, so the rows so far are only a part of the batch.
                broken, self.broken = self.broken, True
                if broken:
                    raise RuntimeError("the rows of the micro-batch cannot be read")
                more = next(self._given, None)
                self.broken = False
                if more is None:
                    return
                self._seen.append(more)
            yield self._seen[place]
            place += 1

    def numbers(self) -> Sequence[int]:
        """Return the rows' numbers, in their order."""
        return range(self._all().num_rows) if self._places is None else list(self._places)

    def row(self, number: int) -> pa.Table:
        return self._all().slice(number if self._places is None else self._places[number], 1)

    def digest(self, number: int) -> str:
        """Return a digest that identifies the row by its content; empty if there is no such row."""
        if number not in (self.numbers() if self._places is None else self._places):
            return ""
        found = self.row(number).to_pylist()[0]
        return hashlib.sha256(json.dumps(found, default=str).encode()).hexdigest()[:32]

    def table(self, numbers: Sequence[int]) -> pa.Table:
        """Return the rows with these numbers, which must be in the rows' order."""
        places = numbers if self._places is None else [self._places[each] for each in numbers]
        if places and places[-1] - places[0] + 1 == len(places):
            return self._all().slice(places[0], len(places))
        return self._all().take(pa.array(places, pa.int64()))

    def chunks(self, numbers: Sequence[int]) -> list[pa.RecordBatch]:
        """Return the rows in the form for sinks: the first batch is empty, and defines the columns."""
        found = self.table(numbers)
        return [pa.RecordBatch.from_pylist([], found.schema), *found.to_batches()]

    def _all(self) -> pa.Table:
        if self._whole is None:
            chunks = list(self)
            self._whole = pa.Table.from_batches(chunks) if chunks else pa.table({})
        return self._whole


def _without(batch: Batch, rows: _Rows, aside: Mapping[int, _Aside]) -> Batch:
    if not aside:
        return replace(batch, rows=iter(rows))
    numbers = [each for each in rows.numbers() if each not in aside]
    return replace(batch, rows=rows.chunks(numbers), numbers=numbers)


def _refused(failure: Failure, rows: _Rows) -> RefusedRow:
    number = failure.record.offset
    return RefusedRow(number, rows.row(number), failure.kind, failure.reason, failure.attempts)
