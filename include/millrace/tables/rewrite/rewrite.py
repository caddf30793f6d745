"""The work of one task: rewrite a group of files into new ones, sorted and without rows that no read can see.

Rows that the published version hides, but that reads at earlier ticks still see, go to files of their own
(millrace.tables.rewrite.files.HIDDEN). So engines that read the published table find files without hidden rows, and
files of hidden rows only, which they skip. The published version decides only where a row goes: each row is in
one of the new files, whatever the version says.

Reads named files, writes durable files that no commit names yet, and returns a :class:`RewriteResult` that describes
them. Knows nothing of the Delta log. The mappers run groups in this process or in Spark tasks.

Memory: about three times the group's decoded rows (the rows, their order, the sorted rows), plus all deletes to fold
in.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import TableDamaged
from millrace.base.failpoint import hit
from millrace.message.stored_columns import ColumnChains, fold_chains
from millrace.storage.deletion_vectors import NO_POSITIONS, Positions, Vector, read_vector
from millrace.storage.file_sink import FileSink
from millrace.storage.parquet_file import FileAction, open_file, read_rows
from millrace.storage.store import store_at
from millrace.storage.table import LiveFile, TableHandle
from millrace.tables.collections.data_tables import STATS_COLUMNS
from millrace.tables.collections.dead_rows import HiddenRanges, dead_mask
from millrace.tables.collections.flush_tables import SEGMENT_COLUMNS
from millrace.tables.rewrite.files import HIDDEN, FileGroup, is_hidden
from millrace.wal.visible.collection_rows import align_to_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WRITE_ROWS: Final = 1 << 17
"""Rows that are written at once, after which a file may end."""

TASKS_PER_CORE: Final = 4
"""More tasks than cores, so that one long task does not leave cores idle. Each task reads its deletes once."""

_PLACE: Final = ("_partition_id", "_vchannel", "_time_tick", "_write_tick")


@dataclass(frozen=True, slots=True)
class DeadRowFilter:
    """The causes of dead rows: the deletes up to a tick, and dropped partitions and collections."""

    key: tuple[str, ...]
    tick: int
    table: str
    """URI of the deletes table."""
    deletes: tuple[str, ...]
    """Files of the deletes table."""
    schema: pa.Schema
    """Columns of those files."""
    drops: HiddenRanges = field(default_factory=HiddenRanges)


@dataclass(frozen=True, slots=True)
class RewriteJob:
    """Shared data of all groups of one table, which is sent to every task."""

    uri: str
    """URI of the table."""
    schema: pa.Schema
    """Columns of its files, those of the table at the planned version."""
    sort: tuple[str, ...]
    stats: tuple[str, ...]
    fold: DeadRowFilter | None = None
    """Rows table only: the rows to drop."""
    drop_deletes_to: int = 0
    """Deletes table only: deletes up to this tick are dropped."""
    chains: ColumnChains = ()
    """Rows table only: columns whose values move to the last of their chain, because no read uses the narrower ones."""
    published: str = ""
    """Rows table only: URI of the published table."""
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    """Rows table only: by file the vector of its rows that the published version hides, and that are set apart."""


def merge_job(table: TableHandle, key: Sequence[str]) -> RewriteJob:
    """Return the job that merges files of a collection's rows or deletes, whose primary key has the columns `key`."""
    columns = (*key, *STATS_COLUMNS)
    return RewriteJob(table.uri, file_schema(table), sort=columns, stats=columns)


def segments_job(uri: str) -> RewriteJob:
    """Return the job that merges files of the table ``segments``."""
    return RewriteJob(uri, SEGMENT_COLUMNS, sort=("segment_id", "time_tick"), stats=("segment_id", "time_tick"))


def file_schema(table: TableHandle) -> pa.Schema:
    """Return the columns of the table's files: those of the table without the partition columns."""
    partitions = set(table.partition_columns)
    return pa.schema([each for each in table.schema if each.name not in partitions])


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """The result of one group."""

    group: FileGroup
    actions: tuple[FileAction, ...] = ()
    rows_in: int = 0
    rows_out: int = 0
    unchanged: bool = False
    """Whether nothing was written, because the single file has no dead row."""
    error: str | None = None
    """Reason that the group failed. Its new files are removed."""
    rows_apart: int = 0
    """Rows of other files that were set apart."""


RewriteMapper = Callable[[RewriteJob, Sequence[FileGroup]], Iterable[RewriteResult]]
"""Distributes groups over tasks. Results come in any order."""


def rewrite_in_process(job: RewriteJob, groups: Sequence[FileGroup]) -> Iterator[RewriteResult]:
    """Rewrite one group after the other in this process."""
    deletes = load_deletes(job.fold)
    for group in groups:
        yield rewrite_group(job, group, deletes)


