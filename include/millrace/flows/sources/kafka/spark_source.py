"""``millrace_topics``: topics of Kafka as a Spark data source, batch and stream, which each Spark process creates.

A task reads a range of one partition. All options are text, made by :func:`options_of`:

- ``source_and_secrets``: JSON of a KafkaSource. Spark shows no value of an option of such a name.
- ``columns`` (JSON, types by name), ``record`` (names with commas) and ``tombstones``: those of
  :class:`~millrace.flows.sources.kafka.columns.RecordRows`.
- ``place`` and ``until``: JSON of places, where a stream or a batch begins, and where a batch ends.
- ``max_bytes`` and ``max_records`` of a micro-batch, over all partitions.
- ``skip`` and ``skip_file``: JSON of positions by lane, and a file with more of them under ``records``. Those records
  are put with the ones that do not decode.
- ``again``: a folder that all tasks reach, with the records that a redrive has read again, a file for each redrive.
- ``undecoded``: a folder that all tasks reach, for records that do not decode, a file for each range. Without it such a
  record is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
from pydantic import SecretStr
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import InvalidSettings
from millrace.flows.declare.errors import SKIPPED, SKIPPED_WORDS
from millrace.flows.sources.kafka.columns import RecordRows, Tombstones, Undecoded, records_of, undecoded_rows
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.planner import UNBOUNDED, LaneRange, Place, Planner, RecordsAgain, Start
from millrace.flows.sources.kafka.topics import Reader, Topics
from millrace.flows.sources.source import task_of
from millrace.runtime.spark.worker_gc import freeze_modules
from millrace.storage.store import store_at

FORMAT: Final = "millrace_topics"
PART_RECORDS: Final = 10_000
PART_BYTES: Final = 8 << 20
"""Bytes of a range that become one Arrow batch."""
PROBE_BYTES: Final = 1 << 20
_SUFFIX: Final = ".arrow"


def options_of(
    source: KafkaSource,
    place: Place,
    *,
    columns: Mapping[str, str],
    record: Sequence[str],
    tombstones: Tombstones = "error",
    undecoded: object = None,
    max_bytes: int | None = None,
    max_records: int | None = None,
) -> dict[str, str]:
    """Return the options of the data source."""
    found = {
        "source_and_secrets": json.dumps(_plain(source.model_dump(mode="python"))),
        "columns": json.dumps(dict(columns)),
        "record": ",".join(record),
        "tombstones": tombstones,
        "place": json.dumps(place.to_json()),
    }
    for name, value in (("undecoded", undecoded), ("max_bytes", max_bytes), ("max_records", max_records)):
        if value is not None:
            found[name] = str(value)
    return found


def skip_options(positions: Mapping[str, Sequence[int]], file: object) -> dict[str, str]:
    """Return the options for records to be skipped: `positions`, and those in `file` at the time of the read."""
    return {"skip": json.dumps({lane: list(each) for lane, each in positions.items()}), "skip_file": str(file)}


def beginning(
    source: KafkaSource, start: Start | int = "earliest", *, offsets: Mapping[str, int] | None = None
) -> Place:
    """Return the beginning of a stream of `source`, determined once, in the driver. See :meth:`Planner.begin`."""
    topics = Topics(source, _group(source))
    try:
        return Planner(topics).begin(start, offsets=offsets)
    finally:
        topics.close()


def stream(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """Return the rows after a position as a streaming DataFrame, with the options of :func:`options_of`."""
    spark.dataSource.register(TopicsSource)
    return spark.readStream.format(FORMAT).options(**options).load()


def batch(spark: SparkSession, options: Mapping[str, str], until: Place) -> DataFrame:
    """Return the rows from a position up to `until` as a DataFrame, with the options of :func:`options_of`."""
    spark.dataSource.register(TopicsSource)
    return spark.read.format(FORMAT).options(**options, until=json.dumps(until.to_json())).load()


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _group(source: KafkaSource) -> str:
    return source.group or "millrace-stream"


class TopicsSource(DataSource):
    """The data source with its options, created by Spark in each process."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @cached_property
    def _read(self) -> TopicsRead:
        given = self.options.get("source_and_secrets")
        if not given:
            raise InvalidSettings(f"the source {FORMAT} needs the option 'source_and_secrets': a KafkaSource as JSON")
        return TopicsRead(
            KafkaSource.model_validate(json.loads(given)),
            columns=json.loads(self.options.get("columns") or "{}"),
            record=[each for each in (self.options.get("record") or "").split(",") if each],
            tombstones=self.options.get("tombstones", "error"),
            undecoded=self.options.get("undecoded") or "",
            skip=json.loads(self.options.get("skip") or "{}"),
            skip_file=self.options.get("skip_file") or "",
            again=self.options.get("again") or "",
        )

    def _place(self, option: str) -> Place:
        return Place.from_json(json.loads(self.options[option]))

    def schema(self) -> StructType:
        return from_arrow_schema(self._read.rows().schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        return TopicsReader(self._read, self._place("place"), self._place("until"))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        limits = [int(self.options.get(name) or UNBOUNDED) for name in ("max_bytes", "max_records")]
        return TopicsStreamReader(self._read, self._place("place"), *limits)


class TopicsRead:
    """The source and the form of its rows, as plain data: each task gets a copy."""

    def __init__(
        self,
        source: KafkaSource,
        *,
        columns: Mapping[str, str],
        record: Sequence[str],
        tombstones: Any = "error",
        undecoded: str = "",
        skip: Mapping[str, Sequence[int]] | None = None,
        skip_file: str = "",
        again: str = "",
    ) -> None:
        self._again = again
        self.source = source
        self._skip, self._skip_file = dict(skip or {}), skip_file
        self._columns, self._record, self._tombstones = dict(columns), tuple(record), tombstones
        self._undecoded = undecoded

    def rows(self) -> RecordRows:
        """Return the conversion of records to rows. Raises InvalidArgument for an unknown column type."""
        return RecordRows(self._columns, self._record, tombstones=self._tombstones)

    def read(self, task: LaneRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range in order. Raises as Reader.read."""
        rows = self.rows()
        reader = Reader(self.source, _group(self.source), task.topic, task.partition)
        place, undecoded, skip = task.start, list[Undecoded](), self._skipped(task.lane)
        try:
            while place < task.end:
                records, after = reader.read(place, task.end, items=PART_RECORDS, size=PART_BYTES, seconds=1.0)
                chosen = [each for each in records if each.offset in skip] if skip else []
                if chosen:
                    undecoded += [Undecoded(each, f"{SKIPPED}: {SKIPPED_WORDS}") for each in chosen]
                    records = [each for each in records if each.offset not in skip]
                found, bad = rows.rows(records)
                if bad and not self._undecoded:
                    raise InvalidSettings(
                        f"{bad[0].record.position}: {bad[0].reason}: correct the record's producer, or declare where"
                        " undecodable records are put"
                    )
                undecoded += bad
                if found.num_rows:
                    yield found
                place = after
            if undecoded:
                self._put_aside(task, undecoded)
        finally:
            reader.close()

    def newest_again(self) -> int:
        """Return the number of the newest redrive; 0 if there is none."""
        names = store_at(self._again).list("") if self._again else []
        stems = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return max((int(stem) for stem in stems if stem.isdecimal()), default=0)

    def again(self, start: Place, end: Place) -> list[RecordsAgain]:
        """Return a task for each redrive between two places."""
        numbers = range(start.again + 1, end.again + 1)
        return [RecordsAgain(f"{self._again}/{each}{_SUFFIX}", each) for each in numbers]

    def read_again(self, task: RecordsAgain) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the records of a redrive, in order."""
        folder, _, name = task.path.rpartition("/")
        body = store_at(folder).read(name)
        if body is None:
            raise FileNotFoundError(task.path)
        with pa.ipc.open_file(body) as reader:
            records = records_of(reader.read_all())
        found, bad = self.rows().rows(sorted(records, key=lambda each: (each.topic, each.partition, each.offset)))
        if found.num_rows:
            yield found
        if bad:
            self._write_aside(f"again-{task.number}", bad)

    def _skipped(self, lane: str) -> Set[int]:
        """Return the positions of the lane's records to be skipped."""
        more: Mapping[str, Sequence[int]] = {}
        if self._skip_file:
            folder, _, name = self._skip_file.rpartition("/")
            found = store_at(folder).read(name)
            more = {} if found is None else json.loads(found)["records"]
        return {*self._skip.get(lane, ()), *more.get(lane, ())}

    def record_size(self, few: LaneRange) -> float:
        """Return the mean bytes of the records of a short range. It costs a fetch, since Kafka stores no sizes."""
        reader = Reader(self.source, _group(self.source), few.topic, few.partition)
        try:
            records, _ = reader.read(few.start, few.end, items=few.end - few.start, size=PROBE_BYTES, seconds=1.0)
        finally:
            reader.close()
        sizes = [len(each.value or b"") + len(each.key or b"") for each in records]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def _put_aside(self, task: LaneRange, bad: Sequence[Undecoded]) -> None:
        # Named by the range, not by the attempt, so that a repeated range replaces the same file.
        self._write_aside(f"{task.lane}-{task.start}", bad)

    def _write_aside(self, name: str, bad: Sequence[Undecoded]) -> None:
        table = undecoded_rows(bad)
        out = pa.BufferOutputStream()
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
        store_at(self._undecoded).replace(f"{name}{_SUFFIX}", out.getvalue().to_pybytes())


class TopicsPartition(InputPartition):
    """One task."""

    def __init__(self, task: LaneRange | RecordsAgain) -> None:
        self.value = task


def _rows(read: TopicsRead, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if partition.value is not None:  # for a batch with nothing to read, Spark creates an empty partition
        task = partition.value
        yield from read.read_again(task) if isinstance(task, RecordsAgain) else read.read(task)
    freeze_modules(FORMAT)


class TopicsReader(DataSourceReader):
    """The records between two positions, as a batch."""

    def __init__(self, read: TopicsRead, start: Place, until: Place) -> None:
        self._read, self._start, self._until = read, start, until

    def partitions(self) -> Sequence[InputPartition]:
        topics = Topics(self._read.source, _group(self._read.source))
        try:
            return [TopicsPartition(task) for task in Planner(topics).ranges(self._start, self._until)]
        finally:
            topics.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(self._read, partition)


class TopicsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The records after a position. Spark calls it in one process, and copies of it read in the tasks."""

    def __init__(self, read: TopicsRead, begin: Place, max_bytes: int, max_records: int) -> None:
        self._read = read
        self._begin = begin
        self._max_bytes, self._max_records = max_bytes, max_records
        self._topics: Topics | None = None
        self._plans: Planner | None = None
        self._target: dict[str, int] | None = None
        self._again: int | None = None
        """The newest redrive: looked for once, since each look is a listing and a redrive needs a stopped stream."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_topics": None, "_plans": None, "_again": None}

    def initialOffset(self) -> dict[str, Any]:
        return self._begin.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._max_bytes) if self._max_bytes < UNBOUNDED else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        size, count = UNBOUNDED, self._max_records
        if isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        elif isinstance(limit, ReadMaxRows):
            count = min(count, limit.max_rows)
        elif not isinstance(limit, ReadAllAvailable):
            raise InvalidSettings(f"the source {FORMAT} accepts only a limit in bytes or rows, not {limit}")
        place = Place.from_json(start)
        found = self._planner().next(place, max_bytes=size, max_records=count, target=self._target)
        if self._again is None:
            self._again = self._read.newest_again()
        if self._again > found.again:
            found = replace(found, again=self._again)
        return start if found is place else found.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the present ends of the lanes, for the progress report."""
        return {"offsets": self._planner().ends()}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._planner().ends()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = Place.from_json(start), Place.from_json(end)
        if first.begins:  # a query was restarted before its first micro-batch had ended
            first = last.start()
        ranges: list[LaneRange | RecordsAgain] = [*self._planner().ranges(first, last)]
        return [TopicsPartition(task) for task in ranges + self._read.again(first, last)]

    def commit(self, end: dict[str, Any]) -> None:
        """Commit offsets to the consumer group, for other tools. The positions are in the query's checkpoint."""
        self._planner()
        assert self._topics is not None
        places = Place.from_json(end).offsets
        self._topics.mirror(
            (topic, partition, places[task_of(topic, partition)])
            for topic, partition in self._topics.partitions()
            if task_of(topic, partition) in places
        )

    def stop(self) -> None:
        if self._topics is not None:
            self._topics.close()
            self._topics = self._plans = None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(self._read, partition)

    def _planner(self) -> Planner:
        if self._plans is None:
            self._topics = Topics(self._read.source, _group(self._read.source))
            self._plans = Planner(self._topics, self._read.record_size)
        return self._plans
