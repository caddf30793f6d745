"""One Parquet file of a Delta table: read with checksums, written durably.

When :meth:`ParquetFileWriter.close` returns, the file's bytes, its name and the folders above are durable, and the
:class:`FileAction` describes it. The caller chooses a name that no other attempt uses, and commits the file. An
existing file
is never overwritten.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pyarrow.parquet as pq

from millrace.base.errors import FileReplaced, TableDamaged, TableUnavailable
from millrace.storage.store import StoreUnreachable, TableStore

MAX_STAT_CHARACTERS: Final = 64
"""Longer strings have their first CUT_STAT_CHARACTERS as bounds, the upper one with a greater character after them."""
CUT_STAT_CHARACTERS: Final = 32
MAX_STAT_COLUMNS: Final = 32
"""Columns with statistics, as many as Delta's other writers have by default."""
_WITHOUT_NAN: Final = "millrace.withoutNaN"
"""Key of a footer's metadata: the columns of floats, as JSON, that have no NaN."""
_GREATEST: Final = "\x7f"
"""The character after a cut maximum. It is greater than the one that it replaces in every order of strings: by code
points, by bytes and by UTF-16 units.
"""
_MOMENT: Final = pa.timestamp("us", tz="UTC")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

ROW_GROUP_ROWS: Final = 1 << 15
"""Rows of a row group. A lookup decodes half of one; scans cost the same with row groups of 2^14 to 2^17 rows."""
SAMPLE_ROWS: Final = 1 << 13
"""Rows of a new file that are encoded twice, to choose how its columns are stored. Files with fewer rows are not worth
it."""
_SAMPLE_BYTES: Final = 4 << 20
_COMPRESSED_SHARE: Final = 2 / 3
"""A column that compression does not make smaller than this share is stored without: to decompress it takes DuckDB
longer than the rest of its decoding."""
_DISTINCT_SHARE: Final = 0.5
"""A column with a larger share of distinct values is stored without a dictionary, which readers would decode for each
row group."""
TAKE_BATCH_ROWS: Final = 1 << 14
"""Rows that are decoded at once to take some of them."""

_MASKED_FILES: Final = 32
"""Files with hidden rows that are scanned at once."""
_MATCHES: Final = "_matches"
"""Column of a scan alone: whether a row matches the filter."""

RowGroupFilter: TypeAlias = Callable[[pq.FileMetaData], Sequence[int]]
"""Returns the row groups to read, from a file's footer."""

REPAIR_HINT: Final = "run the operation recovery (mode repair), which rebuilds it"
_CHECKED: Final = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)


@contextmanager
def translate_read_errors(store: TableStore, name: str = "", *, others: Sequence[TableStore] = ()) -> Iterator[None]:
    """Raise TableDamaged inside for files of a table (or its file `name`) that are missing or unreadable.

    Raises TableUnavailable if the store does not answer.

    Raises FileReplaced if the newest versions of the table, and of the `others` that are read with it, have all their
    files.
    """
    what = f"{store.uri}/{name}" if name else store.uri
    try:
        yield
    except TableDamaged:
        raise
    except StoreUnreachable as error:
        raise TableUnavailable(f"cannot reach {what} ({error}): retry") from error
    except FileNotFoundError as error:
        if _is_whole(store) and all(_is_whole(each) for each in others if each.exists()):
            raise FileReplaced(
                f"a file of {what} is gone: a later commit replaced it, more than file_retention ago. Read again; raise"
                " that setting for readers that take longer",
                missing=True,
            ) from error
        raise TableDamaged(
            f"a file of {what} is missing: {error.filename or error}: {REPAIR_HINT}", missing=True
        ) from error
    # the last two come from names in a corrupt footer
    except (pa.ArrowException, OSError, LookupError, UnicodeError) as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None):
            raise
        raise TableDamaged(f"cannot read {what} ({error}): {REPAIR_HINT}") from error


