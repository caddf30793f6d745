"""Rows of files of every format, packed or not.

All of them, or the line, the column and the value of what does not fit.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import tracemalloc
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument
from millrace.client.produce.files.formats import CsvOptions, InputFormat, expand_paths, format_of
from millrace.client.produce.files.reader import read_batches
from millrace.client.produce.files.row_conversion import BadRow
from millrace.message.schema import CollectionSchema, FieldSpec

SCHEMA = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("name", "string", True),
        FieldSpec("price", "float64", True),
        FieldSpec("day", "date", True),
        FieldSpec("at", "timestamp", True),
    ),
    "id",
)
ROWS = [
    {"id": 1, "name": "Ada", "price": 1.5, "day": date(2026, 11, 23), "at": datetime(2026, 11, 23, 10, tzinfo=UTC)},
    {"id": 2, "name": None, "price": None, "day": None, "at": None},
    {"id": 3, "name": 'a "b", c', "price": -0.25, "day": date(2001, 2, 3), "at": datetime(2001, 1, 1, tzinfo=UTC)},
]
TABLE = pa.Table.from_pylist(ROWS, SCHEMA.arrow())


def read(data: bytes, kind: InputFormat, **options: Any) -> tuple[pa.Table, list[BadRow]]:
    batches = list(read_batches(io.BytesIO(data), kind, SCHEMA, batch_rows=2, **options))
    rows = pa.concat_tables([SCHEMA.arrow().empty_table(), *(batch.rows for batch in batches)])
    return rows, [bad for batch in batches for bad in batch.bad]


def as_json(rows: list[dict[str, Any]], **options: Any) -> bytes:
    return json.dumps(rows, default=lambda value: value.isoformat(), **options).encode()


def as_arrow(new: Callable[..., Any]) -> bytes:
    sink = io.BytesIO()
    columns = [TABLE["id"], TABLE["name"].dictionary_encode(), *TABLE.columns[2:]]
    table = pa.table(dict(zip(TABLE.column_names, columns, strict=True)))
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def as_avro() -> bytes:
    fastavro: Any = importlib.import_module("fastavro")
    kinds = [
        "long",
        ["null", "string"],
        ["null", "double"],
        ["null", {"type": "int", "logicalType": "date"}],
        ["null", {"type": "long", "logicalType": "timestamp-micros"}],
    ]
    fields = [{"name": name, "type": kind} for name, kind in zip(TABLE.column_names, kinds, strict=True)]
    sink = io.BytesIO()
    fastavro.writer(sink, {"type": "record", "name": "row", "fields": fields}, ROWS, codec="deflate")
    return sink.getvalue()


PACKS: list[Callable[[bytes], bytes]] = [
    bytes,
    gzip.compress,
    bz2.compress,
    lambda data: bytes(pa.compress(data, codec="zstd", asbytes=True)),
]


@pytest.mark.parametrize("pack", PACKS, ids=["plain", "gzip", "bzip2", "zstd"])
def test_an_array_is_read_packed_or_not_and_what_was_cut_off_is_an_error(pack: Callable[[bytes], bytes]) -> None:
    data = pack(as_json(ROWS, indent=2))
    assert read(data, InputFormat.JSON) == (TABLE, [])
    for cut in range(5, len(data), len(data) // 9):
        with pytest.raises(InvalidArgument):
            read(data[:cut], InputFormat.JSON)


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_is_read_as_file_and_as_stream_its_dictionaries_too(new: Callable[..., Any]) -> None:
    assert read(as_arrow(new), InputFormat.ARROW) == (TABLE, [])


def test_avro_is_read_and_one_that_was_cut_off_is_an_error() -> None:
    data = as_avro()
    assert read(data, InputFormat.AVRO) == (TABLE, [])
    with pytest.raises(InvalidArgument, match="Avro"):
        read(data[:-7], InputFormat.AVRO)


def test_csv_is_read_as_it_was_written_elsewhere() -> None:
    text = "1;Ada;1,5;23.11.2026;23.11.2026 10:00\n2;NA;;;\n3;'a \"b\", c';-0,25;03.02.2001;01.01.2001 00:00\n"
    form = CsvOptions(
        ";", "'", header=False, encoding="utf-16", nulls=("", "NA"), decimal=",", dates="%d.%m.%Y",
        timestamps="%d.%m.%Y %H:%M",
    )  # fmt: skip
    assert read(text.encode("utf-16"), InputFormat.CSV, form=form) == (TABLE, [])


def test_a_point_in_a_number_with_a_decimal_comma_stands_between_thousands_or_is_refused() -> None:
    text = "id;price\n1;1.234.567,5\n2;1.5\n3;-1.000\n4;12.34,5\n5;,5\n6;1234.567\n"
    rows, bad = read(text.encode(), InputFormat.CSV, form=CsvOptions(";", decimal=","))
    assert rows["price"].to_pylist() == [1_234_567.5, -1000.0, 0.5]
    assert [(each.line, each.column, each.value) for each in bad] == [
        (3, "price", "1.5"),
        (5, "price", "12.34,5"),
        (7, "price", "1234.567"),
    ]


def test_a_bad_row_has_its_line_its_column_and_its_value() -> None:
    rows, bad = read(b'[{"id": 1},\n\n{"id": 2, "price": "dear"},\n7,\n{"name": "x"}]', InputFormat.JSON)
    assert rows["id"].to_pylist() == [1]
    assert [(each.line, each.column, each.value) for each in bad] == [
        (3, "price", "dear"),
        (4, None, None),
        (5, "id", None),
    ]
    assert bad[0].why == "price: 'dear' is not float64"


@pytest.mark.parametrize("form", [InputFormat.JSON, InputFormat.JSONL])
def test_what_a_parser_of_json_passes_over_in_silence_makes_a_bad_row(form: InputFormat) -> None:
    objects = [
        b'{"id": 1, "price": 2, "price": 3}',
        b'{"id": 2, "price": 1e400}',
        b'{"id": 3, "price": -123456789012345678901234567890e300}',
        b'{"id": 4, "price": 0.12345678901234567890}',
        b'{"id": 5, "price": Infinity}',
    ]
    text = b"[" + b",\n".join(objects) + b"]" if form is InputFormat.JSON else b"\n".join(objects)
    rows, bad = read(text, form)
    assert rows.select(["id", "price"]).to_pylist() == [
        {"id": 4, "price": 0.12345678901234568},
        {"id": 5, "price": float("inf")},
    ]
    assert [(each.line, each.why) for each in bad] == [
        (1, "the name 'price' appears twice in an object"),
        (2, "the number 1e400 is greater than a float holds"),
        (3, "the number -123456789012345678901234567890e300 is greater than a float holds"),
    ]
    _, unquoted = read(text, form, quote=False)
    assert not any(word in each.why for each in unquoted for word in ("price", "400", "123"))


def test_a_decimal_in_json_has_all_the_digits_that_stand_there() -> None:
    numbers = [
        "1000000000000000000.1",
        "0.1234567890123456789",
        "12.50",
        "1e3",
        "-7",
        '"2.5"',
        "123456789012345678901",
    ]
    wanted = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("v", "decimal(38,19)", True)), "id")
    text = "\n".join(f'{{"id": {place}, "v": {number}}}' for place, number in enumerate(numbers))
    [batch] = read_batches(io.BytesIO(text.encode()), InputFormat.JSONL, wanted, batch_rows=9)
    assert batch.rows["v"].to_pylist() == [Decimal(each.strip('"')) for each in numbers[:-1]]
    assert [(each.line, each.column) for each in batch.bad] == [(7, "v")]


def test_csv_has_no_number_beyond_its_type() -> None:
    rows, bad = read(b"id,price\n1,1e400\n2,inf\n3,1e308\n", InputFormat.CSV)
    assert rows["price"].to_pylist() == [float("inf"), 1e308]
    assert [(each.line, each.column) for each in bad] == [(2, "price")]


@pytest.mark.parametrize(
    "text",
    ['[{"id":1},]', '[{"id":1}] {"id":2}', '[{"id":1} {"id":2}]', '[{"id":1}', '[,{"id":1}]', '[{"id":}]', "["],
)
def test_an_array_that_is_no_json_is_an_error_and_no_row_fewer(text: str) -> None:
    with pytest.raises(InvalidArgument, match="line 1: "):
        read(text.encode(), InputFormat.JSON)


def test_lines_in_a_json_file_are_lines() -> None:
    assert read(b'{"id": 1}\n{"id": 2}\n', InputFormat.JSON)[0]["id"].to_pylist() == [1, 2]


class _Endless(io.RawIOBase):
    """An array of so many MiB that nobody holds in whole."""

    def __init__(self, mib: int) -> None:
        self._left = mib
        self._begun = False
        self._objects = b'{"id": 1, "name": "' + b"x" * 1000 + b'"},\n'

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._begun:
            self._begun, data = True, b"["
        elif self._left > 0:
            data = self._objects * (len(buffer) // len(self._objects)) or self._objects[: len(buffer)]
            self._left -= 1 if len(buffer) > 1 << 19 else 0
        elif self._left == 0:
            self._left, data = -1, b'{"id": 2}]'
        else:
            return 0
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.slow
def test_an_array_takes_no_more_memory_than_a_batch_of_it() -> None:
    tracemalloc.start()
    try:
        source = io.BufferedReader(_Endless(48), 1 << 20)
        rows = sum(batch.rows.num_rows for batch in read_batches(source, InputFormat.JSON, SCHEMA, batch_rows=500))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows > 40_000
    assert peak < 16 << 20, f"{peak >> 20} MiB"


def test_files_are_found_by_name_folder_and_pattern_in_order(tmp_path: Path) -> None:
    for name in ("b.csv.gz", "a.jsonl", "sub/c.parquet", "_SUCCESS", ".hidden.csv", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [each.name for each in expand_paths([tmp_path])]
    assert names == ["a.jsonl", "b.csv.gz", "c.parquet"]
    assert [each.name for each in expand_paths([tmp_path / "*.csv.gz", tmp_path / "a.jsonl", tmp_path])][:2] == names[
        1::-1
    ]
    assert format_of(tmp_path / "b.csv.gz") is InputFormat.CSV
    for nothing in (tmp_path / "*.avro", tmp_path / "sub" / ".." / "none*"):
        with pytest.raises(InvalidArgument, match="names no file"):
            expand_paths([nothing])


@pytest.mark.parametrize("kind", [InputFormat.JSONL, InputFormat.CSV, InputFormat.JSON])
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_a_packed_file_that_was_cut_off_says_at_which_line(kind: InputFormat, pack: Callable[[bytes], bytes]) -> None:
    schema = CollectionSchema((FieldSpec("id", "int64", False),), "id")
    lines = [json.dumps({"id": number * 7_919 % 100_003}) for number in range(12_000)]
    text = {
        InputFormat.JSONL: "\n".join(lines),
        InputFormat.JSON: "[" + ",\n".join(lines) + "]",
        InputFormat.CSV: "id\n" + "\n".join(str(json.loads(line)["id"]) for line in lines),
    }[kind]
    packed = pack(text.encode())
    cut = packed[: len(packed) * 9 // 10]
    for spoiled in (
        cut,
        packed[: len(packed) // 2] + bytes(64) + packed[len(packed) // 2 + 64 :],
    ):
        rows: list[int] = []
        with pytest.raises(InvalidArgument, match="does not read on, it is damaged or was cut off") as caught:
            rows.extend(len(batch.rows) for batch in read_batches(io.BytesIO(spoiled), kind, schema, batch_rows=1000))
        line = int(str(caught.value).split(":")[0].removeprefix("line "))
        assert line >= 1  # of damage bzip2 learns when it has given what it made of a block
        assert spoiled is not cut or line <= len(lines) + 1
