"""Search in the WAL, newest first: rejections, ended transactions, and one message by id. Uses one pinned version.

Files are selected by partition (kind, PChannel, date) and by the tick statistics of the Delta log, and read newest
first, without payloads, in bounded batches. A search ends when no remaining file can hold a row of the page, or at its
limit of rows; it then says so and where to continue. The cost depends on the page, not on the size of the WAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import reduce
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.base.errors import InvalidArgument
from millrace.observe.table_cache import TableSnapshot
from millrace.wal.schema import RowKind, complete_rows

MAX_ROWS_SCANNED: Final = 4_000_000
"""Rows that one search scans before it returns what it has."""
BATCH_ROWS: Final = 65_536
MAX_LIMIT: Final = 200
MAX_TICK: Final = (1 << 63) - 1

COLUMNS: Final = (
    *("time_tick", "ledger", "entry", "index", "ordinal", "physical_ms", "type", "vchannel", "term"),
    *("lc_ledger", "lc_entry", "lc_index", "lc_ordinal", "collection_id", "partition_id", "segment_id"),
    *("schema_version", "rows", "txn_id", "producer_id", "epoch", "sequence", "reason", "detail"),
    "principal",
)
"""Columns that a search reads: everything but the payload."""

_KEY: Final = ("time_tick", "pchannel", "ledger", "entry", "index", "ordinal")


class Cursor(NamedTuple):
    """A position in the order of a search. Rows that compare less come after it."""

    time_tick: int
    pchannel: str
    ledger: int
    entry: int
    index: int  # type: ignore[assignment]  # the field's name; tuple.index is not used on cursors
    ordinal: int

    def __str__(self) -> str:
        return "~".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of ``str``. Raises InvalidArgument."""
        parts = text.split("~")
        numbers = [parts[0], *parts[2:]]
        if len(parts) != 6 or not all(each.isascii() and each.isdigit() and len(each) <= 19 for each in numbers):
            raise InvalidArgument("`before` must be the `next` of an earlier answer, or absent")
        found = cls(int(parts[0]), parts[1], *map(int, parts[2:]))
        if max(found.time_tick, *found[2:]) > MAX_TICK:
            raise InvalidArgument("`before` must be the `next` of an earlier answer, or absent")
        return found


@dataclass(frozen=True)
class WalQuery:
    """A search. Times are Unix milliseconds of the log's append stamp."""

    kind: RowKind
    pchannel: str = ""
    vchannel: str = ""
    reason: str = ""
    principal: str = ""
    """Principal that appended it, as rows of the WAL have it: ``NAME``, or ``asserted:NAME``."""
    types: tuple[str, ...] = ()
    collection_id: int | None = None
    producer_id: int | None = None
    txn_id: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None


@dataclass
class SearchResult:
    """A page of rows, newest first, and where the search continues."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    next: Cursor | None = None
    complete: bool = True
    files: int = 0
    """Number of files opened."""


class _File(NamedTuple):
    last_tick: int
    path: str
    pchannel: str


def search_wal(
    pinned: TableSnapshot, query: WalQuery, *, limit: int, before: Cursor | None = None, bound: int = MAX_ROWS_SCANNED
) -> SearchResult:
    """Return the `limit` newest rows that match `query`, after the cursor `before`. Raises InvalidArgument."""
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidArgument(f"a page has 1 to {MAX_LIMIT} rows, not {limit}")
    files = _files(pinned, query, before)
    found, looked = SearchResult(), 0
    page: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for file in files:
        if len(page) == limit and page[-1][0][0] > file.last_tick:
            break
        onward = Cursor(min(file.last_tick + 1, MAX_TICK), "", 0, 0, 0, 0)
        if looked >= bound and (before is None or onward < before):
            # Rows of the remaining files may precede rows already found at the same ticks, so drop those.
            found.complete = False
            page = [each for each in page if each[0][0] > file.last_tick]
            found.next = onward
            break
        found.files += 1
        for part in _batches(pinned, file):
            looked += part.num_rows
            part = _matching(part, file.pchannel, query, before)
            if part.num_rows:
                page = sorted([*page, *_top(part, file.pchannel, limit)], key=lambda each: each[0], reverse=True)[
                    :limit
                ]
    found.rows = [row for _, row in page]
    if found.complete and len(page) == limit:
        found.next = Cursor(*page[-1][0])
    return found


def _files(pinned: TableSnapshot, query: WalQuery, before: Cursor | None) -> list[_File]:
    """Return the files that may hold matching rows, newest ticks first."""
    columns = (
        pinned.column("path"),
        pinned.column("partition.kind"),
        pinned.column("partition.pchannel"),
        pinned.column("partition.date"),
        pinned.column("min.time_tick"),
        pinned.column("max.time_tick"),
    )
    first, last = _day(query.since_ms), _day(query.until_ms)
    found = []
    for path, kind, pchannel, day, low, high in zip(*columns, strict=True):
        if kind != query.kind or (query.pchannel and pchannel != query.pchannel):
            continue
        if (first is not None and str(day) < first) or (last is not None and str(day) > last):
            continue
        if before is not None and low is not None and low > before.time_tick:
            continue
        # A message's tick is never before its stamp, so the file's last tick decides. A rejection's tick may be.
        if query.kind == "message" and query.since_ms is not None and high is not None and high >> 18 < query.since_ms:
            continue
        found.append(_File(MAX_TICK if high is None else high, path, pchannel))
    return sorted(found, reverse=True)


def _day(ms: int | None) -> str | None:
    """Return the UTC day of a time, or None. Raises InvalidArgument for a time outside of the calendar."""
    if ms is None:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        raise InvalidArgument("a time must lie between the years 1 and 9999") from None


def _batches(pinned: TableSnapshot, file: _File) -> Iterator[pa.Table]:
    """Yield a file's rows without payloads, last row group first."""
    with pinned.opened(file.path, read_dictionary=["type", "vchannel", "reason", "principal"]) as parquet:
        for group in reversed(range(parquet.num_row_groups)):
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=list(COLUMNS)):
                yield complete_rows(pa.Table.from_batches([batch]), COLUMNS)


