"""A collection at one tick as a pyarrow dataset, into which DuckDB, Polars and others push columns and filters.

Repeated queries return the same rows, with deletes applied. Each query reads only what it asks for (docs/clients.md).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from millrace.base.errors import InvalidArgument
from millrace.base.extras import import_optional

if TYPE_CHECKING:
    import duckdb

ScanFunction = Callable[[Sequence[str], pc.Expression | None], pa.RecordBatchReader]
"""(columns, at least one; filter) -> the rows, batch by batch."""


class CollectionDataset(ds.InMemoryDataset):  # type: ignore[misc]  # pyarrow has no types for it
    """Dataset of a collection's rows. Made by :meth:`millrace.client.collection.Collection.dataset`.

    It has no fragments.
    """

    def __init__(self, schema: pa.Schema, scan: ScanFunction) -> None:
        super().__init__([], schema=schema)
        self._scan = scan

    def scanner(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None, **_: object
    ) -> CollectionScanner:
        """Scan the rows that match `filter`, with `columns`.

        Other options concern how files are read and have no effect.
        """
        if columns is not None and not all(isinstance(each, str) for each in (*columns,)):
            raise InvalidArgument("columns are given by their names")
        if isinstance(columns, dict):
            raise InvalidArgument("columns must be names: compute other columns from the result")
        return CollectionScanner(self._scan, self.schema, columns, filter)

    def count_rows(self, filter: pc.Expression | None = None, **_: object) -> int:
        """Count the rows that match `filter`."""
        return self.scanner([self.schema.names[0]], filter).count_rows()

    def _refused(self, *_: object, **__: object) -> NoReturn:
        raise InvalidArgument(
            "a collection's dataset is scanned as a whole: take to_table(), to_batches() or scanner()"
        )

    get_fragments = filter = replace_schema = join = join_asof = sort_by = _refused


class CollectionScanner:
    """One scan, with the methods that DuckDB, Polars and pyarrow's datasets call on a scanner."""

    def __init__(
        self, scan: ScanFunction, schema: pa.Schema, columns: Sequence[str] | None, filter: pc.Expression | None
    ) -> None:
        self._scan = scan
        self._names = schema.names if columns is None else list(columns)
        self._any = schema.names[0]
        self._filter = filter
        self.dataset_schema = schema
        self.projected_schema = pa.schema([schema.field(name) for name in self._names])

    def to_reader(self) -> pa.RecordBatchReader:
        """Stream the rows in bounded memory."""
        found = self._scan(self._names or [self._any], self._filter)
        if self._names:
            return found
        return pa.RecordBatchReader.from_batches(pa.schema([]), (batch.select([]) for batch in found))

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        yield from self.to_reader()

    def to_table(self) -> pa.Table:
        return self.to_reader().read_all()

    def head(self, num_rows: int) -> pa.Table:
        """Return the first rows. Reads no batch after the one with the last of them."""
        found: list[pa.RecordBatch] = []
        with self.to_reader() as batches:
            while (left := num_rows - sum(map(len, found))) > 0 and (batch := next(batches, None)) is not None:
                found.append(batch.slice(0, left))
        return pa.Table.from_batches(found, self.projected_schema)

    def count_rows(self) -> int:
        return sum(len(batch) for batch in self.to_batches())


def referenced_columns(filter: pc.Expression | None, schema: pa.Schema) -> list[str]:
    """Return the columns that an expression refers to, which pyarrow does not expose.

    Raises InvalidArgument if the expression does not fit the schema.
    """
    if filter is None:
        return []
    empty = schema.empty_table()
    if not _fits(empty, filter):
        raise InvalidArgument(f"the filter does not fit the columns: {filter}")
    return [name for name in schema.names if not _fits(empty.drop_columns([name]), filter)]


def filter_reader(rows: pa.RecordBatchReader, columns: Sequence[str], filter: pc.Expression) -> pa.RecordBatchReader:
    """Stream the rows that match `filter`, with `columns`."""
    schema = pa.schema([rows.schema.field(name) for name in columns])
    batches = (batch.filter(filter).select(list(columns)) for batch in rows)
    return pa.RecordBatchReader.from_batches(schema, batches)


