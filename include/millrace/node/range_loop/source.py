"""The Python data source of a loop: one row for each range of a micro-batch, none for messages.

Spark polls the schedule in a Python process of the driver. Each task runs some ranges, one after another, and leaves
durable files. Only a report of some hundred bytes for each range crosses the JVM; foreachBatch commits the files it
names (millrace.node.range_loop.query).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import InvalidSettings
from millrace.node.range_loop.definition import LoopDefinition, Plan, group_plans, run_range
from millrace.node.range_loop.schedule import START, UNBOUNDED, RangeSchedule, offset_of
from millrace.runtime.spark.worker_gc import freeze_modules

SCHEMA: Final = pa.schema([pa.field("channel", pa.utf8()), pa.field("outcome", pa.binary())])
"""The channel of a range, and its pickled Report or FailedRange."""


class RangeSource(DataSource):
    """Base of the data sources.

    Each loop has its own class (:func:`source_of`): Spark instantiates it in each process.
    """

    definition: LoopDefinition[Any, Any]
    tasks: int

    @classmethod
    def name(cls) -> str:
        return f"millrace_{cls.definition.name.replace('-', '_')}"

    def schema(self) -> str:
        return "channel STRING, outcome BINARY"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return RangeReader(self.definition, tasks=self.tasks)


def source_of(definition: LoopDefinition[Any, Any], *, tasks: int) -> type[RangeSource]:
    """Return the class to pass to ``spark.dataSource.register`` for `definition`.

    `tasks`: how many tasks the small ranges of a micro-batch may take, such as the cores that Spark has.
    """
    return type("DefinedSource", (RangeSource,), {"definition": definition, "tasks": tasks, "__module__": __name__})


class RangePartition(InputPartition):
    """One task: ranges of different channels."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.value = plans


class RangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's view of a schedule, created on first use. `read` runs in a task and knows only its plans."""

    def __init__(self, definition: LoopDefinition[Any, Any], *, tasks: int) -> None:
        self._definition = definition
        self._tasks = tasks
        self._made: RangeSchedule[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_definition": self._definition, "_tasks": self._tasks, "_made": None}

    def initialOffset(self) -> dict[str, Any]:
        return dict(START)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._definition.max_bytes)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if not isinstance(limit, ReadMaxBytes | ReadAllAvailable):
            raise InvalidSettings(f"the source {self._definition.name!r} needs a limit in bytes, not {limit}")
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else UNBOUNDED
        begin = offset_of(start)
        found = self._schedule.next_offset(begin, max_bytes=max_bytes)
        return start if found is begin else dict(found)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends for the progress report, as latestOffset found them: Spark calls that one before."""
        found = self._schedule.seen()
        return dict(found) if found["ends"] else None

    def prepareForTriggerAvailableNow(self) -> None:
        self._schedule.fix_target()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        groups = group_plans(self._schedule.plan(offset_of(end)), tasks=self._tasks)
        return [RangePartition(plans) for plans in groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        outcomes = [run_range(self._definition, plan) for plan in partition.value]
        rows = {
            "channel": [each.channel for each in outcomes],
            "outcome": [pickle.dumps(each) for each in outcomes],
        }
        yield pa.RecordBatch.from_pydict(rows, schema=SCHEMA)
        freeze_modules(self._definition.name)

    def stop(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    @property
    def _schedule(self) -> RangeSchedule[Any]:
        if self._made is None:
            definition = self._definition
            self._made = RangeSchedule(definition.planner(), parked=definition.parked, assigned=definition.assigned)
        return self._made
