"""Dead letters of a stream whose sink refuses single rows: an index, a topic.

A row that the sink refuses becomes a row of a collection of LETTERS before its batch counts as done. A letter's id has
the batch and the row's number, so that a repeated batch replaces its letters. A collection as a sink keeps its letters
itself, in the transaction of the batch (millrace.flows.sinks.collection.poison).

A redrive sends a letter's row under the batch and number of its first attempt, from a memory as old as that of the
first attempt: with versions it never replaces a newer document, and a reader of a topic recognises a repeat.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, Final

import pyarrow as pa

from millrace.base.errors import SinkRefused
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.batch import Batch
from millrace.flows.records import Failure
from millrace.flows.sinks.collection.poison import LETTERS, MOST, arrow_bytes, redriven
from millrace.flows.sinks.sink import Sink, Verdicts

MAX_REASON: Final = 1_000
"""Characters of a letter's reason."""


class LetteredSink:
    """A sink of rows with dead letters: what it refuses row by row goes into a collection."""

    def __init__(self, sink: Sink, settings: Settings, letters: str, *, stream: str, begun: int) -> None:
        """`letters` is a collection of LETTERS; `begun` tells the stream's incarnations apart, in Unix time."""
        self._sink, self._settings, self._letters = sink, settings, letters
        self._stream, self._begun = stream, begun

    def check(self, schema: pa.Schema, /) -> None:
        """As the sink does."""
        self._sink.check(schema)

    def open(self) -> None:
        """As the sink does."""
        self._sink.open()

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """As the sink does."""
        return self._sink.standing(lanes)

    def write(self, batch: Batch, /) -> Verdicts:
        """Take a batch; rows that the sink refuses are letters when this returns, and count as rejected.

        Raises what the sink raises, SinkRefused for more than MOST refused rows, and what the collection raises.
        """
        passed: list[pa.RecordBatch] = []

        def rows() -> Iterator[pa.RecordBatch]:
            for each in batch.rows or ():
                passed.append(each)
                yield each

        verdicts = self._sink.write(replace(batch, rows=rows()))
        if verdicts.failures:
            found = self._letters_of(batch.start, passed, verdicts.failures)
            with connect(settings=self._settings) as db:
                db.collection(self._letters).upsert(found)
            verdicts.rejected += len(verdicts.failures)
            verdicts.failures = []
        return verdicts

    def close(self) -> None:
        """As the sink does."""
        self._sink.close()

    def _letters_of(self, batch: int, passed: Sequence[pa.RecordBatch], failures: Sequence[Failure]) -> pa.Table:
        if len(failures) > MOST:
            first = failures[0]
            raise SinkRefused(
                f"{len(failures)} rows of batch {batch}, more than {MOST}: it is not the rows that are wrong."
                f" The first, {first.record.position}: {first.kind}: {first.reason}"
            )
        begins = [0, *accumulate(each.num_rows for each in passed)]
        rows = []
        for each in failures:
            number = each.record.offset
            place = bisect_right(begins, number) - 1
            row = pa.Table.from_batches([passed[place].slice(number - begins[place], 1)])
            rows.append(
                {
                    "id": f"{self._stream}/{self._begun}/{batch}/{number}",
                    "stream": self._stream,
                    "batch": batch,
                    "reason": f"{each.kind}: {each.reason}"[:MAX_REASON],
                    "row": json.dumps(row.to_pylist()[0], default=str),
                    "payload": arrow_bytes(row),
                }
            )
        return pa.Table.from_pylist(rows, schema=LETTERS.arrow())


def resent(letters: pa.Table, stream: str) -> Iterator[tuple[int, Batch, list[str]]]:
    """Yield the rows of `letters` in their order, a batch for each one that they come from.

    With each: when its incarnation began, and the letters' ids by the order of the rows. A letter of another stream, or
    of a collection's own, is left out.
    """
    found: list[tuple[tuple[int, int, int], int]] = []
    for place, name in enumerate(letters["id"].to_pylist()):
        parts = name.removeprefix(f"{stream}/").split("/")
        if len(parts) == 3 and all(each.isdecimal() for each in parts):
            found.append(((int(parts[0]), int(parts[1]), int(parts[2])), place))
    for (begun, batch), mine in groupby(sorted(found), key=lambda each: each[0][:2]):
        each = list(mine)
        table = letters.take(pa.array([place for _, place in each], pa.int64()))
        numbers = [number for (_, _, number), _ in each]
        rows = Batch(f"stream-{stream}", batch, batch, rows=redriven(table), numbers=numbers)
        yield begun, rows, table["id"].to_pylist()


def taken_of(sent: Batch, ids: Sequence[str], verdicts: Verdicts) -> list[str]:
    """Return which of `ids`, the letters of `sent`, the sink took: those of no failure."""
    numbers: Any = sent.numbers
    failed = {each.record.offset for each in verdicts.failures}
    return [name for name, number in zip(ids, numbers, strict=True) if number not in failed]
