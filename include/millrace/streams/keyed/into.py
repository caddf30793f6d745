"""An operator with a sink after it: its answers go there, and its late rows to a sink of their own if there is one.

The operator's table takes a micro-batch first, in one commit. Then the sinks get the batch's results, read from the
table, under the same number. A micro-batch that Spark repeats finds its answers in the table and passes on the same
ones, so that the sink's guarantee is the stream's: whatever crashes in between, the sink sees equal rows under an equal
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame

from millrace.base.failpoint import hit
from millrace.streams.keyed.frames import KeyedFrames
from millrace.streams.sinks.frames import FrameSink
from millrace.streams.sinks.sink import Sink, Taken

Names: TypeAlias = Callable[[Iterable[str]], Mapping[str, str]]


def _as_they_are(names: Iterable[str]) -> Mapping[str, str]:
    return {each: each for each in names}


@dataclass
class KeyedInto:
    """Takes micro-batches of a streaming DataFrame (millrace.streams.sinks.frames.FrameSink)."""

    keyed: KeyedFrames
    sink: Sink | FrameSink
    """Takes the answers."""
    late: Sink | FrameSink | None = None
    """Takes the rows put aside; without one they lie in the operator's table alone."""
    names: Names = _as_they_are
    """Maps the answers' columns to their names in `sink`; columns that it leaves out are not handed on."""
    late_names: Names = _as_they_are
    """The same of late rows and `late`."""

    def write_frame(self, frame: DataFrame, batch_id: int) -> Taken:
        """Take a micro-batch. Raises what the operator and the sinks raise."""
        operated = self.keyed.write_frame(frame, batch_id)
        found = self.keyed.answers_of(batch_id)
        if found is None:  # a later one was taken, which began when this one had ended
            return Taken(again=True)
        hit("into.operated")
        answers, late = found
        taken = _handed(frame, self.sink, batch_id, _named(answers, self.names))
        if self.late is not None:
            hit("into.answered")
            _handed(frame, self.late, batch_id, _named(late, self.late_names))
        counted = operated.operated or self.keyed.counted(frame, late)
        return Taken(taken.rows, taken.rejected, taken.again, counted)

    def close(self) -> None:
        """Release what the sinks hold."""
        self.sink.close()
        if self.late is not None:
            self.late.close()


def _named(rows: pa.Table, names: Names) -> pa.Table:
    given = names(rows.column_names)
    return rows.select(list(given)).rename_columns(list(given.values()))


def _handed(frame: DataFrame, sink: Sink | FrameSink, batch_id: int, rows: pa.Table) -> Taken:
    if hasattr(sink, "write_frame"):
        taken: Taken = sink.write_frame(frame.sparkSession.createDataFrame(rows), batch_id)
        return taken if taken.again else Taken(rows.num_rows)
    return sink.write(batch_id, [pa.RecordBatch.from_pylist([], rows.schema), *rows.to_batches()])
