"""Engines without a JVM read a published table: delta-rs' QueryBuilder, Polars and DuckDB show what the model shows."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.exceptions import DeltaError

from millrace.storage.delta_log import checkpoint_file, first_commit
from millrace.storage.published_log import PHYSICAL_NAME
from millrace.storage.table import LogMaintenance
from tests.storage.published_world import ENGINES, FIRST_MS, SCHEMA, Engine, World, by_duckdb, positions, rows_of

engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def check(world: World, engine: Engine, version: int = -1) -> None:
    at = None if version < 0 else version
    assert rows_of(engine(world.folder, version=at)) == world.expected(version)


@engines
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_version_shows_its_rows(tmp_path: Path, engine: Engine, seed: int) -> None:
    world = World(tmp_path, seed=seed)
    world.maintenance = LogMaintenance(checkpoint_commits=5, keep_commits=8)
    for _ in range(25):
        version = world.change_at_random()
        check(world, engine)
        check(world, engine, world.random.randint(max(0, version - 8), version))
    assert first_commit(world.store) > 10, "the log was trimmed"


@engines
def test_a_vector_that_is_replaced_hides_only_its_own_rows(world: World, engine: Engine) -> None:
    # trino#31253: an engine that keeps the old vector's file, or both, shows rows twice or loses some.
    files = [world.write(world.make_rows(5)) for _ in range(3)]
    world.commit(add=files)
    for masked in ([0], [0, 4], [4], [], [0, 1, 2, 3, 4]):
        world.commit(mask={each.path: positions(masked) for each in files[:2]})
        check(world, engine)


@engines
def test_positions_are_of_the_file_whatever_a_filter_skips(world: World, engine: Engine) -> None:
    # lance#9200: a default position of 0 hid a real row. trino#28885: positions counted after pages were skipped.
    rows = world.make_rows(12)  # row groups of 3
    world.commit(add=[world.write(rows, masked=[0, 4, 9, 11])])
    for least in range(rows[0][0], rows[-1][0] + 1):
        found = rows_of(engine(world.folder, sql=f"SELECT * FROM t WHERE id >= {least}"))
        assert found == [row for row in world.expected() if row[0] >= least]
        found = rows_of(engine(world.folder, sql=f"SELECT * FROM t WHERE id = {least}"))
        assert found == [row for row in world.expected() if row[0] == least]


@engines
def test_bounds_never_hide_a_live_row(world: World, engine: Engine) -> None:
    files = [world.write(world.make_rows(6)) for _ in range(4)]
    world.commit(add=files)
    world.commit(mask={each.path: positions([0, 5]) for each in files})  # the rows of the bounds themselves
    for row in world.expected():
        name = "name IS NULL" if row[1] is None else f"name = '{row[1]}'"
        for condition in (f"id = {row[0]}", name, f"id = {row[0]} AND {name}"):
            assert row in rows_of(engine(world.folder, sql=f"SELECT * FROM t WHERE {condition}"))
    for file in files:
        for at in (0, 5):
            assert not rows_of(engine(world.folder, sql=f"SELECT * FROM t WHERE id = {world.rows[file.path][at][0]}"))


@engines
def test_a_count_from_statistics_is_the_number_of_rows_that_are_seen(world: World, engine: Engine) -> None:
    # clickhouse#114933: counts from statistics ignored deletion vectors.
    for _ in range(12):
        world.change_at_random()
        seen = rows_of(engine(world.folder))
        counted = engine(world.folder, sql="SELECT count(*) AS n, min(id) AS low, max(id) AS high FROM t")
        assert counted.to_pylist() == [
            {
                "n": len(seen),
                "low": min((row[0] for row in seen), default=None),
                "high": max((row[0] for row in seen), default=None),
            }
        ]
        nulls = engine(world.folder, sql="SELECT count(name) AS n FROM t")
        assert nulls["n"].to_pylist() == [sum(row[1] is not None for row in seen)]


@engines
def test_a_column_that_a_file_lacks_is_null(world: World, engine: Engine) -> None:
    world.commit(add=[world.write(world.make_rows(4), masked=[1])])
    world.commit(schema=SCHEMA.append(pa.field("city", pa.string())))
    found = engine(world.folder)
    assert found["city"].to_pylist() == [None] * 3
    assert rows_of(found) == world.expected()


@pytest.mark.parametrize("engine", [ENGINES["delta-rs"], by_duckdb], ids=["delta-rs", "DuckDB"])
def test_a_renamed_column_is_read_from_files_with_its_old_name(world: World, engine: Engine) -> None:
    world.commit(add=[world.write(world.make_rows(4), masked=[1])])
    place = SCHEMA.get_field_index("name")
    world.commit(schema=SCHEMA.set(place, pa.field("title", pa.string(), metadata={PHYSICAL_NAME: "name"})))
    found = engine(world.folder).rename_columns(SCHEMA.names)
    assert rows_of(found) == world.expected()
    titled = engine(world.folder, sql=f"SELECT * FROM t WHERE title = '{world.expected()[0][1]}'")
    assert rows_of(titled.rename_columns(SCHEMA.names)) == world.expected()[:1]


@engines
def test_fields_of_every_kind_are_read(tmp_path: Path, engine: Engine) -> None:
    kinds = {
        "id": pa.int64(),
        "naive": pa.timestamp("us"),
        "day": pa.date32(),
        "flag": pa.bool_(),
        "small": pa.int8(),
        "half": pa.float32(),
        "bytes": pa.binary(),
        "tags": pa.list_(pa.field("element", pa.string())),
        "place": pa.struct([pa.field("x", pa.float64()), pa.field("naive", pa.timestamp("us"))]),
        "counts": pa.map_(pa.string(), pa.int64()),
    }
    fields = [pa.field(name, kind, nullable=name != "id") for name, kind in kinds.items()]
    schema = pa.schema(fields)
    naive = datetime(2026, 11, 26, 1, 2, 3, 456789)  # noqa: DTZ001 - a timestamp without a zone
    full = (1, naive, naive.date(), True, 7, 0.5, b"\x00", ["a", None], {"x": 1.5, "naive": naive}, [("k", 1)])
    world = World(tmp_path, schema)
    world.commit(add=[world.write([full, (2, *[None] * 9), (3, *full[1:])], masked=[2])])
    found = engine(world.folder).select(list(kinds)).cast(pa.schema([each.with_nullable(True) for each in fields]))
    assert found.sort_by("id").to_pylist() == [dict(zip(kinds, row, strict=True)) for row in world.expected()]


def test_polars_refuses_a_renamed_column(world: World) -> None:
    world.commit(add=[world.write(world.make_rows(4))])
    place = SCHEMA.get_field_index("name")
    world.commit(schema=SCHEMA.set(place, pa.field("title", pa.string(), metadata={PHYSICAL_NAME: "name"})))
    with pytest.raises(Exception, match="columnMapping"):
        ENGINES["Polars"](world.folder)


def _refused(world: World) -> dict[str, Any]:
    row = pa.table(
        dict(zip(SCHEMA.names, ([9], ["x"], [datetime(2026, 1, 1, tzinfo=UTC)], [None]), strict=True)), SCHEMA
    )

    def table() -> DeltaTable:
        return DeltaTable(str(world.folder))

    return {
        "append": lambda: write_deltalake(table(), row, mode="append"),
        "overwrite": lambda: write_deltalake(table(), row, mode="overwrite"),
        "delete": lambda: table().delete("id = 1"),
        "update": lambda: table().update({"name": "'x'"}),
        "merge": lambda: (
            table().merge(row, "t.id = s.id", source_alias="s", target_alias="t").when_matched_delete().execute()
        ),
        "optimize": lambda: table().optimize.compact(),
        "z-order": lambda: table().optimize.z_order(["id"]),
        "restore": lambda: table().restore(0),
        "add a column": lambda: table().alter.add_columns([Field("x", "long")]),
        "properties": lambda: table().alter.set_table_properties({"delta.appendOnly": "true"}),
    }


@pytest.mark.parametrize("call", sorted(_refused(World.__new__(World))))
def test_delta_rs_refuses_to_write(world: World, call: str) -> None:
    world.commit(add=[world.write(world.make_rows(4), masked=[1])])
    with pytest.raises(DeltaError, match=r"feature|protocol|unsupported|Unsupported"):
        _refused(world)[call]()
    assert DeltaTable(str(world.folder)).version() == 1
    check(world, ENGINES["delta-rs"])


def test_a_vacuum_by_delta_rs_deletes_no_file_that_is_live(world: World) -> None:
    live = [world.write(world.make_rows(4), masked=[1]) for _ in range(2)]
    world.commit(add=live)
    world.commit(mask={each.path: positions([1, 2]) for each in live})
    before = sorted(path for path in world.folder.rglob("*") if path.is_file())
    for full in (False, True):
        try:
            DeltaTable(str(world.folder)).vacuum(0, dry_run=False, enforce_retention_duration=False, full=full)
        except DeltaError:
            continue  # it refuses the table, which is as well
    gone = set(before) - {path for path in world.folder.rglob("*") if path.is_file()}
    assert not [path for path in gone if "_vectors" not in path.parts]
    for engine in ENGINES.values():
        check(world, engine)


def test_a_checkpoint_by_delta_rs_keeps_vectors_features_and_properties(world: World) -> None:
    world.commit(add=[world.write(world.make_rows(4), masked=[1])])
    world.maintenance = LogMaintenance(checkpoint_commits=1, keep_commits=0)
    version = world.commit(add=[world.write(world.make_rows(2), masked=[0])])
    assert (world.folder / checkpoint_file(version)).exists()
    assert first_commit(world.store) == version
    for engine in ENGINES.values():
        check(world, engine)
    table = DeltaTable(str(world.folder))
    assert "millrace.published" in (table.protocol().writer_features or ())
    assert table.metadata().configuration["millrace.collectionId"] == "7"
    with pytest.raises(DeltaError):
        table.delete("id = 1")


def test_what_a_stranger_sees_in_the_history(world: World) -> None:
    world.commit(ms=5000, add=[world.write(world.make_rows(4), masked=[1])])
    (newest,) = DeltaTable(str(world.folder)).history(1)
    said = newest["millrace"]
    said = json.loads(said) if isinstance(said, str) else said
    assert (said["rows"], said["tick"] >> 18) == (3, FIRST_MS + 5000)
