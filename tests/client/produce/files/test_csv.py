"""CSV by Arrow and row by row: the same batches, bad rows, lines and errors, whatever the text is."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from decimal import Decimal
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import CONVERSION_ERRORS
from millrace.client.produce.files import csv_format
from millrace.client.produce.files.formats import CsvOptions, InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.client.produce.files.row_conversion import RowBatch, from_text
from millrace.message.field_types import parse_type
from millrace.message.schema import CollectionSchema, FieldSpec

KINDS = (
    "string", "int64", "int8", "float64", "bool", "date", "timestamp", "timestamp_ntz", "decimal(6,2)", "uuid", "json",
    "binary",
)  # fmt: skip
GOOD = {
    "string": ["a", "Zürich", "x y", " ", "NA"],
    "int64": ["1", "-5", "007", "9223372036854775807"],
    "int8": ["1", "-128", "127"],
    "float64": ["1.5", "-2", "1e3", "nan", "inf", "1,5"],
    "bool": ["true", "false", "1", "0"],
    "date": ["2026-11-21", "0001-01-01", "9999-12-31", "21.11.2026"],
    "timestamp": ["2026-11-21T10:00:00Z", "2026-11-21 10:00:00.5", "2026-11-21", "2026-11-21T10:00:00+01:00"],
    "timestamp_ntz": ["2026-11-21T10:00:00", "2026-11-21 10:00:00.123456", "2026-11-21"],
    "decimal(6,2)": ["1.50", "-1234.5", "0.10", "1e2", "1.234,5"],
    "uuid": ["00000000-0000-0000-0000-00000000000A", "0" * 32],
    "json": ['{""a"": 1}', "1", '""x""'],
    "binary": ["aGVsbG8=", ""],
}
ODD = [
    "", "NA", " 1", "1 ", "+5", "0x10", "1_000", "1e400", "10000-01-01", "0000-01-01", "2026-11-21T10:00:00+00:19:32",
    "2026-11-21T10:00:00.1234567", "2026-11-21 10", "-", ".", "1.", ".5", "--1", "1.234", "99999.5", "Infinity", "a'b",
    'a"b', '"', '""', '"a"b', '"a" ', ' "a"', '"a""b"', '"a\nb"', '"a\r\nb"', '"a\rb"', '"a,b;c"', "a\x00b", "\ufeff",
    "\N{SNOWMAN}", "K",
]  # fmt: skip


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


@st.composite
def tables(draw: st.DrawFn) -> tuple[CollectionSchema, CsvOptions, bytes, dict[str, Any]]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    fields = [FieldSpec("k", draw(st.sampled_from(("string", "int64"))), False)]
    fields += [FieldSpec(f"f{place}", kind, draw(st.booleans())) for place, kind in enumerate(kinds)]
    form = CsvOptions(
        delimiter=draw(st.sampled_from(",,,;\t'")),
        quote=draw(st.sampled_from(['"', '"', '"', "'", ""])),
        header=draw(st.booleans()),
        encoding=draw(st.sampled_from(("utf-8", "utf-8", "utf-16", "latin-1", "ascii"))),
        nulls=draw(st.sampled_from((("",), ("", "NA"), ("NA",), ()))),
    )
    if form.delimiter != "," and draw(st.booleans()):
        form = CsvOptions(form.delimiter, form.quote, form.header, form.encoding, form.nulls, ",")
    names = [field.name for field in fields]
    shown = draw(st.permutations(names))
    if form.header and draw(st.integers(0, 3)) == 0:
        shown = [name for name in shown if name == "k" or draw(st.booleans())]
    by_name = {field.name: field.type for field in fields}
    rows: list[str] = [form.delimiter.join(shown)] if form.header else []
    columns = shown if form.header else names
    for _ in range(draw(st.integers(0, 12))):
        cells = []
        for name in columns:
            good = draw(st.integers(0, 5)) > 0
            cell = draw(st.sampled_from(GOOD[by_name[name]] if good else ODD))
            cells.append(quoted(cell) if good and draw(st.booleans()) else cell)
        if draw(st.integers(0, 15)) == 0:
            cells = draw(st.sampled_from([[], cells[1:], [*cells, "x"], [""]]))
        rows.append(form.delimiter.join(cells))
    ends = st.sampled_from(["\n"] * 12 + ["\r\n"] * 3 + ["\r", "\n\n", "\r\n\r\n"])
    text = "".join(row + draw(ends) for row in rows)
    if draw(st.booleans()):
        text = text.rstrip("\r\n")
    data = text.encode(form.encoding, "replace")
    if form.encoding == "utf-8" and draw(st.integers(0, 4)) == 0:
        data = b"\xef\xbb\xbf" + data
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(st.sampled_from([b"\xff", b"\xed\xb3\x83", b'"', b"\r"])) + data[place:]
    if draw(st.integers(0, 9)) == 0:
        packed = gzip.compress(data, mtime=0)
        data = packed[: len(packed) - draw(st.integers(0, 12))]
    options = {"batch_rows": draw(st.integers(1, 7)), "keys_only": form.header and draw(st.integers(0, 5)) == 0}
    return CollectionSchema(tuple(fields), "k"), form, data, options


def outcome(
    data: bytes, schema: CollectionSchema, form: CsvOptions, *, by_arrow: bool = True, **options: Any
) -> tuple[list[Any], str]:
    """By batch its rows, bad rows and last line; then the error that ended it."""
    found: list[Any] = []
    with mock.patch.object(csv_format, "fits_arrow", csv_format.fits_arrow if by_arrow else lambda form: False):
        try:
            for batch in read_batches(io.BytesIO(data), InputFormat.CSV, schema, form=form, **options):
                found.append((batch.rows.schema, repr(batch.rows.to_pylist()), batch.bad, batch.last_line))
        except InvalidArgument as error:
            return found, str(error)
    return found, ""


@given(tables(), st.sampled_from([(24, 8), (80, 20), (1 << 20, 1 << 14)]))
def test_arrow_and_the_csv_module_give_the_same_batches(
    table: tuple[CollectionSchema, CsvOptions, bytes, dict[str, Any]], sizes: tuple[int, int]
) -> None:
    schema, form, data, options = table
    with mock.patch.multiple(csv_format, BLOCK_BYTES=sizes[0], SMALL_BLOCK_BYTES=sizes[1]):
        by_arrow = outcome(data, schema, form, **options)
        by_row = outcome(data, schema, form, by_arrow=False, **options)
    assert by_arrow == by_row


@given(
    st.sampled_from(KINDS),
    st.lists(
        st.one_of(
            st.sampled_from([*ODD, *(text for texts in GOOD.values() for text in texts)]),
            st.text("0123456789+-.eE:TZ _", max_size=20),
        )
    ),
)
@example("decimal(6,2)", ["1.", ".5", "+1", "1e2", "1.230"])
@example("timestamp", ["2026-11-21", "2026-11-21T10:00:00Z"])
def test_a_column_converts_as_its_cells_do_one_by_one(name: str, texts: list[str]) -> None:
    """Whole columns take shortcuts that one cell beside others of another form does not."""
    kind = parse_type(name)
    others = {"timestamp": ["2026-11-21", "2026-11-21T10:00:00Z"], "decimal(6,2)": [" 1"], "int64": []}.get(name, [])

    def converted(cells: list[str]) -> list[Any] | None:
        try:
            return [repr(each) for each in from_text(pa.array(cells, pa.utf8()), kind).to_pylist()]
        except CONVERSION_ERRORS:
            return None

    alone = [converted([text, *others]) for text in texts]
    expected = None if None in alone else [each[0] for each in alone if each is not None]
    assert converted(texts) == expected


def test_decimals_keep_the_digits_that_the_csv_module_keeps() -> None:
    kind = parse_type("decimal(20,4)")
    texts = ["1234567890123456.7891", "-0.0001", "0", "7.0000"]
    assert from_text(pa.array(texts), kind).to_pylist() == [Decimal(each) for each in texts]
    for wrong in ("1.00001", "12345678901234567", "1_0", "٣"):
        with pytest.raises(CONVERSION_ERRORS):
            from_text(pa.array(["1", wrong]), kind)


FLAT = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("name", "string", True), FieldSpec("at", "timestamp", True)), "id"
)


def flat(rows: range, *, name: str = "a, b") -> bytes:
    return b"".join(b'%d,"%b",2026-11-21 10:00:00\r\n' % (row, name.encode()) for row in rows)


def read(data: bytes, **options: Any) -> list[RowBatch]:
    return list(read_batches(io.BytesIO(data), InputFormat.CSV, FLAT, **{"batch_rows": 1000} | options))


def test_a_plain_table_never_goes_row_by_row() -> None:
    data = b"id,name,at\n" + flat(range(5000)) + b'5000,"two\nlines",\n\n5002,,2026-11-21\n' + flat(range(5003, 9000))
    with mock.patch.object(csv_format, "_row_by_row", side_effect=AssertionError):
        batches = read(data)
    assert sum(batch.rows.num_rows for batch in batches) == 8999
    assert [len(batch.rows) for batch in batches][:-1] == [1000] * 8
    assert batches[-1].last_line == 9002


def test_a_broken_row_costs_its_neighbourhood_alone() -> None:
    data = b"id,name,at\n" + flat(range(20_000)) + b"1,2\n" + b'1,"a"b,\n' + flat(range(20_000))
    with mock.patch.object(csv_format, "_row_by_row", side_effect=csv_format._row_by_row) as by_row:
        batches = read(data)
    bad = [bad for batch in batches for bad in batch.bad]
    assert [(each.line, each.why) for each in bad] == [
        (20_002, "it has 2 cells, the header has 3"),
        (20_003, "',' expected after '\"'"),
    ]
    assert by_row.call_count <= 3
    assert sum(batch.rows.num_rows for batch in batches) == 40_000


class _Long(io.RawIOBase):
    """A file of so many MiB that nobody holds in whole."""

    def __init__(self, mib: int) -> None:
        self._part = flat(range(1 << 9), name="x" * 100)
        self._left = (mib << 20) // len(self._part)
        self._held = b"id,name,at\n"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._held and self._left:
            self._held, self._left = self._part, self._left - 1
        size = min(len(buffer), len(self._held))
        buffer[:size], self._held = self._held[:size], self._held[size:]
        return size


@pytest.mark.parametrize("by_arrow", [True, False])
def test_a_file_takes_no_more_memory_than_a_block_and_a_batch(by_arrow: bool) -> None:
    pool = pa.default_memory_pool()
    before, most, rows = pool.bytes_allocated(), 0, 0
    tracemalloc.start()
    try:
        with mock.patch.object(csv_format, "fits_arrow", return_value=by_arrow):
            source = io.BufferedReader(_Long(24 if by_arrow else 6), 1 << 16)
            for batch in read_batches(source, InputFormat.CSV, FLAT, batch_rows=5000):
                rows += batch.rows.num_rows
                most = max(most, pool.bytes_allocated() - before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows > 30_000
    assert peak < 12 << 20, f"{peak >> 20} MiB"
    assert most < 16 << 20, f"{most >> 20} MiB"


def test_a_file_that_is_not_in_its_encoding_is_an_error_with_its_line() -> None:
    form = CsvOptions(encoding="utf-16", header=False)
    data = "1,a,\n2,b,\n".encode("utf-16") + b"\x00"
    with pytest.raises(InvalidArgument, match="line 3: "):
        read(data, form=form)


def test_a_header_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="line 1: the header cannot be read"):
        read(b'"id"x,name\n1,2\n')
