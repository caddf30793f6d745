"""An operator after Spark's shuffle: keys go to shards, a task advances each shard, the driver commits all results.

A shard is a partition of ``repartition(shards, keys)``, whose hash is Spark's own and fixed; the table stores the
number of shards. A task opens the table, reads its shard's state, and writes answers, late rows and state as durable
files; only their names come back. A micro-batch that Spark repeats finds its number in the table. The numbers are those
of one checkpoint: its folder and the table carry the same name.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from millrace.base.errors import InvalidArgument
from millrace.flows.batch import Batch
from millrace.flows.sinks.memory import Folder, name_in
from millrace.flows.sinks.sink import Verdicts
from millrace.flows.spark_host.micro_batches import columns_of
from millrace.runtime.spark.worker_gc import freeze_modules
from millrace.streams.keyed.clock import Clock
from millrace.streams.keyed.operator import (
    END,
    IS_AHEAD,
    IS_LATE,
    IS_PARTLY_LATE,
    IS_TIMELESS,
    REASON,
    Counts,
    Operator,
    from_number,
)
from millrace.streams.keyed.store import Advanced, Base, KeyedTable
from millrace.streams.patterns.sorted_rows import column_of

_REPORT: Final = StructType([StructField("shard", LongType()), StructField("report", BinaryType())])


@dataclass(frozen=True, slots=True)
class Operated(Counts):
    """The results of an operator (docs/operators.md) for a micro-batch, and the state after it."""

    state_rows: int = 0
    """Rows in the state of all shards after the micro-batch; bytes are those in memory."""
    state_bytes: int = 0
    watermark: str | int | None = None
    """The watermark for the next micro-batch: a time in ISO 8601, or a number."""


@dataclass(slots=True)
class Taken(Verdicts):
    """The outcome of a micro-batch whose rows went through an operator."""

    operated: Operated | None = None
    late_letters: int = 0
    """Late rows that the sink of late rows refused and turned into letters."""


class KeyedFrames:
    """Writes micro-batches of a streaming DataFrame of `schema` into an operator's table: a sink of the Spark host."""

    def __init__(
        self,
        folder: Folder,
        uri: str,
        operator: Operator,
        schema: pa.Schema,
        *,
        delay: timedelta | int,
        shards: int,
        max_ahead: timedelta | None = None,
    ) -> None:
        """`folder` belongs to the query's checkpoint. `warnings` describe causes of growing state.

        Raises InvalidArgument for a wrong column or operator, or if the table at `uri` belongs to another query.
        """
        if shards < 1:
            raise InvalidArgument(f"{shards} shards cannot hold keys: use at least one")
        self.warnings = operator.check(schema)
        self._clock = Clock(delay, max_ahead)
        self._clock.check(operator, schema)
        placement = f"spark/{shards if operator.keys else 1}"
        self._opened = (uri, operator, schema, placement, name_in(folder, "keyed-stream.json"))
        self._table = _table(*self._opened)
        self._operator = operator
        self._shards = shards if operator.keys else 1

    def check(self, schema: pa.Schema, /) -> None:
        """Do nothing: the operator has checked its columns."""

    def open(self) -> None:
        """Do nothing: the table is open."""

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the number after the last micro-batch in the table."""
        return dict.fromkeys(lanes, self._table.base().batch + 1)

    def write(self, batch: Batch, /) -> Taken:
        """Write a micro-batch. Raises CommitFenced if another driver of the query was first, and the tasks' errors."""
        base = self._table.base()
        if batch.start <= base.batch:
            return Taken(again=True)
        assert batch.frame is not None, "an operator's host is Spark"
        advanced = self._advanced(batch.frame(), base)
        self._table.commit(base, batch.start, advanced)
        return Taken(advanced.counts.taken, operated=self._operated(base, advanced))

    def answers_of(self, batch_id: int) -> tuple[pa.Table, pa.Table] | None:
        """Return results and late rows of the micro-batch if it was the last one written, else None."""
        return self._table.answers_of(batch_id)

    def counted(self, frame: DataFrame, late: pa.Table) -> Operated:
        """Count the rows of a micro-batch that an earlier process wrote without a report, from its rows put aside.

        Rows that an operator drops count as taken.
        """
        reasons = late.column(REASON).to_pylist()
        gone, rejected = reasons.count(IS_LATE), reasons.count(IS_TIMELESS) + reasons.count(IS_AHEAD)
        return Operated(frame.count() - gone - rejected, gone, rejected, reasons.count(IS_PARTLY_LATE))

    def _advanced(self, frame: DataFrame, base: Base) -> Advanced:
        placed = _placed(frame, self._operator, self._shards)
        found = placed.mapInArrow(_Advance(self._opened, base, self._clock), _REPORT).collect()
        reports: dict[int, Advanced] = {row["shard"]: pickle.loads(row["report"]) for row in found}
        none = self._opened[2].empty_table()
        for shard in range(self._shards):
            if shard not in reports:  # Spark skipped a task without rows: its shard's time advances all the same
                reports[shard] = self._table.advance(base, shard, none, self._clock)
        return sum(reports.values(), Advanced())

    def _operated(self, base: Base, advanced: Advanced) -> Operated:
        schema = self._opened[2]
        kind = schema.field(column_of(schema, self._operator.time)).type
        at = self._clock.watermark(self._operator, base.newest | advanced.newest)
        watermark = None if at is None else from_number(pa.scalar(at, pa.int64()), kind).as_py()
        return Operated(
            **asdict(advanced.counts),
            state_rows=advanced.state_rows,
            state_bytes=advanced.state_bytes,
            watermark=watermark.isoformat() if isinstance(watermark, date) else watermark,
        )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def answered(frame: DataFrame, operator: Operator, shards: int, *, max_ahead: timedelta | None = None) -> DataFrame:
    """Return the operator's results over all rows of a batch: those of the finished stream, without late rows."""
    schema = columns_of(frame)
    operator.check(schema)
    clock = Clock(0, max_ahead)
    clock.check(operator, schema)
    given = from_arrow_schema(operator.output_schema(schema))
    return _placed(frame, operator, shards).mapInArrow(_Answer(operator, schema, clock), given)