def _is_whole(store: TableStore) -> bool:
    """Return whether the table exists, and its newest version has all of its files."""
    from deltalake.exceptions import DeltaError

    try:
        files = store.delta().get_add_actions()["path"].to_pylist()
    except (DeltaError, OSError):
        return False
    return all(store.size(unquote(name)) is not None for name in files)


@contextmanager
def open_file(
    store: TableStore, name: str, *, read_dictionary: Sequence[str] | None = None
) -> Iterator[pq.ParquetFile]:
    """Open the file `name` of a table for reading. Verifies page checksums. Raises TableDamaged.

    Those of `read_dictionary` that the file has are read as dictionaries.
    """
    with translate_read_errors(store, name), _opened(store, name, list(read_dictionary or ())) as file:
        yield file


def _opened(store: TableStore, name: str, read_dictionary: list[str]) -> pq.ParquetFile:
    while True:
        try:
            return pq.ParquetFile(
                name, filesystem=store.filesystem, read_dictionary=read_dictionary, page_checksum_verification=True
            )
        except KeyError as error:
            # An earlier build wrote the file, without the column. The names are looked up here alone: to look at the
            # footer first would read it twice in each file.
            absent = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error.args[0])
            if absent not in read_dictionary:
                raise
            read_dictionary = [each for each in read_dictionary if each != absent]


def read_file(store: TableStore, name: str) -> pa.Table:
    """Return all rows of the file `name` of a table. Raises TableDamaged."""
    with open_file(store, name) as file:
        return file.read()


def take_rows(
    store: TableStore, name: str, positions: npt.NDArray[np.int64], *, columns: Sequence[str]
) -> tuple[pa.Table, int]:
    """Return the rows at `positions` (ascending) of the file `name` of a table, and the number of rows that were read.

    Decodes of each row group that has some of them its rows up to the last one, in batches of at most TAKE_BATCH_ROWS.
    The result has those of `columns` that the file has. Raises TableDamaged.
    """
    with open_file(store, name) as file:
        footer = file.metadata
        counts = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        ends = np.cumsum(np.array(counts, dtype=np.int64))
        if len(positions) and (not len(ends) or positions[-1] >= ends[-1]):
            raise TableDamaged(
                f"{store.uri}/{name} has {footer.num_rows} rows, and no row {positions[-1]}: {REPAIR_HINT}"
            )
        there = [each for each in columns if each in file.schema_arrow.names]
        parts: list[pa.RecordBatch] = []
        read = 0
        owner = np.searchsorted(ends, positions, "right")
        for group in np.unique(owner).tolist():
            wanted = positions[owner == group] - (ends[group] - counts[group])
            begin, needed = 0, int(wanted[-1]) + 1
            size = -(-needed // -(-needed // TAKE_BATCH_ROWS))  # so that the last batch ends with the last row
            for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=there):
                first, last = np.searchsorted(wanted, [begin, begin + batch.num_rows])
                if last > first:
                    parts.append(batch.take(pa.array(wanted[first:last] - begin)))
                begin += batch.num_rows
                if last == len(wanted):
                    break
            read += begin
        schema = pa.schema([file.schema_arrow.field(each) for each in there])
        return pa.Table.from_batches(parts, schema if not parts else parts[0].schema), read


def dataset(
    store: TableStore,
    names: Iterable[str],
    schema: pa.Schema,
    *,
    partitioning: ds.Partitioning | None = None,
    groups: RowGroupFilter | None = None,
) -> ds.Dataset:
    """Return the rows of files of a table as a dataset with the columns of `schema`. Verifies page checksums.

    `groups` chooses the row groups to read from each footer.
    """
    if groups is not None:
        found = _filtered_dataset(store, names, schema, groups)
    else:
        found = ds.dataset(
            list(names), filesystem=store.filesystem, schema=schema, format=_CHECKED, partitioning=partitioning
        )
    return ObjectDataset.of(found) if isinstance(store.filesystem, fs.PyFileSystem) else found


