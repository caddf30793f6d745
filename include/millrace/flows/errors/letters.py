"""Dead letters of rows: where a flow on Spark puts rows that its sink refuses, and how they are sent again.

A row becomes a row of a collection of LETTERS, or a record of the flow's error topic, before its batch counts as done.
A letter's id has the batch and the row's number, so that a repeated batch replaces its letters, or a reader of the
topic recognises a repeat. A sink that is a collection stores its letters in a collection itself, in the batch's
transaction (millrace.flows.sinks.collection.poison).

A redrive sends a letter's row under the batch and number of its first attempt, and with the memory of that time: with
versions it never replaces a newer document, and a reader of a topic recognises a repeat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import SinkRefused
from millrace.base.settings import Settings
from millrace.client.consume.dead_letters import MAX_REASON, put_letters, reason_text, row_fields
from millrace.client.database import connect
from millrace.flows.batch import Batch
from millrace.flows.declare.errors import SKIPPED
from millrace.flows.errors.selection import ROWS_OF, rows_of
from millrace.flows.records import TASK_PUT, Failure, Record
from millrace.flows.sinks.collection.poison import LETTERS, MOST, arrow_bytes, redriven

if TYPE_CHECKING:
    from millrace.flows.declare.flow import Flow
    from millrace.flows.errors.topic import ErrorTopic

BEGUN: Final = "millrace.begun"
ROW: Final = "millrace.row"
"""Headers of a row's letter in a topic: the start of its stream's incarnation, and the row as an Arrow stream."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row of a micro-batch that the sink refused, and the reason."""

    number: int
    """Its number in its batch."""
    row: pa.Table
    kind: str
    reason: str
    attempts: int = 1

    @property
    def words(self) -> str:
        return reason_text(f"{self.kind}: {self.reason}")

    @property
    def text(self) -> str:
        """The row as JSON, for display."""
        return json.dumps(self.row.to_pylist()[0], default=str)


class RowLetters(Protocol):
    """Writes dead rows to a flow's place for them. Not thread-safe."""

    def put(self, batch: int, rows: Sequence[RefusedRow]) -> None:
        """Write the letters of rows of the micro-batch `batch`; all are durable on return."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


def require_few(batch: int, rows: Sequence[RefusedRow]) -> None:
    """Raise SinkRefused for more than MOST rows of a batch: then the rows are not the cause."""
    if len(rows) > MOST:
        first = rows[0]
        raise SinkRefused(
            f"{len(rows)} rows of batch {batch} were refused, more than {MOST}: the sink is the likely cause."
            f" The first, {first.number}: {first.words}"
        )


class LetterCollection:
    """Writes row letters to a collection of LETTERS."""

    def __init__(self, settings: Settings, collection: str, *, stream: str, begun: int) -> None:
        """`begun` identifies the stream's incarnation by its start, in Unix time."""
        self._settings, self._collection = settings, collection
        self._stream, self._begun = stream, begun

    def put(self, batch: int, rows: Sequence[RefusedRow]) -> None:
        """Write the letters. Raises the errors of the collection."""

        def letter(each: RefusedRow, whole: bool) -> dict[str, Any]:
            return {
                "id": f"{self._stream}/{self._begun}/{batch}/{each.number}",
                "stream": self._stream,
                "batch": batch,
                "reason": each.words,
                **row_fields(each.row, whole=whole),
            }

        with connect(settings=self._settings) as db:
            put_letters(db.collection(self._collection), rows, letter)

    def close(self) -> None:
        """Do nothing: no resource stays open."""


class LetterTopic:
    """Writes row letters to the flow's error topic: the row as JSON, and as an Arrow stream in a header."""

    def __init__(self, flow: Flow, *, stream: str, begun: int) -> None:
        """See :class:`LetterCollection`."""
        self._flow, self._stream, self._begun = flow, stream, begun
        self._topic: ErrorTopic | None = None

    def put(self, batch: int, rows: Sequence[RefusedRow]) -> None:
        """Produce the letters. Raises SinkBusy, SinkRefused."""
        if self._topic is None:
            from millrace.flows.errors.topic import ErrorTopic

            self._topic = ErrorTopic(self._flow)
        failures = [
            Failure(
                Record(
                    f"stream-{self._stream}",
                    each.number,
                    batch,
                    f"{self._begun}/{batch}/{each.number}{'/skipped' if each.kind == SKIPPED else ''}".encode(),
                    each.text.encode(),
                    -1,
                    [
                        (ROWS_OF, self._stream.encode()),
                        (BEGUN, str(self._begun).encode()),
                        (ROW, arrow_bytes(each.row)),
                    ],
                ),
                TASK_PUT,
                "sink",
                each.kind,
                each.reason[:MAX_REASON],
                each.attempts,
            )
            for each in rows
        ]
        self._topic.put(failures, task=self._stream)

    def close(self) -> None:
        """Idempotent."""
        if self._topic is not None:
            self._topic.close()
        self._topic = None


def letters_from(records: Iterable[Record]) -> pa.Table:
    """Return letters of rows in the schema LETTERS, from records of the error topic that LetterTopic produced."""
    found = []
    for each in records:
        headers = dict(each.headers)
        stream = rows_of(each, each.topic)
        begun = (headers.get(BEGUN) or b"0").decode()
        found.append(
            {
                "id": f"{stream}/{begun}/{each.offset}/{each.partition}",
                "stream": stream,
                "batch": each.offset,
                "reason": "",
                "row": (each.value or b"").decode(errors="replace"),
                "payload": headers.get(ROW) or b"",
            }
        )
    return pa.Table.from_pylist(found, schema=LETTERS.arrow())


def row_letters_of(settings: Settings, flow: Flow, collection: str | None, *, stream: str, begun: int) -> RowLetters:
    """Return the place of a flow's rows: `collection`, or its error topic, which is created if allowed.

    Raises LogUnavailable, InvalidSettings, SinkRefused.
    """
    if collection is not None:
        return LetterCollection(settings, collection, stream=stream, begun=begun)
    from millrace.flows.errors.topic import ensure_topic

    ensure_topic(flow)
    return LetterTopic(flow, stream=stream, begun=begun)


def resent(letters: pa.Table, stream: str) -> Iterator[tuple[int, Batch, list[str]]]:
    """Yield the rows of `letters` in order, one batch for each batch that they come from.

    Each comes with the start of its incarnation and the letters' ids in the order of the rows. Letters of another
    stream or of a collection itself, and those without a payload, are left out.
    """
    found: list[tuple[tuple[int, int, int], int]] = []
    sizes = pc.binary_length(letters["payload"]).to_pylist()
    for place, (name, size) in enumerate(zip(letters["id"].to_pylist(), sizes, strict=True)):
        parts = name.removeprefix(f"{stream}/").split("/")
        if size and len(parts) == 3 and all(each.isdecimal() for each in parts):
            found.append(((int(parts[0]), int(parts[1]), int(parts[2])), place))
    for (begun, batch), mine in groupby(sorted(found), key=lambda each: each[0][:2]):
        each = list(mine)
        table = letters.take(pa.array([place for _, place in each], pa.int64()))
        numbers = [number for (_, _, number), _ in each]
        rows = Batch(f"stream-{stream}", batch, batch, rows=redriven(table), numbers=numbers)
        yield begun, rows, table["id"].to_pylist()


def taken_of(sent: Batch, ids: Sequence[str], aside: Set[int]) -> list[str]:
    """Return those of `ids`, the letters of `sent`, that the sink accepted: their rows are not put `aside` again."""
    numbers: Any = sent.numbers
    return [name for name, number in zip(ids, numbers, strict=True) if number not in aside]
