"""Readers of the rows of a restore: Arrow in this process, or Spark for large collections.

Both return the same rows, and both detect differing contents. A digest is comparable only with one of the same reader.
The choice is made here by the size of the files to read: for a small collection, starting a JVM takes longer than the
restore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.settings import Settings
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.plan import ReadPlan

if TYPE_CHECKING:
    from millrace.operations.entry import SessionFactory
    from millrace.storage.table import TableHandle

MAX_BYTES_WITHOUT_SPARK: Final = 32 << 20
"""Size of the files up to which they are read whole with Arrow. Decoded, they take some hundred MiB."""

_MASK: Final = (1 << 64) - 1


class ContentDigest(NamedTuple):
    """Count and content of rows, independent of their order."""

    rows: int
    first: int
    second: int

    def __str__(self) -> str:
        return f"{self.rows}/{self.first & _MASK:016x}/{self.second & _MASK:016x}"

    def plus(self, other: ContentDigest) -> ContentDigest:
        return ContentDigest(*(one + two for one, two in zip(self, other, strict=True)))


class RestoreRows(Protocol):
    """The rows of a collection at one tick, with their partition and VChannel columns."""

    def digest(self, names: list[str]) -> ContentDigest:
        """Return the digest of the fields `names`."""
        ...

    def chunks(self, count: int, key: Sequence[str], names: list[str]) -> Iterator[pa.Table]:
        """Yield the columns `names` in `count` parts that fit into memory."""
        ...

    def of_vchannel(self, vchannel: str) -> RestoreRows:
        """Return the rows of one VChannel."""
        ...

    def release(self) -> None:
        """Release the memory of the rows."""
        ...


class RowReader(Protocol):
    """Reads a collection, with the arguments of :func:`millrace.tables.read.arrow.read_arrow`."""

    def __call__(self, collection_id: int, *, at: int | None, confirmed: Mapping[str, int]) -> RestoreRows: ...


def reader_for(
    plan: ReadPlan,
    stack: ExitStack,
    session_factory: SessionFactory,
    *,
    max_bytes_without_spark: int = MAX_BYTES_WITHOUT_SPARK,
) -> RowReader:
    """Return the reader for a collection as large as the plan's. A Spark session it needs is closed with `stack`."""
    if read_bytes(plan) <= max_bytes_without_spark:
        return ArrowReader(plan.settings)
    from millrace.operations.restore.spark_reader import SparkReader

    return SparkReader(stack.enter_context(session_factory()), plan.settings)


def read_bytes(plan: ReadPlan) -> int:
    """Return roughly how many bytes of files a read would open."""
    return _bytes(plan.rows) + _bytes(plan.deletes) + plan.tail_bytes()


def _bytes(table: TableHandle | None) -> int:
    return 0 if table is None else sum(table.actions()["size_bytes"].to_pylist())


class ArrowReader:
    """Reads with Arrow in this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self, collection_id: int, *, at: int | None, confirmed: Mapping[str, int]) -> ArrowRows:
        return ArrowRows(read_arrow(self._settings, collection_id, at=at, confirmed=confirmed, with_ticks=True))


class ArrowRows:
    """Rows in memory."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def digest(self, names: list[str]) -> ContentDigest:
        rows = self._rows.select(names)
        if rows.num_rows == 0:
            return ContentDigest(0, 0, 0)
        columns = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
        with duckdb.connect() as db:
            db.register("chosen", rows)
            [(first, second)] = db.execute(
                f"select sum(hash({columns})::hugeint), sum(hash({columns}, 1)::hugeint) from chosen"
            ).fetchall()
        return ContentDigest(rows.num_rows, int(first), int(second))

    def chunks(self, count: int, key: Sequence[str], names: list[str]) -> Iterator[pa.Table]:
        size = max(1, -(-self._rows.num_rows // count))
        for start in range(0, self._rows.num_rows, size):
            yield self._rows.select(names).slice(start, size)

    def of_vchannel(self, vchannel: str) -> ArrowRows:
        return ArrowRows(self._rows.filter(pc.equal(self._rows["_vchannel"], vchannel)))

    def release(self) -> None:
        """Do nothing: the rows are freed with their owner."""