def _fits(rows: pa.Table, filter: pc.Expression) -> bool:
    try:
        rows.filter(filter)
    except (pa.ArrowException, KeyError):
        return False
    return True


def polars_scan(polars: Any, dataset: CollectionDataset) -> Any:
    """Return a Polars LazyFrame over `dataset` that pushes down its columns and filters.

    Arrow compares NaN as false; Polars orders NaN as the greatest number. So filters on floats are not pushed down, and
    Polars applies the whole predicate to the rows that it gets.
    """
    schema = dataset.schema
    plain = {field.name for field in schema if not (pa.types.is_floating(field.type) or pa.types.is_nested(field.type))}
    asked = _Asked(schema)

    def rows(columns: list[str] | None, predicate: Any, count: int | None, _: int | None) -> Iterator[Any]:
        pushed = None
        if predicate is not None:
            parts = [each for each in _conjuncts(predicate) if set(each.meta.root_names()) <= plain]
            pushed = asked.as_arrow(polars, parts)
            if columns is not None:
                columns = [name for name in schema.names if name in {*columns, *predicate.meta.root_names()}]
        for batch in dataset.scanner(columns, pushed).to_batches():
            frame = polars.from_arrow(batch)
            if predicate is not None:
                frame = frame.filter(predicate)
            yield frame if count is None else frame.head(count)
            if count is not None and (count := count - len(frame)) <= 0:
                return

    types = polars.from_arrow(schema.empty_table()).schema
    return import_module("polars.io.plugins").register_io_source(rows, schema=types)


def _conjuncts(predicate: Any) -> Iterator[Any]:
    """Yield the terms of a conjunction in Polars' expressions."""
    parts = predicate.meta.pop()
    if len(parts) == 2 and (parts[1] & parts[0]).meta.eq(predicate):
        for part in parts:
            yield from _conjuncts(part)
    else:
        yield predicate


class _Asked(ds.InMemoryDataset):  # type: ignore[misc]  # pyarrow has no types for it
    """An empty dataset that captures the Arrow expression that Polars pushes down for a predicate.

    Polars has no API for the conversion.
    """

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__([], schema=schema)
        self._filters: list[pc.Expression] = []

    def scanner(self, *_: object, filter: pc.Expression | None = None, **__: object) -> ds.Scanner:
        if filter is not None:
            self._filters.append(filter)
        return ds.Scanner.from_batches([], schema=self.schema)

    def as_arrow(self, polars: Any, parts: list[Any]) -> pc.Expression | None:
        """Return the conjunction of `parts` as an Arrow expression, or None if Polars converts none of them."""
        self._filters = []
        for part in parts:
            polars.scan_pyarrow_dataset(self).filter(part).collect()
        return reduce(operator.and_, self._filters) if self._filters else None


def register_in_duckdb(connection: duckdb.DuckDBPyConnection, name: str, rows: ds.Dataset) -> None:
    """Give a DuckDB connection the view `name` of a dataset.

    With DuckDB before 2.0 and a column of floats, it is a view of another one, ``_millrace_<name>``.
    """
    columns = duckdb_columns(rows.schema)
    if columns == "*":
        connection.register(name, rows)
        return
    connection.register(f"_millrace_{name}", rows)
    connection.execute(f'CREATE OR REPLACE TEMP VIEW "{name}" AS SELECT {columns} FROM "_millrace_{name}"')


def duckdb_columns(schema: pa.Schema) -> str:
    """Return the select list by which DuckDB compares all columns itself.

    DuckDB before 2.0 has Arrow compare, for which no NaN is greater than a number or equal to a NaN. A comparison with
    a column that a volatile function made stays in DuckDB.
    """
    if int(import_optional("duckdb").__version__.split(".")[0]) >= 2:
        return "*"
    names = [field.name for field in schema if _has_floats(field.type)]
    made = ", ".join(f'if(random() >= 0, "{name}", NULL) AS "{name}"' for name in names)
    return f"* REPLACE ({made})" if names else "*"


def _has_floats(type: pa.DataType) -> bool:
    children = (type.field(place).type for place in range(type.num_fields))
    return pa.types.is_floating(type) or any(map(_has_floats, children))
