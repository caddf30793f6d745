"""Replaces the rows of one slice of a derived table: files by Spark's tasks, then one fenced commit by the driver.

The commit removes the files that have rows of the slice. A file that has rows of other slices too, as another engine's
OPTIMIZE leaves them, is replaced by one with those rows. If another writer replaced one of these files meanwhile, or
moved the slice's app id, the commit is fenced, and the caller plans again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.operations.backfill.derived import DATE
from millrace.operations.backfill.slices import TimeSlice
from millrace.storage.commit import AppTransaction, CommitPart, add_columns, commit_fenced, has_timestamp_ntz
from millrace.storage.file_sink import FileSink, delete_uncommitted
from millrace.storage.parquet_file import FileAction
from millrace.storage.store import store_at
from millrace.storage.table import TOMBSTONES, LiveFile, LogMaintenance, TableHandle, create_table, table_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_REPORT: Final = "action string"
_OUTSIDE: Final = ""
"""The report of a task that met a row of another slice."""
_PROPERTIES: Final = {TOMBSTONES: "interval 1 week"}
_MAINTENANCE: Final = LogMaintenance(keep_commits=100_000)
"""A derived table is its user's, who may read any of its versions."""


def table_columns(schema: StructType) -> pa.Schema:
    """Return the columns of Spark's `schema` as the table has them: each may be null."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.schema([each.with_nullable(True) for each in to_arrow_schema(schema, timezone="UTC")])


def ensure_table(uri: str, columns: pa.Schema) -> TableHandle:
    """Open the derived table at `uri`, creating it if needed."""
    # A column of times without a zone needs features that a new table gets with the column.
    plain = pa.schema([each for each in columns if not has_timestamp_ntz(each.type)])
    table = create_table(uri, plain, partition_by=[DATE], configuration=_PROPERTIES)
    if table.version == 0 and len(plain) < len(columns):
        add_columns(table, columns)
    return table


class SliceWriter:
    """One attempt to replace a slice of the table at `uri`, as it is now."""

    def __init__(self, uri: str, part: TimeSlice, *, bucket: str, app: str) -> None:
        self._part, self._bucket, self._app = part, bucket, app
        self._table = table_at(uri)
        self._base = self._table.find_app_version(app)

    @property
    def tick(self) -> int:
        """The tick of the slice's rows; 0 if it was never written."""
        return self._base or 0

    def write(self, rows: DataFrame) -> list[FileAction] | None:
        """Have Spark's tasks write `rows`. Returns None, and leaves no file, if one lies outside of the slice."""
        task = _Task(self._table.uri, self._table.schema.serialize().to_pybytes(), self._part, self._bucket)
        reports = [each["action"] for each in rows.mapInArrow(task, _REPORT).collect()]
        made = [FileAction(**json.loads(each)) for each in reports if each != _OUTSIDE]
        if len(made) < len(reports):
            delete_uncommitted(self._table.store, made)
            return None
        return made

    def commit(self, made: Sequence[FileAction], *, tick: int, note: Mapping[str, Any]) -> int | None:
        """Replace the slice by the files `made`. Returns the table's version, or None if another writer was first."""
        mine, shared = self._files()
        rewritten = self._rewrite_shared(shared)
        part = CommitPart(
            adds=[*made, *rewritten],
            removes=[*mine, *shared],
            app_transactions={self._app: AppTransaction(self._base, tick)},
            info=note,
        )
        outcome = commit_fenced(self._table, [part], maintenance=_MAINTENANCE)
        return None if outcome.fenced else outcome.version

    def _files(self) -> tuple[list[str], list[str]]:
        """Return the live files that have only rows of the slice, and those that have other rows too."""
        mine, shared = list[str](), list[str]()
        days = (self._part.start.date(), self._last_day())
        for file in self._table.describe_files([self._bucket]):
            day = file.partition[DATE]
            if not day or not days[0] <= date.fromisoformat(day) <= days[1]:
                continue
            if self._part.whole_days or self._is_within(file):
                mine.append(file.path)
            elif not self._is_disjoint(file):
                shared.append(file.path)
        return mine, shared

    def _last_day(self) -> date:
        end = self._part.end
        return datetime.fromtimestamp(end.timestamp() - 1e-3, UTC).date()

    def _is_within(self, file: LiveFile) -> bool:
        low, high = (_moment(each[self._bucket]) for each in (file.low, file.high))
        return low is not None and high is not None and self._part.start <= low and high < self._part.end

    def _is_disjoint(self, file: LiveFile) -> bool:
        low, high = (_moment(each[self._bucket]) for each in (file.low, file.high))
        return (high is not None and high < self._part.start) or (low is not None and low >= self._part.end)

    def _rewrite_shared(self, shared: Sequence[str]) -> list[FileAction]:
        """Write the rows of the shared files that belong to other slices."""
        files = _file_columns(self._table.schema)
        sink = FileSink(self._table.store, files, tuple(files.names))
        partitions = {each.path: dict(each.partition) for each in self._table.describe_files()}
        try:
            for name in shared:
                rows = self._table.read(name).select(files.names).cast(files)
                others = rows.filter(pc.invert(_inside(rows[self._bucket], self._part)))
                if others.num_rows:
                    sink.write(others, partitions[name])
            return sink.finish()
        except BaseException:
            sink.abort()
            raise


@dataclass(frozen=True)
class _Task:
    """The work of a task on its rows."""

    uri: str
    schema: bytes
    part: TimeSlice
    bucket: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        files = _file_columns(schema)
        sink = FileSink(store_at(self.uri), files, tuple(files.names))
        try:
            for batch in batches:
                rows = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
                if not pc.all(_inside(rows[self.bucket], self.part), min_count=0).as_py():
                    sink.abort()
                    yield pa.RecordBatch.from_pylist([{"action": _OUTSIDE}])
                    return
                for day in pc.unique(rows[DATE]).to_pylist():
                    of_day = rows.filter(pc.equal(rows[DATE], pa.scalar(day, pa.date32())))
                    sink.write(of_day.select(files.names), {DATE: day.isoformat()})
            made = sink.finish()
        except BaseException:
            sink.abort()
            raise
        if made:
            yield pa.RecordBatch.from_pylist([{"action": json.dumps(asdict(each))} for each in made])


def _file_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a table's files: those of the table without the partition's."""
    return pa.schema([each for each in schema if each.name != DATE])


def _inside(moments: pa.ChunkedArray, part: TimeSlice) -> pa.ChunkedArray:
    """Return whether each moment lies in the slice. A null does not."""
    start, end = (pa.scalar(moment, moments.type) for moment in part)
    return pc.fill_null(pc.and_(pc.greater_equal(moments, start), pc.less(moments, end)), False)


def _moment(value: Any) -> datetime | None:
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