class ObjectDataset(ds.FileSystemDataset):  # type: ignore[misc] # pyarrow has no types
    """Files behind a file system in Python, for engines that scan a dataset by themselves, such as DuckDB."""

    @classmethod
    def of(cls, files: ds.FileSystemDataset) -> ObjectDataset:
        """Return a dataset of the same files."""
        return cls(list(files.get_fragments()), files.schema, files.format, files.filesystem)

    def scanner(self, *arguments: Any, **options: Any) -> ObjectScanner:
        """Return a scanner with pyarrow's options."""
        return ObjectScanner(super().scanner(*arguments, **options))


class ObjectScanner:
    """pyarrow's scanner, with a reader that cannot deadlock.

    ``Scanner.to_reader`` holds the GIL while it waits for a lock of the scan. The thread that has the lock may be
    opening a file, for which it needs the GIL (pyarrow 26).
    """

    def __init__(self, scanner: ds.Scanner) -> None:
        self._scanner = scanner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scanner, name)

    def to_reader(self) -> pa.RecordBatchReader:
        """Stream the rows."""
        return pa.RecordBatchReader.from_batches(self._scanner.projected_schema, self._scanner.to_batches())


def _filtered_dataset(store: TableStore, names: Iterable[str], schema: pa.Schema, groups: RowGroupFilter) -> ds.Dataset:
    selected = []
    for name in names:
        fragment = _CHECKED.make_fragment(name, store.filesystem)
        numbers = groups(fragment.metadata)
        if len(numbers) == fragment.metadata.num_row_groups:
            selected.append(fragment)
        elif numbers:
            selected.append(fragment.subset(row_group_ids=numbers))
    return ds.FileSystemDataset(selected, schema, _CHECKED, store.filesystem)


def read_rows(
    store: TableStore,
    names: Iterable[str],
    schema: pa.Schema,
    *,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
    groups: RowGroupFilter | None = None,
) -> pa.Table:
    """Return rows of files of a table: `columns` of `schema`, filtered by `where`, from the row groups that `groups`
    chooses.

    Raises TableDamaged.
    """
    wanted = list(names)
    if not wanted:
        return schema.empty_table() if columns is None else schema.empty_table().select(list(columns))
    with translate_read_errors(store):
        return dataset(store, wanted, schema, groups=groups).to_table(columns=columns, filter=where)


def read_filtered(
    store: TableStore,
    names: Iterable[str],
    schema: pa.Schema,
    *,
    columns: Sequence[str],
    filter_columns: Sequence[str],
    keep: Callable[[pa.Table], npt.NDArray[np.bool_]],
) -> pa.Table:
    """Return the rows that `kept` accepts, with `columns` and `looked_at`, from files of a table.

    `kept` gets the columns `looked_at` alone and returns a mask of shape ``(rows,)``. The other columns of a row group
    are read only if a row of it is accepted. Raises TableDamaged.
    """
    with translate_read_errors(store):
        fragments = [_CHECKED.make_fragment(name, store.filesystem) for name in names]
        first = ds.FileSystemDataset(fragments, schema, _CHECKED, store.filesystem).to_table(
            columns=list(filter_columns)
        )
        wanted = keep(first)
        others = [name for name in columns if name not in filter_columns]
        if not others:
            return first.filter(pa.array(wanted))
        taken, there, at = [], np.zeros(len(wanted), dtype=bool), 0
        for fragment in fragments:
            numbers = []
            for group in range(fragment.metadata.num_row_groups):
                stop = at + fragment.metadata.row_group(group).num_rows
                if wanted[at:stop].any():
                    numbers.append(group)
                    there[at:stop] = True
                at = stop
            if len(numbers) == fragment.metadata.num_row_groups:
                taken.append(fragment)
            elif numbers:
                taken.append(fragment.subset(row_group_ids=numbers))
        rest = ds.FileSystemDataset(taken, schema, _CHECKED, store.filesystem).to_table(columns=others)
    if not there.all():
        first, wanted = first.filter(pa.array(there)), wanted[there]
    for name, values in zip(others, rest.columns, strict=True):
        first = first.append_column(rest.schema.field(name), values)
    return first.filter(pa.array(wanted))


