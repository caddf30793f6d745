"""A published table beside a model of it, and the engines that read it.

The model has the rows of each data file and, for each version, which of them are masked: what an engine must show.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_delta
import numpy as np
import pyarrow as pa

from millrace.storage.local import LocalStore
from millrace.storage.parquet_file import ParquetFileWriter
from millrace.storage.published import AddedFile, Positions, PublishedChange, PublishedTable
from millrace.storage.table import LogMaintenance

SCHEMA = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("price", pa.decimal128(9, 2))]
)
"""The user's columns."""
_INTERNAL = pa.schema([("_time_tick", pa.int64()), ("_partition", pa.string())])
_NO_CHECKPOINTS = LogMaintenance(checkpoint_commits=10**6, keep_commits=10**6)
FIRST_MS = 1_790_000_000_000

Row = tuple[Any, ...]


def tick_at(ms: int) -> int:
    """The first tick of a millisecond after FIRST_MS."""
    return (FIRST_MS + ms) << 18


def positions(values: Iterable[int]) -> Positions:
    return np.array(sorted(values), dtype=np.int64)


class World:
    """A published table in a folder of its own."""

    def __init__(self, folder: Path, schema: pa.Schema = SCHEMA, *, seed: int = 0) -> None:
        self.folder = folder / "tables" / "7"
        self.store = LocalStore(self.folder)
        self.schema = schema
        self.random = random.Random(seed)
        self.table = PublishedTable.create(self.store, schema, collection_id=7)
        self.rows: dict[str, list[Row]] = {}
        """By file, its rows in order."""
        self.versions: list[dict[str, frozenset[int]]] = [{}]
        """By version and file, the masked positions."""
        self._next = 0
        self.maintenance = _NO_CHECKPOINTS
        self.expires = True
        """Whether versions before the last that `maintenance` keeps are expired with each commit."""

    def write(self, rows: Sequence[Row], *, masked: Iterable[int] = (), day: date = date(2026, 11, 26)) -> AddedFile:
        """Write a data file as the rows table has them: with columns that are not the user's."""
        columns = pa.table(dict(zip(self.schema.names, zip(*rows, strict=True), strict=True)), self.schema)
        internal = pa.table({"_time_tick": range(len(rows)), "_partition": ["_default"] * len(rows)}, _INTERNAL)
        for name, column in zip(_INTERNAL.names, internal.columns, strict=True):
            columns = columns.append_column(name, column)
        name = f"_rows/_date={day}/part-{len(self.rows):04d}.parquet"
        file = ParquetFileWriter(self.store, name, columns.schema, options={"compression": "snappy"})
        file.write(columns, row_group_size=3)
        action = file.close({}, ("id", "name", "at", "price", "_time_tick"))
        self.rows[name] = list(rows)
        return AddedFile(name, action.size, action.rows, action.stats, positions(masked), action.written_ms)

    def make_rows(self, count: int) -> list[Row]:
        """Rows that nothing else has: a stale version of a row is seen."""
        made = []
        for _ in range(count):
            number = self._next = self._next + 1
            moment = datetime(2026, 11, 26, tzinfo=UTC) + timedelta(microseconds=1_234_567 * number)
            name = None if number % 7 == 0 else f"row {number} é𠀀"
            made.append((number, name, moment, None))
        return made

    def commit(self, *, ms: int | None = None, **change: Any) -> int:
        """Commit a change, and note what the version shows. `ms` is the time of its tick."""
        at = self.table.version + 1 if ms is None else ms
        found = PublishedChange(tick=tick_at(at), schema_version=1, **change)
        if self.expires:
            self.table.expire(before_ms=2**60, keep=self.maintenance.keep_commits)
        version = self.table.commit(found, maintenance=self.maintenance)
        shown = dict(self.versions[-1])
        for path in found.remove:
            del shown[path]
        for path, masked in found.mask.items():
            shown[path] = frozenset(masked.tolist())
        for each in found.add:
            shown[each.path] = frozenset(each.masked.tolist())
        assert version == len(self.versions)
        self.versions.append(shown)
        return version

    def expected(self, version: int = -1) -> list[Row]:
        """What readers of a version must see, ordered by id."""
        shown = self.versions[version]
        return sorted(
            (row for path, masked in shown.items() for at, row in enumerate(self.rows[path]) if at not in masked),
            key=lambda row: row[0],
        )

    def change_at_random(self) -> int:
        """Commit one of what a publisher does."""
        choose, shown = self.random, self.versions[-1]
        live = sorted(shown)
        what = choose.choice(["add", "add", "mask", "mask", "mask", "unmask", "remove", "rewrite"]) if live else "add"
        if what == "add":
            files = [self.make_rows(choose.randint(1, 12)) for _ in range(choose.randint(1, 3))]
            return self.commit(add=[self.write(rows, masked=self._some(len(rows))) for rows in files])
        paths = choose.sample(live, min(len(live), choose.randint(1, 3)))
        if what in ("mask", "unmask"):
            masks = {}
            for path in paths:
                some = set(self._some(len(self.rows[path])))
                masks[path] = positions(shown[path] | some if what == "mask" else shown[path] - some)
            return self.commit(mask=masks)
        if what == "remove":
            return self.commit(remove=paths)
        kept = [row for path in paths for at, row in enumerate(self.rows[path]) if at not in shown[path]]
        if not kept:
            return self.commit(remove=paths, rewrites=frozenset(paths))
        file = self.write(kept)
        return self.commit(add=[file], remove=paths, rewrites=frozenset([file.path, *paths]))

    def _some(self, count: int) -> list[int]:
        share = self.random.choice([0.0, 0.1, 0.5, 1.0])
        return [at for at in range(count) if self.random.random() < share]


def rows_of(found: pa.Table) -> list[Row]:
    """The rows of an engine's answer, ordered by id."""
    columns = [column.to_pylist() for column in found.select(SCHEMA.names).columns]
    return sorted(zip(*columns, strict=True), key=lambda row: row[0])


def by_delta_rs(folder: Path, *, version: int | None = None, sql: str = "SELECT * FROM t") -> pa.Table:
    from deltalake import DeltaTable, QueryBuilder

    table = DeltaTable(str(folder), version=version)
    return pa.table(QueryBuilder().register("t", table).execute(sql).read_all())


def by_polars(folder: Path, *, version: int | None = None, sql: str = "SELECT * FROM t") -> pa.Table:
    import polars as pl

    frame = pl.scan_delta(str(folder), version=version)
    return pl.SQLContext(t=frame).execute(sql, eager=True).to_arrow()


def by_duckdb(folder: Path, *, version: int | None = None, sql: str = "SELECT * FROM t") -> pa.Table:
    options = "" if version is None else f", version => {version}"
    return duckdb_with_delta().execute(f"WITH t AS (FROM delta_scan('{folder}'{options})) {sql}").to_arrow_table()


@cache
def duckdb_with_delta() -> duckdb.DuckDBPyConnection:
    """DuckDB with its delta extension, one for the test process."""
    (extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("*.duckdb_extension")
    connection = duckdb.connect()
    connection.execute("SET timezone = 'UTC'")
    connection.load_extension(str(extension))
    return connection


Engine = Callable[..., pa.Table]
ENGINES: Mapping[str, Engine] = {"delta-rs": by_delta_rs, "Polars": by_polars, "DuckDB": by_duckdb}


def log_of(folder: Path, version: int) -> list[dict[str, Any]]:
    """The actions of a commit, as its file has them."""
    text = (folder / "_delta_log" / f"{version:020d}.json").read_text()
    return [json.loads(line) for line in text.splitlines()]
