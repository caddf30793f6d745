"""Rows of a file as JSON: each format, inferred types, and rows that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from pyarrow.csv import write_csv

from millrace.base.errors import InvalidArgument
from millrace.client.produce.files.csv_format import BLOCK_BYTES, csv_rows
from millrace.client.produce.files.formats import CsvOptions, InputFormat, format_of
from millrace.flows.sources.files import rows as reading
from millrace.flows.sources.files.rows import Row, joined, pages


def _read(path: Path, size: int = 3, /, **more: Any) -> tuple[list[Row], dict[str, str]]:
    given = {"declared": {}, "known": {}, "csv": CsvOptions(), **more}
    found, types = list[Row](), dict[str, str]()
    for page in pages(path, format_of(path), given["csv"], declared=given["declared"], known=given["known"], size=size):
        assert len(page.rows) <= size
        found, types = found + page.rows, dict(page.types)
    return found, types


def _values(rows: list[Row]) -> list[Any]:
    return [None if each.fault else json.loads(each.value) for each in rows]


def test_types_of_csv_hold_all_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "id,price,zip,day,at,ok,note,long,none\n"
        "1,1,04103,2024-02-29,2024-02-29T12:00:00Z,true,a,1,\n"
        "2,1.5,10115,2024-03-01,2024-03-01T00:00:00.5Z,false,7,12345678901234567,\n"
    )
    rows, types = _read(path)
    assert types == {
        "id": "int64", "price": "float64", "zip": "string", "day": "date", "at": "timestamp", "ok": "bool",
        "note": "string", "long": "string",
    }  # fmt: skip
    assert _values(rows)[1] == {
        "id": 2, "price": 1.5, "zip": "10115", "day": "2024-03-01", "at": "2024-03-01T00:00:00.500000Z", "ok": False,
        "note": "7", "long": "12345678901234567", "none": None,
    }  # fmt: skip
    assert [each.line for each in rows] == [2, 3]


def test_rows_of_csv_that_cannot_be_read_have_their_text_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,v\n1,2\n3\n4,x\n5,6,7\n{}\n8,9\n")
    rows, _ = _read(path, 10, declared={"id": "int64", "v": "int64"})
    assert _values(rows) == [{"id": 1, "v": 2}, None, None, None, None, {"id": 8, "v": 9}]
    assert [(each.line, each.value, each.fault.split(",")[0]) for each in rows if each.fault] == [
        (3, b"3", "it has 1 cells"),
        (4, b"4,x", "v: 'x' is not a valid int64"),
        (5, b"5,6,7", "it has 3 cells"),
        (6, b"{}", "it has 1 cells"),
    ]


def test_a_column_keeps_a_type_that_holds_earlier_files(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,v\n1,2\n")
    rows, types = _read(path, known={"v": "string", "old": "date"})
    assert types == {"id": "int64", "v": "string", "old": "date"}
    assert _values(rows) == [{"id": 1, "v": "2"}]


@pytest.mark.parametrize(
    ("have", "more", "both"),
    [
        (None, "date", "date"),
        ("int32", "int64", "int64"),
        ("int64", "int32", "int64"),
        ("int64", "float64", "float64"),
        ("int64", "date", "string"),
        ("bool", "string", "string"),
    ],
)
def test_a_joined_type_holds_both(have: str | None, more: str, both: str) -> None:
    assert joined(have, more) == both


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_json_keeps_its_documents_and_digits(tmp_path: Path, name: str) -> None:
    texts = ['{"id": 1, "x": 0.12345678901234567890, "p": {"a": [1]}}', '{"id": 2, "x": null, "s": "é"}', '{"id": "x"}']
    whole = f"[{', '.join(texts)}]" if name == "a.json" else "\n\n".join(texts) + "\n"
    (tmp_path / name).write_bytes(gzip.compress(whole.encode()) if name.endswith("gz") else whole.encode())
    rows, types = _read(tmp_path / name)
    assert _values(rows) == [json.loads(each) for each in texts]
    assert b"0.12345678901234567890" in rows[0].value
    assert types == {"id": "json", "x": "float64", "p": "json", "s": "string"}
    assert [each.line for each in rows] == ([1, 1, 1] if name == "a.json" else [1, 3, 5])


def test_a_line_that_is_no_json_is_its_own_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n{"id": \n\xff\n[1]\n{"id": 2}')
    rows, types = _read(path, 10)
    assert _values(rows) == [{"id": 1}, None, None, [1], {"id": 2}]
    assert [each.value for each in rows if each.fault] == [b'{"id":', b"\xff"]
    assert types == {"id": "int64"}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.arrows"])
def test_files_with_types_say_them(tmp_path: Path, name: str) -> None:
    table = pa.table(
        {
            "id": pa.array([1, 2, 3, 4], pa.int16()),
            "d": [Decimal("1.10"), None, Decimal("12345678901234567890.05"), Decimal(0)],
            "at": pa.array([datetime(2024, 2, 29, 12, tzinfo=UTC)] * 4, pa.timestamp("us", "UTC")),
            "day": [date(2024, 2, 29)] * 4,
            "b": [b"\0\xff"] * 4,
            "l": [[1, 2]] * 4,
            "c": pa.array(["x", "y", "x", None]).dictionary_encode(),
        }
    )
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(table, path)
    else:
        make = pa.ipc.new_file if name == "a.arrow" else pa.ipc.new_stream
        with make(str(path), table.schema) as made:
            made.write_table(table)
    rows, types = _read(path, known={"id": "string"})
    assert types["id"] == "string"
    assert (types["d"], types["at"], types["b"], types["c"]) == ("decimal(22,2)", "timestamp", "binary", "string")
    assert len(rows) == 4
    assert json.loads(rows[0].value) == {
        "id": "1", "d": 1.10, "at": "2024-02-29T12:00:00Z", "day": "2024-02-29", "b": "AP8=", "l": [1, 2], "c": "x",
    }  # fmt: skip
    assert b"12345678901234567890.05" in rows[2].value


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv.gz", "a.jsonl.gz", "a.avro"])
def test_a_file_that_is_none_of_its_format_is_a_typed_error(tmp_path: Path, name: str) -> None:
    whole = gzip.compress(b"id\n1\n" * 1000)[:-20] if name.endswith("gz") else b"nothing of the kind"
    (tmp_path / name).write_bytes(whole)
    with pytest.raises(InvalidArgument):
        _read(tmp_path / name)


CELLS = st.sampled_from(
    ["", "1", "-2", "1.5", "x", "007", "true", "2024-02-29", "2024-02-29T12:00:00Z", "1e5", "12345678901234567"]
)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), st.integers(1, 5))
def test_no_row_of_csv_is_lost_or_at_fault_for_its_inferred_types(rows: list[tuple[str, str]], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_text("".join(f"{a},{b},z\n" for a, b in [("a", "b"), *rows]))
        found, types = _read(path, size)
        assert [each.line for each in found] == list(range(2, 2 + len(rows)))
        assert not any(each.fault for each in found)
        for (a, _), value in zip(rows, _values(found), strict=True):
            assert value["z"] == "z"
            if types.get("a") == "string":
                assert value["a"] == (a or None)
            elif types.get("a") in ("int64", "float64"):
                assert value["a"] == (float(a) if a else None)


def test_the_kinds_of_files_are_those_of_a_load() -> None:
    assert set(InputFormat) == {"jsonl", "json", "csv", "parquet", "arrow", "avro"}


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow", "a.jsonl"])
def test_a_page_of_wide_rows_is_bounded_by_its_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAGE_BYTES", 10_000)
    path, count = tmp_path / name, 100
    table = pa.table({"n": list(range(count)), "text": [f"{number:02}" * 600 for number in range(count)]})
    if name == "a.csv":
        write_csv(table, path)
    elif name == "a.parquet":
        parquet.write_table(table, path)
    elif name == "a.arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    found = list(pages(path, format_of(path), CsvOptions(), declared={}, known={}, size=count))
    assert [json.loads(row.value)["n"] for page in found for row in page.rows] == list(range(count))
    assert max(sum(len(row.value) for row in page.rows) for page in found) < 2 * 10_000


def test_rows_of_csv_are_read_together_up_to_a_number_of_bytes(tmp_path: Path) -> None:
    text = b"n,text\n" + b"".join(b"%d,%s\n" % (number, b"x" * 100_000) for number in range(200))
    wanted = pa.schema({"n": pa.utf8(), "text": pa.utf8()})
    together = [
        sum(len(part.lines) for part in parts)
        for parts in csv_rows(io.BytesIO(text), wanted, 1000, False, True, CsvOptions(), batch_bytes=3_000_000)
    ]
    assert sum(together) == 200
    assert max(together) * 100_000 <= 3_000_000 + BLOCK_BYTES
