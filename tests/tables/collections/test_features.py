"""A table with timestamps without a zone has features of its own, and Spark opens each of its versions.

Any may be one that a reader has pinned.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.tables.collections.data_tables import ensure_deletes_table, ensure_rows_table

PLAIN = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("n", "int32", True)), "id")
WALL = CollectionSchema((*PLAIN.fields, FieldSpec("wall", "timestamp_ntz", True)), "id")
WALLS = CollectionSchema((*PLAIN.fields, FieldSpec("walls", "list<timestamp_ntz>", True)), "id")
KEYED = CollectionSchema((FieldSpec("id", "timestamp_ntz", False), FieldSpec("n", "int32", True)), "id")


def opens(folder: Path) -> None:
    """From writer 7 on Spark wants the feature for columns that are not nullable, and
    does not open a table without it.
    """
    for version in range(DeltaTable(str(folder)).version() + 1):
        features = DeltaTable(str(folder), version=version).protocol().writer_features
        assert not features or "invariants" in features, f"version {version} has {features}"


@pytest.mark.parametrize("schema", [PLAIN, WALL, WALLS, KEYED], ids=["plain", "a field", "within a list", "the key"])
def test_each_version_of_a_new_table_can_be_opened(tmp_path: Path, schema: CollectionSchema) -> None:
    for make in (ensure_rows_table, ensure_deletes_table):
        folder = tmp_path / make.__name__
        make(folder, schema)
        opens(folder)
        names = DeltaTable(str(folder)).schema().to_arrow().names
        assert set(schema.key_names) <= set(names)
        assert make(folder, schema).version == DeltaTable(str(folder)).version(), "nothing is changed a second time"


@pytest.mark.parametrize("later", [WALL, WALLS], ids=["a field", "within a list"])
def test_each_version_of_a_table_that_is_given_such_a_field_can_be_opened(
    tmp_path: Path, later: CollectionSchema
) -> None:
    ensure_rows_table(tmp_path / "rows", PLAIN)
    ensure_rows_table(tmp_path / "rows", later)
    opens(tmp_path / "rows")
    assert later.fields[-1].name in DeltaTable(str(tmp_path / "rows")).schema().to_arrow().names