def spark_mapper(spark: SparkSession, *, cores: int) -> RewriteMapper:
    """Return a mapper that rewrites groups in tasks of `spark`, each in one Python worker. No row passes the JVM."""

    def run(job: RewriteJob, groups: Sequence[FileGroup]) -> list[RewriteResult]:
        if not groups:
            return []
        tasks = min(len(groups), cores * TASKS_PER_CORE)
        ordered = sorted(groups, key=lambda group: group.size, reverse=True)
        shares = [ordered[number::tasks] for number in range(tasks)]

        def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    deletes = load_deletes(job.fold)
                    done = [pickle.dumps(rewrite_group(job, group, deletes)) for group in shares[number]]
                    yield pa.RecordBatch.from_pydict({"done": pa.array(done, pa.binary())})

        rows = spark.range(0, tasks, 1, tasks).mapInArrow(work, "done binary").collect()
        return [pickle.loads(bytes(row["done"])) for row in rows]

    return run


def load_deletes(fold: DeadRowFilter | None) -> pa.Table | None:
    """Read the deletes to fold in, or return None if there are none."""
    if fold is None:
        return None
    return read_rows(store_at(fold.table), fold.deletes, fold.schema, where=pc.field("_time_tick") <= fold.tick)


def rewrite_group(job: RewriteJob, group: FileGroup, deletes: pa.Table | None) -> RewriteResult:
    """Rewrite one group. An error becomes part of the result, so that it affects no other group."""
    sink = FileSink.at(job.uri, job.schema, job.stats)
    apart = FileSink.at(job.uri, job.schema, job.stats, kind=HIDDEN)
    try:
        rows_in = sum(file.rows for file in group.files)
        if len(group.files) == 1 and not _worth(job, group, deletes):
            return RewriteResult(group, rows_in=rows_in, rows_out=rows_in, unchanged=True)
        shown, hidden, moved = [], [], 0
        for file in group.files:
            staying, aside = _parts(job, deletes, file)
            shown.append(staying)
            hidden.append(aside)
            moved += 0 if is_hidden(file) else aside.num_rows
        rows_out = 0
        for target, parts in ((sink, shown), (apart, hidden)):
            rows = _sorted(fold_chains(pa.concat_tables(parts), job.chains), job.sort)
            for start in range(0, rows.num_rows, WRITE_ROWS):
                target.write(rows.slice(start, WRITE_ROWS), dict(group.files[0].partition))
            rows_out += rows.num_rows
        actions = (*sink.finish(), *apart.finish())
    except Exception as error:
        sink.abort()
        apart.abort()
        return RewriteResult(group, error=f"{type(error).__name__}: {error}")
    hit("compact.written")
    return RewriteResult(group, actions, rows_in, rows_out, rows_apart=moved)


def _read(job: RewriteJob, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    with open_file(store_at(job.uri), name) as parquet:
        known = set(parquet.schema_arrow.names)
        wanted = [each for each in (columns or job.schema.names) if each in known]
        return align_to_schema(
            parquet.read(columns=wanted), pa.schema([job.schema.field(each) for each in columns or job.schema.names])
        )


def _worth(job: RewriteJob, group: FileGroup, deletes: pa.Table | None) -> bool:
    """Return whether a single file has anything to drop. Reads only the columns that decide this."""
    name = group.files[0].path
    if group.for_hidden and len(_hidden(job, name)):
        return True
    if job.fold is not None and deletes is not None:
        rows = _read(job, name, (*job.fold.key, *_PLACE))
        return bool(dead_mask(rows, deletes, key=job.fold.key, hidden=job.fold.drops).any())
    if job.drop_deletes_to:
        return bool(pc.any(pc.less_equal(_read(job, name, ("_time_tick",))["_time_tick"], job.drop_deletes_to)).as_py())
    return False


def _parts(job: RewriteJob, deletes: pa.Table | None, file: LiveFile) -> tuple[pa.Table, pa.Table]:
    """Return the rows of a file that stay: those that are shown, and those that are set apart."""
    rows = _read(job, file.path)
    apart = np.full(rows.num_rows, is_hidden(file))
    apart[_hidden(job, file.path)] = True
    gone = _invisible_mask(job, deletes, rows)
    return _select(rows, ~(apart | gone)), _select(rows, apart & ~gone)


def _invisible_mask(job: RewriteJob, deletes: pa.Table | None, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows that no read can see."""
    if job.fold is not None and deletes is not None:
        return dead_mask(rows, deletes, key=job.fold.key, hidden=job.fold.drops)
    if job.drop_deletes_to:
        return np.asarray(rows["_time_tick"].to_numpy() <= job.drop_deletes_to)
    return np.zeros(rows.num_rows, dtype=bool)


def _select(rows: pa.Table, mask: npt.NDArray[np.bool_]) -> pa.Table:
    return rows if mask.all() else rows.filter(pa.array(mask))


def _hidden(job: RewriteJob, name: str) -> Positions:
    """Return the positions of a file's rows that the published version hides."""
    vector = job.vectors.get(name)
    try:
        return NO_POSITIONS if vector is None else read_vector(store_at(job.published), vector)
    except TableDamaged:  # later versions replaced it, long ago: the next run sets these rows apart
        return NO_POSITIONS


def _sorted(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    order: Any = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in columns])
    return rows.take(order)
