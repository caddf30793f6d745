"""An operator with sinks: its results go to one, and its late rows to another if there is one.

The operator's table takes a micro-batch first, in one commit. Then the sinks get the batch's results, read from the
table, under the same number. A micro-batch that Spark repeats finds its results in the table and passes on the same
ones, so that the sink's guarantee is the stream's: after any crash, the sink sees equal rows under an equal number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from millrace.base.failpoint import hit
from millrace.flows.batch import Batch
from millrace.flows.sinks.sink import Sink
from millrace.flows.spark_host.keyed import KeyedFrames, Taken

Names: TypeAlias = Callable[[Iterable[str]], Mapping[str, str]]


def _as_they_are(names: Iterable[str]) -> Mapping[str, str]:
    return {each: each for each in names}


@dataclass
class KeyedInto:
    """Writes micro-batches of a streaming DataFrame into an operator: a sink of the Spark host."""

    keyed: KeyedFrames
    sink: Sink
    """The sink of the results."""
    late: Sink | None = None
    """The sink of rows put aside; without one they are only in the operator's table."""
    names: Names = _as_they_are
    """Maps the results' columns to their names in `sink`. Columns that it omits are not written."""
    late_names: Names = _as_they_are
    """Maps columns of late rows to their names in `late`."""

    def check(self, schema: pa.Schema, /) -> None:
        """Do nothing: the operator checked its columns, and those of its results were checked when the sinks were
        created."""

    def open(self) -> None:
        """Do nothing: the first batch opens the sinks."""

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the positions of the sink for the results."""
        return self.sink.standing(lanes)

    def write(self, batch: Batch, /) -> Taken:
        """Write a micro-batch. Raises the errors of the operator and the sinks."""
        operated = self.keyed.write(batch)
        found = self.keyed.answers_of(batch.start)
        if found is None:  # a later one was written, which began when this one had ended
            return Taken(again=True)
        hit("into.operated")
        answers, late = found
        taken = self.sink.write(_following(batch, _named(answers, self.names)))
        failures, late_letters = list(taken.failures), 0
        if self.late is not None:
            hit("into.answered")
            beside = self.late.write(_following(batch, _named(late, self.late_names)))
            failures += beside.failures
            late_letters = beside.rejected
        # A function does not count rows.
        out = taken.acknowledged if taken.again else answers.num_rows - taken.rejected - len(taken.failures)
        assert batch.frame is not None, "an operator's host is Spark"
        counted = operated.operated or self.keyed.counted(batch.frame(), late)
        return Taken(out, taken.rejected, taken.again, failures=failures, operated=counted, late_letters=late_letters)

    def close(self) -> None:
        """Release the sinks' resources."""
        self.sink.close()
        if self.late is not None:
            self.late.close()


def _named(rows: pa.Table, names: Names) -> pa.Table:
    given = names(rows.column_names)
    return rows.select(list(given)).rename_columns(list(given.values()))


def _following(batch: Batch, rows: pa.Table) -> Batch:
    """Return the operator's `rows` as the result of `batch`, under its number."""

    def frame() -> Any:
        assert batch.frame is not None, "an operator's host is Spark"
        return batch.frame().sparkSession.createDataFrame(rows)

    chunks = [pa.RecordBatch.from_pylist([], rows.schema), *rows.to_batches()]
    return Batch(batch.lane, batch.start, batch.end, rows=chunks, frame=frame)