def scan_rows(
    store: TableStore,
    names: Iterable[str],
    schema: pa.Schema,
    *,
    columns: Sequence[str],
    where: pc.Expression | None,
    batch_rows: int,
    groups: RowGroupFilter | None = None,
    hidden: Mapping[str, npt.NDArray[np.int64]] = MappingProxyType({}),
) -> Iterator[pa.RecordBatch]:
    """Yield rows as :func:`read_rows` does, batch by batch, except those at the `hidden` positions (ascending) of a
    file.

    Files without hidden rows come first. Memory: the row groups of two files, which our writers end at 64 MiB, and some
    batches. Raises TableDamaged.
    """
    files = list(names)
    whole = [name for name in files if not len(hidden.get(name, ()))]
    masked = [name for name in files if len(hidden.get(name, ()))]
    with translate_read_errors(store):
        if whole:
            found = dataset(store, whole, schema, groups=groups)
            yield from _batches(found, list(columns), where, batch_rows)
        for start in range(0, len(masked), _MASKED_FILES):
            part = {name: hidden[name] for name in masked[start : start + _MASKED_FILES]}
            yield from _shown(store, part, schema, columns, where, batch_rows, groups)


def _batches(
    found: ds.Dataset,
    columns: Sequence[str] | Mapping[str, pc.Expression],
    where: pc.Expression | None,
    batch_rows: int,
) -> Iterator[pa.RecordBatch]:
    scanner = found.scanner(
        columns=columns, filter=where, batch_size=batch_rows, batch_readahead=4, fragment_readahead=2
    )
    yield from scanner.to_batches()


