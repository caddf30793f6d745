"""``millrace_rows``: a collection's rows as a Spark data source, batch and stream, which each Spark process creates.

Tasks read and decode, and pass Arrow batches on. All options are text: ``collection``; ``channels`` and ``columns``
(with commas); ``kinds``; ``place`` and ``until`` (JSON; default: the beginning, and what there is); ``max_bytes`` (of
files, for each PChannel and micro-batch); ``aligned`` (true: PChannels wait for each other); ``settings`` (JSON of
``MILLRACE_*``; default: this process's). A query's start waits for these processes' imports, so code that only the
program with the DataFrame needs is in :mod:`millrace.flows.sources.collection.frames`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.flows.sources.collection.rows import UNBOUNDED, Place, RowsOf, RowsPlanner, Task, rows_of
from millrace.runtime.spark.worker_gc import freeze_modules
from millrace.tables.wal.reader import follow

FORMAT: Final = "millrace_rows"


class RowsSource(DataSource):
    """The data source with its options, created by Spark in each process."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @cached_property
    def _rows(self) -> RowsOf:
        given = self.options.get("settings")
        settings = Settings.load(env=json.loads(given)) if given else Settings.load()
        name = self.options.get("collection")
        if not name:
            raise InvalidSettings(f"the source {FORMAT} reads a collection: give its name as the option 'collection'")
        channels, columns = self._names("channels"), self._names("columns")
        kinds: Any = self.options.get("kinds", "all")  # find() checks it
        return RowsOf.find(settings, name, channels=channels, columns=columns, kinds=kinds)

    def _names(self, option: str) -> list[str]:
        return [each for each in self.options.get(option, "").split(",") if each]

    @property
    def _place(self) -> Place:
        given = self.options.get("place")
        return Place.from_json(json.loads(given)) if given else Place.behind(self._rows)

    def schema(self) -> StructType:
        return from_arrow_schema(self._rows.arrow())

    def reader(self, schema: StructType) -> DataSourceReader:
        until = self.options.get("until")
        return RowsReader(self._rows, self._place, json.loads(until) if until else None)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        limit = int(self.options.get("max_bytes") or self._rows.settings.max_bytes_per_trigger)
        return RowsStreamReader(self._rows, self._place, limit, aligned=self.options.get("aligned") == "true")


class RowsPartition(InputPartition):
    """One task."""

    def __init__(self, task: Task) -> None:
        self.value = task


def _read(rows: RowsOf, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if partition.value is not None:  # for a batch with nothing to read, Spark creates an empty partition
        yield from rows_of(rows, partition.value)
    freeze_modules(FORMAT)


class RowsReader(DataSourceReader):
    """The rows between two positions, as a batch."""

    def __init__(self, rows: RowsOf, place: Place, until: Mapping[str, int] | None) -> None:
        self._rows = rows
        self._start = place
        self._until = until

    def partitions(self) -> Sequence[InputPartition]:
        planner = RowsPlanner(self._rows)
        until = planner.ends() if self._until is None else self._until
        return [RowsPartition(task) for task in planner.stretches(self._start.ticks, until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._rows, partition)


class RowsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The rows after a position. Spark calls it in one process, and copies of it read in the tasks."""

    def __init__(self, rows: RowsOf, place: Place, max_bytes: int, *, aligned: bool = False) -> None:
        self._rows = rows
        self._begin = place
        self._max_bytes = max_bytes
        self._aligned = aligned
        self._planner: RowsPlanner | None = None
        self._target: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_planner": None}

    def initialOffset(self) -> dict[str, Any]:
        return self._begin.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._max_bytes)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if not isinstance(limit, ReadMaxBytes | ReadAllAvailable):
            raise InvalidSettings(
                f"the source {FORMAT} accepts only a limit in bytes (the option max_bytes), not {limit}"
            )
        most = limit.max_bytes if isinstance(limit, ReadMaxBytes) else UNBOUNDED
        place = Place.from_json(start)
        follow(self._rows.settings)
        found = self._plans().next(place, max_bytes=most, target=self._target, aligned=self._aligned)
        return start if found is place else found.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the position up to which the ``wal`` table is complete, for the progress report."""
        return {"ticks": self._plans().ends(exact=False)}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._plans().ends()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = Place.from_json(start), Place.from_json(end)
        if (
            first.begins
        ):  # a query was restarted before its first micro-batch had ended: use the first start's beginning
            first = last.start()
        return [RowsPartition(task) for task in self._plans().tasks(first, last)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._rows, partition)

    def _plans(self) -> RowsPlanner:
        if self._planner is None:
            self._planner = RowsPlanner(self._rows)
        return self._planner
