"""Bounds in the Delta log leave files out, and never a row: every engine answers as it does without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.storage.local import LocalStore
from millrace.storage.parquet_file import ParquetFileWriter, file_statistics, open_file
from millrace.storage.published import AddedFile, PublishedChange, PublishedTable
from tests.storage.published_world import ENGINES, Engine, positions

TYPES: Final[dict[str, tuple[pa.DataType, list[Any], list[str]]]] = {
    "n": (pa.int64(), [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1], ["-1", "0", "9007199254740993"]),
    "small": (pa.int16(), [-(2**15), 0, 2**15 - 1], ["0", "32767"]),
    "double": (
        pa.float64(),
        [-0.0, 0.0, 0.1, -1.5, 1e308, 5e-324, math.nan, math.inf, -math.inf],
        ["0.0", "-0.0", "0.1", "1e308"],
    ),
    "float": (pa.float32(), [-0.0, 0.0, 0.1, -1.5, 3e38, math.nan, math.inf], ["0.0", "0.1", "-1.5"]),
    "text": (
        pa.string(),
        ["", "a", "a" * 64, "a" * 65, "a" * 31 + "\x7f" * 40, "z" * 70 + "é", "é" * 65, "𠮷" * 33, "\uffff" * 80, "😀"],
        [f"'{'a' * 64}'", f"'{'a' * 65}'", f"'{'z' * 32}'", "'é'", "'𠮷'", "'😀'", f"'{'a' * 31}\x7f'"],
    ),
    "day": (pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)], ["DATE '1970-01-01'"]),
    "moment": (
        pa.timestamp("us", "UTC"),
        [datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=each) for each in (-1, 0, 1, 999, 1000, 1001)],
        [],
    ),
    "wall": (
        pa.timestamp("us"),
        [datetime.fromisoformat(each) for each in ("1970-01-01", "2026-01-01T00:00:00.000001")],
        [],
    ),
    "price": (pa.decimal128(20, 3), [Decimal("-0.001"), Decimal("0.1"), Decimal("99999999999999999.999")], ["0.1"]),
    "flag": (pa.bool_(), [True, False], []),
    "raw": (pa.binary(), [b"", b"\xff"], []),
    "nothing": (pa.int64(), [], ["1"]),
}
"""By column: its type, values to draw from besides null, and literals to compare with."""
Row = dict[str, Any]
SCHEMA = pa.schema([(name, kind) for name, (kind, _, _) in TYPES.items()])
ROWS = st.fixed_dictionaries({name: st.sampled_from([None, *values]) for name, (_, values, _) in TYPES.items()})
CONDITIONS = [f"{name} IS {given}NULL" for name in TYPES for given in ("", "NOT ")] + [
    f"{name} {op} {literal}"
    for name, (_, _, literals) in TYPES.items()
    for literal in literals
    for op in ("=", "<", ">=", "<>")
]


def made(folder: Path, files: Sequence[Sequence[Row]], masked: Sequence[Sequence[int]], *, stats: bool) -> Path:
    """A published table whose data files have these rows, with the statistics of our writer or with none."""
    table = PublishedTable.create(LocalStore(folder), SCHEMA, collection_id=1)
    added = []
    for number, rows in enumerate(files):
        name = f"_rows/part-{number}.parquet"
        file = ParquetFileWriter(table.store, name, SCHEMA, options={})
        file.write(pa.Table.from_pylist(rows, SCHEMA), row_group_size=2)
        action = file.close({}, ())
        with open_file(table.store, name) as found:
            text = file_statistics(found.metadata, SCHEMA.names)
        entry = AddedFile(name, action.size, action.rows, text, positions(masked[number]))
        added.append(entry if stats else replace(entry, stats=f'{{"numRecords": {action.rows}}}'))
    table.commit(PublishedChange(tick=1 << 18, schema_version=1, add=added))
    return folder


def counts(engine: Engine, folder: Path, conditions: Sequence[str]) -> list[int]:
    parts = [f"SELECT count(*) AS n FROM t WHERE {each}" for each in conditions]
    return [int(engine(folder, sql=part)["n"][0].as_py()) for part in parts]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(ROWS, min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_a_filter_never_hides_a_row(engine: Engine, files: list[list[Row]], data: st.DataObject) -> None:
    masked = [data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True, max_size=1)) for rows in files]
    conditions = data.draw(st.lists(st.sampled_from(CONDITIONS), min_size=4, max_size=8, unique=True))
    with TemporaryDirectory() as folder:
        with_stats = made(Path(folder) / "with", files, masked, stats=True)
        without = made(Path(folder) / "without", files, masked, stats=False)
        assert counts(engine, with_stats, conditions) == counts(engine, without, conditions)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_no_engine_takes_a_wide_bound_for_a_value(tmp_path: Path, engine: Engine) -> None:
    text = ["a" * 70, "b" * 70]
    moment = [datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=each) for each in (1001, 2001)]
    rows = [{"n": number, "text": text[number], "moment": moment[number]} for number in range(2)]
    folder = made(tmp_path / "t", [rows], [[]], stats=True)
    for name, low, high in (("text", *text), ("n", 0, 1), ("moment", *moment)):
        found = engine(folder, sql=f"SELECT min({name}) AS low, max({name}) AS high FROM t").to_pylist()
        assert found == [{"low": low, "high": high}], name


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_file_without_a_matching_row_is_not_opened(tmp_path: Path, engine: Engine) -> None:
    files = [[{"n": 10 * number, "text": f"{number}" * 70, "double": float(number)}] for number in range(4)]
    folder = made(tmp_path / "t", files, [[]] * 4, stats=True)
    for number in (0, 1, 3):
        (folder / f"_rows/part-{number}.parquet").unlink()
    for condition in ("n = 20", "n > 15 AND n < 25", f"text = '{'2' * 70}'", "double = 2.0"):
        assert engine(folder, sql=f"SELECT n FROM t WHERE {condition}").to_pylist() == [{"n": 20}], condition
