"""Slices of a range, and the table that records when each slice was rebuilt, from what and with what result.

Slices are cut on one grid (multiples of their width since 1970). Overlapping ranges therefore share their inner slices,
and two slices never share a day if the width is a multiple of a day.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.operations.backfill.derived import SLICES, DerivedTable, derived_uri
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import create_table, open_table

MAX_SLICES: Final = 1000
"""Slices of one run. Airflow maps a task over at most 1,024."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

SLICE_RECORD_COLUMNS: Final = pa.schema(
    [
        pa.field("table", pa.utf8(), nullable=False),
        pa.field("start", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("end", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("at_tick", pa.int64(), nullable=False),  # of the source
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("digest", pa.utf8(), nullable=False),  # of the rows, independent of their order
        pa.field("definition", pa.int32(), nullable=False),  # DerivedTable.version
        pa.field("delta_version", pa.int64(), nullable=False),  # version of the derived table that first had these rows
        pa.field("run_id", pa.utf8(), nullable=False),
        pa.field("written_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""Columns of ``derived/slices``, partitioned by table.

The row of a slice with the greatest `delta_version` is valid.
"""


class TimeSlice(NamedTuple):
    """A stretch [start, end) of event time."""

    start: datetime
    end: datetime

    @property
    def whole_days(self) -> bool:
        """Whether the slice begins and ends at midnight UTC."""
        return all((moment - EPOCH) % timedelta(days=1) == timedelta(0) for moment in self)

    def __str__(self) -> str:
        return f"[{self.start:%Y-%m-%dT%H:%MZ}, {self.end:%Y-%m-%dT%H:%MZ})"


def cut_range(start: datetime, end: datetime, *, hours: int, table: DerivedTable) -> list[TimeSlice]:
    """Cut [start, end) into slices of `hours` on the grid. The first and the last may be shorter.

    Raises InvalidArgument if a bound is not a multiple of the table's grain, or if there are too many slices.
    """
    start, end = start.astimezone(UTC), end.astimezone(UTC)
    grain, width = timedelta(hours=table.grain_hours), timedelta(hours=hours)
    for moment in (start, end):
        if (moment - EPOCH) % grain:
            raise InvalidArgument(
                f"{moment.isoformat()} is not a whole {table.grain} in UTC: {table.name} is rebuilt in whole "
                f"{table.grain}s"
            )
    check_width(hours, table)
    if (end - start) / width > MAX_SLICES:
        raise InvalidArgument(
            f"the range has {(end - start) / width:,.0f} slices, more than {MAX_SLICES:,}: give a shorter range or "
            "wider slices"
        )
    found = []
    while start < end:
        stop = min(end, start - (start - EPOCH) % width + width)
        found.append(TimeSlice(start, stop))
        start = stop
    return found


def check_width(hours: int, table: DerivedTable) -> None:
    """Raise InvalidArgument if slices of `hours` are not a multiple of the table's grain."""
    if hours % table.grain_hours:
        raise InvalidArgument(f"slices of {hours} h: slices of {table.name} must be whole {table.grain}s")


def slices_uri(settings: Settings) -> str:
    """Return the URI of the table of slices."""
    return derived_uri(settings, SLICES)


def recorded_slices(settings: Settings, *, table: str | None = None, run_id: str | None = None) -> pa.Table:
    """Return the recorded slices in the order of their commits, of one table or one run if given."""
    path = slices_uri(settings)
    handle = open_table(path)
    if handle is None:
        return SLICE_RECORD_COLUMNS.empty_table()
    filters: Any = pc.scalar(True)
    if table is not None:
        filters &= pc.field("table") == table
    if run_id is not None:
        filters &= pc.field("run_id") == run_id
    rows = handle.dataset().to_table(filter=filters, columns=SLICE_RECORD_COLUMNS.names)
    return rows.sort_by([("delta_version", "ascending"), ("written_at", "ascending")]).cast(SLICE_RECORD_COLUMNS)


def record_slices(settings: Settings, rows: Sequence[dict[str, Any]]) -> None:
    """Append `rows` (without ``written_at``) to the table of slices."""
    path = slices_uri(settings)
    table = create_table(path, SLICE_RECORD_COLUMNS, partition_by=["table"])
    now = datetime.now(UTC)
    sink = FileSink(table.store, SLICE_RECORD_COLUMNS.remove(SLICE_RECORD_COLUMNS.get_field_index("table")), ())
    for name, each in itertools.groupby(sorted(rows, key=itemgetter("table")), key=itemgetter("table")):
        sink.write(pa.Table.from_pylist([{**row, "written_at": now} for row in each], sink.schema), {"table": name})
    commit_fenced(table, [CommitPart(sink.finish())]).raise_if_fenced()