def _placed(frame: DataFrame, operator: Operator, shards: int) -> DataFrame:
    """Return the rows with each shard in its own partition."""
    keys = [functions.col(f"`{each.replace('`', '``')}`") for each in operator.keys]
    return frame.repartition(shards, *keys) if keys else frame.coalesce(1)


class _Answer:
    """The work of a task of :func:`answered` on its shard's rows."""

    def __init__(self, operator: Operator, schema: pa.Schema, clock: Clock) -> None:
        self._operator, self._schema, self._clock = operator, schema, clock

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches([each.cast(self._schema) for each in batches], self._schema)
        step, _ = self._clock.advance(self._operator, {}, rows, END)
        yield from step.output.to_batches()
        freeze_modules("millrace_keyed")


def _table(uri: str, operator: Operator, schema: pa.Schema, placement: str, stream: str) -> KeyedTable:
    return KeyedTable(uri, operator, schema, placement=placement, stream=stream)


class _Advance:
    """The work of a task on its shard's rows."""

    def __init__(self, opened: tuple[str, Operator, pa.Schema, str, str], base: Base, clock: Clock) -> None:
        self._opened, self._base, self._clock = opened, base, clock

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        shard = 0 if task is None else task.partitionId()
        schema = self._opened[2]
        rows = pa.Table.from_batches([each.cast(schema) for each in batches], schema)
        table = _table(*self._opened)
        report = table.advance(self._base, shard, rows, self._clock)
        yield pa.RecordBatch.from_pylist([{"shard": shard, "report": pickle.dumps(report)}])
        freeze_modules("millrace_keyed")
