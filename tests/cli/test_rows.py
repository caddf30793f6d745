"""Rows on their way in and out.

What is written reads back, and what does not fit is told by its line and harms no other.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any, BinaryIO

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from millrace.base.errors import InvalidArgument
from millrace.client.produce.files.formats import InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.commands.parts.row_writers import write_csv, write_json_lines, write_parquet
from millrace.message.schema import CollectionSchema, FieldSpec

SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "string": st.text(st.characters(codec="utf-8"), max_size=12),
    "binary": st.binary(max_size=9),
    "date": st.dates(date(1000, 1, 1)),
    "timestamp": st.datetimes(datetime(1000, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC)),  # noqa: DTZ001
}
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")


@st.composite
def tables(draw: st.DrawFn, *, lists: bool = True, empty_text: bool = True) -> tuple[CollectionSchema, pa.Table]:
    """A schema with a field of each of some types, and rows of it."""
    kinds = draw(st.lists(st.sampled_from(sorted(SCALARS)), min_size=1, max_size=5))
    fields, values = [FieldSpec("id", "int64", False)], [SCALARS["int64"]]
    for number, kind in enumerate(kinds):
        inner = SCALARS[kind]
        as_list = lists and draw(st.booleans())
        if not empty_text and kind in ("string", "binary"):
            inner = inner.filter(bool)
        fields.append(FieldSpec(f"f{number}", f"list<{kind}>" if as_list else kind, True))
        values.append(st.none() | (st.lists(st.none() | inner, max_size=3) if as_list else inner))
    schema = CollectionSchema(tuple(fields), "id")
    rows = draw(st.lists(st.tuples(*values), max_size=6))
    columns = [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(schema.arrow())]
    return schema, pa.Table.from_arrays(columns, schema=schema.arrow())


def _round_trip(
    schema: CollectionSchema, table: pa.Table, kind: InputFormat, write: Callable[[pa.RecordBatchReader, BinaryIO], int]
) -> None:
    file = io.BytesIO()
    assert write(table.to_reader(), file) == table.num_rows
    batches = list(read_batches(io.BytesIO(file.getvalue()), kind, schema, batch_rows=2))
    assert not [bad for batch in batches for bad in batch.bad]
    found = pa.concat_tables([schema.arrow().empty_table(), *(batch.rows for batch in batches)])
    assert found.equals(table)


@given(tables())
def test_json_lines_read_back_as_they_were(case: tuple[CollectionSchema, pa.Table]) -> None:
    _round_trip(*case, InputFormat.JSONL, write_json_lines)


@given(tables(lists=False, empty_text=False))
def test_csv_reads_back_as_it_was_but_for_empty_text(case: tuple[CollectionSchema, pa.Table]) -> None:
    _round_trip(*case, InputFormat.CSV, write_csv)


@given(tables())
def test_parquet_reads_back_as_it_was(case: tuple[CollectionSchema, pa.Table]) -> None:
    _round_trip(*case, InputFormat.PARQUET, write_parquet)


def _read(
    kind: InputFormat, text: bytes, schema: CollectionSchema = SCHEMA, **options: Any
) -> tuple[list[int], dict[int, str]]:
    """The ids that came through, and the bad rows by line."""
    batches = list(read_batches(io.BytesIO(text), kind, schema, batch_rows=3, **options))
    ids = [number for batch in batches for number in batch.rows["id"].to_pylist()]
    return ids, {bad.line: bad.why for batch in batches for bad in batch.bad}


@pytest.mark.parametrize(
    "line, why",
    [
        (b'{"id": "5"}', "id: '5' is not int64"),
        (b'{"id": 5.0}', "id: 5.0 is not int64"),
        (b'{"id": true}', "id: True is not int64"),
        (b'{"id": 9223372036854775808}', "is not int64"),
        (b'{"id": null}', "id is missing or null"),
        (b"{}", "id is missing or null"),
        (b'{"id": 1, "name": 7}', "name: 7 is not string"),
        (b'{"id": 1, "name": "\\ud800"}', "is not string"),
        (b'{"id": 1, "nmae": "Ada"}', "no field 'nmae'"),
        (b'{"id": 1', "not JSON at character 9: Expecting"),
        (b'{"id": 1}{"id": 2}', "not JSON at character 10: Extra data"),
        (b"null", "it is NoneType, not an object"),
        (b"[1]", "it is list, not an object"),
        (b'{"id": 1, "name": "\xff"}', "byte 20 is not UTF-8"),
        (b'{"id":' + b"[" * 200_000, "it nests too deeply"),
        (b'{"id": ' + b"9" * 10_000 + b"}", ""),
    ],
    ids=range(16),
)
def test_a_bad_line_is_told_with_its_number_and_loses_no_other(line: bytes, why: str) -> None:
    ids, bad = _read(InputFormat.JSONL, b'{"id": 10}\n\n' + line + b'\n{"id": 11}\n{"id": 12}\n')
    assert ids == [10, 11, 12]
    assert list(bad) == [3]
    assert why in bad[3]


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=8))
def test_no_line_of_any_bytes_gets_in_the_way_of_the_others(lines: list[bytes]) -> None:
    noise = b"".join(b'{"id": %d}\n' % number + line + b"\n" for number, line in enumerate(lines))
    ids, bad = _read(InputFormat.JSONL, noise)
    assert ids == list(range(len(lines)))
    assert all(line % 2 == 0 for line in bad)


def test_a_csv_row_is_told_with_the_line_that_it_begins_on() -> None:
    text = b'\xef\xbb\xbfid,name\r\n1,"two\nlines"\nx,a\n\n2\n3,"a,b"\n4,\xff\n5,c"d\n6,"e"f\n7,""\n8,"open'
    ids, bad = _read(InputFormat.CSV, text)
    assert ids == [1, 3, 5, 7]
    assert {line: why[:14] for line, why in bad.items()} == {
        4: "id: 'x' is not",
        6: "it has 1 cells",
        8: "name: '\\udcff'",
        10: "',' expected a",
        12: "unexpected end",
    }


@pytest.mark.parametrize(
    "text", [b"", b"name\nAda\n", b"id,nmae\n1,Ada\n", b"id,id\n1,2\n"], ids=["empty", "key", "unknown", "twice"]
)
def test_a_csv_header_that_does_not_fit_fails_the_file(text: bytes) -> None:
    with pytest.raises(InvalidArgument):
        _read(InputFormat.CSV, text)


def test_csv_has_no_lists() -> None:
    schema = CollectionSchema((*SCHEMA.fields, FieldSpec("tags", "list<string>", True)), "id")
    with pytest.raises(InvalidArgument, match="tags"):
        _read(InputFormat.CSV, b"id\n1\n", schema)
    with pytest.raises(InvalidArgument, match="tags"):
        write_csv(schema.arrow().empty_table(), io.BytesIO())


def test_parquet_values_that_would_lose_something_are_bad_rows() -> None:
    file = io.BytesIO()
    parquet.write_table(pa.table({"id": [1.0, 2.5, None, 4.0], "name": ["a", "b", "c", None]}), file)
    ids, bad = _read(InputFormat.PARQUET, file.getvalue())
    assert ids == [1, 4]
    assert bad == {2: "id: 2.5 is not int64", 3: "id is missing or null"}


def test_what_is_no_parquet_fails_the_file() -> None:
    with pytest.raises(InvalidArgument, match="Parquet"):
        _read(InputFormat.PARQUET, b"id\n1\n")


def test_keys_alone_ignore_the_other_columns() -> None:
    ids, bad = _read(InputFormat.JSONL, b'{"id": 1, "more": {}}\n{"more": 2}\n', keys_only=True)
    assert (ids, list(bad)) == ([1], [2])


def test_a_value_that_names_no_partition_is_a_bad_row() -> None:
    text = b'{"id": 1, "name": "eu"}\n{"id": 2, "name": "mars"}\n{"id": 3}\n'
    ids, bad = _read(InputFormat.JSONL, text, allowed=("name", ["eu", "us"]))
    assert ids == [1]
    assert bad == {2: "name: there is no partition 'mars'", 3: "name: there is no partition None"}


def test_a_timestamp_without_a_zone_is_utc_and_a_day_is_its_midnight() -> None:
    schema = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("at", "timestamp", True)), "id")
    texts = [
        "2026-11-21",
        "2026-11-21T00:00:00",
        "2026-11-21 00:00:00Z",
        "2026-11-21T02:00:00+02:00",
        "2026-11-20T22:00-0200",
    ]
    text = "".join(f'{{"id": 1, "at": "{each}"}}\n' for each in texts).encode()
    found = [
        value
        for batch in read_batches(io.BytesIO(text), InputFormat.JSONL, schema, batch_rows=9)
        for value in batch.rows["at"].to_pylist()
    ]
    assert found == [datetime(2026, 11, 21, tzinfo=UTC)] * len(texts)