def _shown(
    store: TableStore,
    hidden: Mapping[str, npt.NDArray[np.int64]],
    schema: pa.Schema,
    columns: Sequence[str],
    where: pc.Expression | None,
    batch_rows: int,
    groups: RowGroupFilter | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files that are not hidden and match `where`.

    Positions count before any filter, so `where` chooses row groups, and then rows of what was read.
    """
    fragments: list[ds.ParquetFileFragment] = []
    places: list[npt.NDArray[np.int64]] = []
    total = 0
    for name, positions in hidden.items():
        fragment = _CHECKED.make_fragment(name, store.filesystem)
        footer = fragment.metadata
        wanted = set(range(footer.num_row_groups) if groups is None else groups(footer))
        if where is not None:
            wanted &= {each.id for each in fragment.subset(filter=where, schema=schema).row_groups}
        group_ids, first = [], 0
        for number in range(footer.num_row_groups):
            rows = footer.row_group(number).num_rows
            low, high = np.searchsorted(positions, [first, first + rows])
            if number in wanted and high - low < rows:
                group_ids.append(number)
                places.append(positions[low:high] - first + total)
                total += rows
            first += rows
        if group_ids:
            fragments.append(fragment.subset(row_group_ids=group_ids))
    if not fragments:
        return
    gone = np.concatenate(places)
    at = 0
    found = ds.FileSystemDataset(fragments, schema, _CHECKED, store.filesystem)
    taken = {name: pc.field(name) for name in columns} | ({} if where is None else {_MATCHES: where})
    for batch in _batches(found, taken, None, batch_rows):
        low, high = np.searchsorted(gone, [at, at + batch.num_rows])
        keep = np.ones(batch.num_rows, dtype=bool)
        keep[gone[low:high] - at] = False
        at += batch.num_rows
        wanted = pa.array(keep) if where is None else pc.and_(batch[_MATCHES], pa.array(keep))
        yield batch.select(list(columns)).filter(wanted)
    if at != total:
        raise TableDamaged(f"files of {store.uri} have {at} rows where their footers say {total}: {REPAIR_HINT}")


def storage_options(rows: pa.Table, *, compression: str) -> dict[str, Any]:
    """Return options of :class:`ParquetFileWriter` for a file that begins with `rows`: the columns that `compression`
    is for, and those that have a dictionary.

    Encodes a sample of `rows`, in memory. With fewer than SAMPLE_ROWS rows, all columns are compressed.
    """
    if rows.num_rows < SAMPLE_ROWS:
        return {"compression": compression}
    sample = rows.slice(0, max(1, min(SAMPLE_ROWS, _SAMPLE_BYTES * rows.num_rows // max(rows.nbytes, 1))))
    chosen: dict[str, Any] = {"compression": compression, "use_dictionary": _repeating(sample)}
    group = _encoded(sample, **chosen).row_group(0)
    leaves = [group.column(number) for number in range(group.num_columns)]
    smaller = [each for each in leaves if each.total_compressed_size < _COMPRESSED_SHARE * each.total_uncompressed_size]
    return chosen | {"compression": dict.fromkeys([each.path_in_schema for each in smaller], compression)}


def _encoded(rows: pa.Table, **options: Any) -> pq.FileMetaData:
    """Return the footer of a file in memory with `rows`."""
    target = pa.BufferOutputStream()
    with pq.ParquetWriter(target, rows.schema, store_schema=False, **options) as writer:
        writer.write(rows)
    return pq.read_metadata(pa.BufferReader(target.getvalue()))


def _repeating(sample: pa.Table) -> list[str]:
    """Return the Parquet columns whose values repeat. Those of nested columns all count as such."""
    distinct = {
        field.name
        for field in sample.schema
        if not pa.types.is_nested(field.type) and len(pc.unique(sample[field.name])) > _DISTINCT_SHARE * sample.num_rows
    }
    schema = _encoded(sample.slice(0, 0)).schema
    return [path for path in (schema.column(number).path for number in range(len(schema))) if path not in distinct]


@dataclass(frozen=True, slots=True)
class FileAction:
    """One durable Parquet file that waits for its commit."""

    path: str
    """Relative to the table."""
    size: int
    rows: int
    partition: dict[str, str]
    stats: str
    """Bounds for pruning, in Delta's form."""
    written_ms: int


class ParquetFileWriter:
    """Writes a new file of the table in `store`, with rows of `schema` and `options` of pyarrow's ParquetWriter."""

    def __init__(self, store: TableStore, name: str, schema: pa.Schema, *, options: Mapping[str, Any]) -> None:
        self.name = name
        self._store = store
        self._sink = store.put(name)
        self._footers: list[pq.FileMetaData] = []
        self._whole = [field.name for field in schema if pa.types.is_floating(field.type)]
        """Columns of floats without a NaN so far: a footer's bounds leave it out, and engines order it differently."""
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            store_schema=False,
            metadata_collector=self._footers,
            **{"write_page_checksum": True, **options},
        )

    def write(self, rows: pa.Table | pa.RecordBatch, *, row_group_size: int = ROW_GROUP_ROWS) -> None:
        """Add rows as row groups of their own, of at most `row_group_size` rows each."""
        self._writer.write(rows, row_group_size)
        self._whole = [name for name in self._whole if not pc.any(pc.is_nan(rows[name])).as_py()]

    def close(self, partition: Mapping[str, str], stats_columns: Sequence[str]) -> FileAction:
        """Close the file and make it and its name durable. Returns its action in `partition`, with bounds of
        `stats_columns`.
        """
        if self._whole:
            self._writer.add_key_value_metadata({_WITHOUT_NAN: json.dumps(self._whole)})
        self._writer.close()
        size = self._sink.sync()
        self._sink.close()
        (footer,) = self._footers
        now = time.time_ns() // 1_000_000
        stats = file_statistics(footer, stats_columns)
        return FileAction(self.name, size, footer.num_rows, dict(partition), stats, now)

    def discard(self) -> None:
        """Delete the file."""
        # The original failure (a full disk) also fails the close. Delete the file in any case.
        for stream in (self._writer, self._sink):
            with suppress(OSError, pa.ArrowException, RuntimeError):
                stream.close()
        self._store.delete([self.name])