def _matching(rows: pa.Table, pchannel: str, query: WalQuery, before: Cursor | None) -> pa.Table:
    masks: list[Any] = []
    for column, value in (
        ("collection_id", query.collection_id),
        ("producer_id", query.producer_id),
        ("txn_id", query.txn_id),
    ):
        if value is not None:
            masks.append(pc.equal(rows[column], value))
    for column, text in (("vchannel", query.vchannel), ("reason", query.reason), ("principal", query.principal)):
        if text:
            masks.append(pc.fill_null(pc.equal(rows[column].cast(pa.utf8()), text), False))
    if query.types:
        masks.append(pc.is_in(rows["type"].cast(pa.utf8()), pa.array(query.types, pa.utf8())))
    if query.since_ms is not None:
        masks.append(pc.greater_equal(rows["physical_ms"], query.since_ms))
    if query.until_ms is not None:
        masks.append(pc.less_equal(rows["physical_ms"], query.until_ms))
    if before is not None:
        masks.append(pa.array(_below(rows, pchannel, before)))
    return rows.filter(reduce(pc.and_, masks)) if masks else rows


def _below(rows: pa.Table, pchannel: str, before: Cursor) -> Any:
    """Return which rows come after `before` in the search order."""
    below = np.zeros(rows.num_rows, dtype=bool)
    equal = np.ones(rows.num_rows, dtype=bool)
    for name, bound in zip(_KEY, before, strict=True):
        if name == "pchannel":
            below |= equal & (pchannel < before.pchannel)
            equal &= pchannel == before.pchannel
            continue
        values = rows[name].to_numpy()
        below |= equal & (values < bound)
        equal &= values == bound
    return below


def _top(rows: pa.Table, pchannel: str, limit: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the newest rows of a batch with their sort keys."""
    keys = [name for name in _KEY if name != "pchannel"]
    rows = rows.sort_by([(name, "descending") for name in keys]).slice(0, limit)
    return [
        (
            (row["time_tick"], pchannel, row["ledger"], row["entry"], row["index"], row["ordinal"]),
            row | {"pchannel": pchannel},
        )
        for row in rows.to_pylist()
    ]


def find_message(
    pinned: TableSnapshot, pchannel: str, ids: Sequence[int], *, kind: RowKind | None = None
) -> tuple[dict[str, Any], RowKind] | None:
    """Return the row of one message id with its payload, and its kind, or None if the WAL has none (of that kind).

    Opens only files whose ids span it, and of these reads only the row groups that do.
    """
    ledger, entry, index, ordinal = ids
    columns = [
        pinned.column(name)
        for name in (
            *("path", "partition.kind", "partition.pchannel"),
            *("min.ledger", "max.ledger", "min.entry", "max.entry"),
        )
    ]
    for path, found_kind, channel, *bounds in zip(*columns, strict=True):
        if channel != pchannel or found_kind not in ((kind,) if kind else ("message", "rejection")):
            continue
        if None not in bounds and not (
            bounds[0] <= ledger <= bounds[1] and (bounds[0] < bounds[1] or bounds[2] <= entry <= bounds[3])
        ):
            continue
        row = _row_of(pinned, path, lambda rows: _is(rows, ledger, entry, index, ordinal))
        if row is not None:
            return row | {"pchannel": channel}, found_kind
    return None


def _is(rows: pa.Table, ledger: int, entry: int, index: int, ordinal: int) -> Any:
    wanted = np.ones(rows.num_rows, dtype=bool)
    for name, value in (("ledger", ledger), ("entry", entry), ("index", index), ("ordinal", ordinal)):
        wanted &= rows[name].to_numpy() == value
    return wanted


def _row_of(pinned: TableSnapshot, path: str, wanted: Callable[[pa.Table], Any]) -> dict[str, Any] | None:
    with pinned.opened(path) as parquet:
        for group in range(parquet.num_row_groups):
            ids = parquet.read_row_group(group, columns=["ledger", "entry", "index", "ordinal"])
            places = np.flatnonzero(wanted(ids))
            if len(places):
                return _payload_row(parquet, group, int(places[0]))
    return None


def _payload_row(parquet: pq.ParquetFile, group: int, place: int) -> dict[str, Any]:
    """Return one row of a row group with its payload.

    Reads in batches, so that neighbouring payloads do not accumulate.
    """
    for batch in parquet.iter_batches(batch_size=64, row_groups=[group]):
        if place < batch.num_rows:
            row: dict[str, Any] = batch.slice(place, 1).to_pylist()[0]
            return row
        place -= batch.num_rows
    raise AssertionError("the row group ends before the requested row")