def _milliseconds(microseconds: int, *, up: bool) -> str:
    """Return a timestamp as Delta's statistics have it, rounded up or down to a millisecond. Raises OverflowError."""
    whole = -(-microseconds // 1000) if up else microseconds // 1000
    found = _EPOCH + timedelta(milliseconds=whole)
    return found.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def file_statistics(footer: pq.FileMetaData, columns: Sequence[str]) -> str:
    """Return the Delta statistics of a file: row count, and min, max and nulls of `columns`, of the first
    MAX_STAT_COLUMNS and as far as the footer has them. Nested and binary columns have none.

    A filter by them hides no row. Floats have bounds if the footer says that none is NaN, as those of
    :class:`ParquetFileWriter` do. If a bound is no value of the file, ``tightBounds`` is false.
    """
    columns, tight = columns[:MAX_STAT_COLUMNS], True
    whole = json.loads((footer.metadata or {}).get(_WITHOUT_NAN.encode(), b"[]"))
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    place = 0
    for field in footer.schema.to_arrow_schema():
        first, place = place, place + _leaves(field.type)
        if field.name not in columns or pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
            continue
        groups = [footer.row_group(group).column(first).statistics for group in range(footer.num_row_groups)]
        if not groups or any(group is None for group in groups):
            continue
        if all(group.has_null_count for group in groups):
            nulls[field.name] = sum(group.null_count for group in groups)
        valued = [group for group in groups if group.num_values or not group.has_null_count]
        judged = field.name in whole or not pa.types.is_floating(field.type)
        if valued and judged and all(group.has_min_max for group in valued):
            bounds = _bounds(field.type, valued)
            if bounds is not None:
                least[field.name], most[field.name], exact = bounds
                tight = tight and exact
    found: dict[str, Any] = {"numRecords": footer.num_rows}
    found |= {"minValues": least, "maxValues": most, "nullCount": nulls} | ({} if tight else {"tightBounds": False})
    return json.dumps(found, ensure_ascii=False)  # delta-rs (1.6) misreads escaped surrogate pairs


def _leaves(kind: pa.DataType) -> int:
    """Return the number of Parquet columns that hold a column of this type."""
    if pa.types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if pa.types.is_struct(kind):
        return sum(_leaves(kind.field(place).type) for place in range(kind.num_fields))
    return _leaves(kind.value_type) if pa.types.is_nested(kind) else 1


def _bounds(kind: pa.DataType, groups: Sequence[pq.Statistics]) -> tuple[Any, Any, bool] | None:
    """Return the bounds of a column as Delta's JSON has them, and whether they are exact; None if readers could
    misjudge them.

    Readers disagree on timestamps without a zone, and decimals lose digits as JSON numbers.
    """
    try:
        if kind == _MOMENT:
            least, greatest = min(group.min_raw for group in groups), max(group.max_raw for group in groups)
            exact = least % 1000 == greatest % 1000 == 0
            return _milliseconds(least, up=False), _milliseconds(greatest, up=True), exact
        low, high = min(group.min for group in groups), max(group.max for group in groups)
    except OverflowError:  # a date or timestamp outside Python's range
        return None
    if pa.types.is_date32(kind):
        return low.isoformat(), high.isoformat(), True
    if pa.types.is_integer(kind) or (pa.types.is_floating(kind) and math.isfinite(low) and math.isfinite(high)):
        return low, high, True
    if not pa.types.is_string(kind):
        return None
    first = low if len(low) <= MAX_STAT_CHARACTERS else low[:CUT_STAT_CHARACTERS]
    last = high if len(high) <= MAX_STAT_CHARACTERS else _cut_maximum(high)
    return None if last is None else (first, last, (first, last) == (low, high))


def _cut_maximum(text: str) -> str | None:
    """Return a short text that is greater than a long one in every order of strings; None if there is none."""
    for length in range(CUT_STAT_CHARACTERS, 0, -1):
        if text[length] < _GREATEST:
            return text[:length] + _GREATEST
    return None
