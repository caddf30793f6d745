"""The rows of one file as JSON, in pages, with the types of its columns.

A row that cannot be read has a fault, and the text of its line if the format has lines. Types are inferred: for CSV
from all of its rows, so it is read twice; for JSON and Avro page by page. Parquet and Arrow declare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.base.extras import missing_extra_error
from millrace.client.produce.column_conversion import CONVERSION_ERRORS, from_arrow
from millrace.client.produce.files.csv_format import csv_reader, csv_rows, from_cells
from millrace.client.produce.files.formats import CsvOptions, InputFormat, decompressed
from millrace.client.produce.files.json_parser import JsonObjectParser, begins_array
from millrace.client.produce.files.row_conversion import RawRows
from millrace.client.produce.files.text_formats import READ_ERRORS, read_error
from millrace.flows.documents import JSON_ERRORS, decoded
from millrace.flows.sources.capture.polling import encode
from millrace.message.field_types import FieldType, parse_type, type_of_arrow
from millrace.message.schema_changes import widens

MAX_LINE: Final = 32 << 20
"""The most bytes of a line of JSON; no message holds a longer one."""
PAGE_BYTES: Final = 32 << 20
"""Bytes of a page as JSON, and about those of the rows of a file that are read at once, however few rows these are."""
MAX_TEXT: Final = 64 << 10
"""The most bytes of an unreadable line in its dead letter."""
_CANDIDATES: Final = ("int64", "float64", "bool", "date", "timestamp")
"""Types of CSV cells. The first one that fits all of a column's cells is chosen; otherwise they are strings."""
_NUMBERS: Final = ("int64", "float64")
_NO_NUMBER: Final = r"^\s*[+-]?0[0-9]|[0-9]{16}"
"""Cells that look like numbers but are not: 007, or more digits than a float has."""
_KINDS: Final[Mapping[type, str]] = {bool: "bool", int: "int64", float: "float64", str: "string"}
_BLANK: Final = b" \t\r\n"


class Row(NamedTuple):
    """A row: its place in the file, and its JSON or its fault."""

    line: int
    """Its line, or its number (from 1) for formats without lines."""
    value: bytes
    """JSON; for an unreadable row its text, if it has one."""
    fault: str = ""


class Page(NamedTuple):
    """Rows in order, and the types of the columns as known at the last of them."""

    rows: list[Row]
    types: Mapping[str, str]


def joined(have: str | None, more: str, *, other: str = "string") -> str:
    """Return the type that holds the values of both; `other` if there is none."""
    if have is None or have == more:
        return more
    one, two = parse_type(have), parse_type(more)
    if widens(one, two):
        return more
    if widens(two, one):
        return have
    return "float64" if {one.kind, two.kind} <= {"int64", "float64", "float32"} else other


def pages(
    path: Path, kind: InputFormat, csv: CsvOptions, *, declared: Mapping[str, str], known: Mapping[str, str], size: int
) -> Iterator[Page]:
    """Yield the rows of a file, `size` at once. `known` are the types of earlier files.

    Raises InvalidArgument if the file cannot be read, or not to its end, and OSError.
    """
    try:
        yield from _pages(path, kind, csv, declared, known, size)
    except (InvalidArgument, OSError):
        raise
    except Exception as error:  # of a library, which has more kinds than its documentation: other files go on
        raise InvalidArgument(f"the {kind} file cannot be read: {type(error).__name__}: {error}") from error


def _pages(
    path: Path, kind: InputFormat, csv: CsvOptions, declared: Mapping[str, str], known: Mapping[str, str], size: int
) -> Iterator[Page]:
    types = {**known, **declared}
    if kind is InputFormat.CSV:
        yield from _csv(path, csv, declared, known, size)
    elif kind in (InputFormat.PARQUET, InputFormat.ARROW):
        yield from _typed(path, kind, types, size)
    else:
        with path.open("rb") as file, decompressed(file) as source:
            if kind is InputFormat.AVRO:
                rows = _avro(source)
            else:
                rows = _elements(source) if kind is InputFormat.JSON and begins_array(source) else _lines(source)
            yield from _json(rows, types, size, frozenset(declared))


# --- JSON -------------------------------------------------------------------------------------------------------------


def _lines(source: BinaryIO) -> Iterator[Row]:
    number = 0
    try:
        while line := source.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE and not line.endswith(b"\n"):
                while (rest := source.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                yield Row(number, line[:MAX_TEXT], f"the line is longer than {MAX_LINE} bytes")
                continue
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            text = text.strip(_BLANK)
            if text:
                yield Row(number, text)
    except READ_ERRORS as error:
        raise read_error(number + 1, error) from None


def _elements(source: BinaryIO) -> Iterator[Row]:
    for line, found in JsonObjectParser().parse_array(source):
        if isinstance(found, ValueError):
            yield Row(line, b"", str(found))
        else:
            yield Row(line, _with_digits(found))


def _with_digits(value: Any) -> bytes:
    def plain(each: Any) -> Any:
        if isinstance(each, dict):
            return {name: plain(part) for name, part in each.items()}
        if isinstance(each, list):
            return [plain(part) for part in each]
        text = getattr(each, "text", None)
        return each if text is None else msgspec.Raw(text.encode())

    return encode(plain(value))


def _json(rows: Iterator[Row], types: Mapping[str, str], size: int, declared: frozenset[str]) -> Iterator[Page]:
    found = dict(types)
    for part in _parts(rows, size):
        for place, row in enumerate(part):
            if row.fault:
                continue
            try:
                document = decoded(row.value)
            except JSON_ERRORS as error:
                part[place] = Row(row.line, row.value[:MAX_TEXT], f"not JSON: {error}")
                continue
            for name, value in document.items() if isinstance(document, dict) else ():
                if value is None or name in declared:
                    continue
                have, kind = found.get(name), _KINDS.get(type(value), "float64" if isinstance(value, float) else "json")
                if have != kind:
                    found[name] = joined(have, kind, other="json")
        yield Page(part, dict(found))


def _parts(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    part: list[Row] = []
    held = 0
    for row in rows:
        part.append(row)
        held += len(row.value)
        if len(part) >= size or held >= PAGE_BYTES:
            yield part
            part, held = [], 0
    if part:
        yield part


# --- CSV --------------------------------------------------------------------------------------------------------------


def _csv(
    path: Path, form: CsvOptions, declared: Mapping[str, str], known: Mapping[str, str], size: int
) -> Iterator[Page]:
    names = list(declared)
    if form.header:
        with path.open("rb") as file, decompressed(file) as source:
            try:
                names = next(csv_reader(source, form), [])
            except READ_ERRORS as error:
                raise read_error(1, error) from None
    if not names:
        return
    texts = pa.schema([pa.field(name, pa.utf8()) for name in names])

    def parts() -> Iterator[RawRows]:
        with path.open("rb") as file, decompressed(file) as source:
            for raws in csv_rows(source, texts, size, False, True, form, batch_bytes=PAGE_BYTES):
                yield from raws

    left = {name: list(_CANDIDATES) for name in names if name not in declared}
    filled: set[str] = set()
    for raw in parts():
        for name, candidates in left.items():
            _narrow(raw.columns[name], name, candidates, filled, form)
    types = dict(known) | dict(declared)
    for name, candidates in left.items():
        if name in filled:
            types[name] = joined(known.get(name), candidates[0] if candidates else "string")
    kinds = {name: parse_type(types.get(name, "string")) for name in names}
    rows = (row for raw in parts() for row in _converted(raw, kinds, form, path))
    for part in _parts(rows, size):
        yield Page(part, types)


def _narrow(values: Any, name: str, candidates: list[str], filled: set[str], form: CsvOptions) -> None:
    """Remove the `candidates` that do not fit all of `values`."""
    cells = _cells(values)[0].drop_null()
    if not len(cells):
        return
    filled.add(name)
    numbers = not pc.any(pc.match_substring_regex(cells, _NO_NUMBER)).as_py()
    candidates[:] = [each for each in candidates if (numbers or each not in _NUMBERS) and _takes(each, cells, form)]


def _cells(values: Any) -> tuple[pa.Array, list[int]]:
    """Return the cells of a column, and the places of those that the file's encoding does not allow, which are null."""
    if isinstance(values, pa.Array):
        return values, []
    try:
        return pa.array(values, pa.utf8()), []
    except UnicodeEncodeError:
        wrong = [place for place, each in enumerate(values) if each is not None and not _is_text(each)]
        bad = frozenset(wrong)
        return pa.array([None if place in bad else each for place, each in enumerate(values)], pa.utf8()), wrong


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _takes(kind: str, cells: pa.Array, form: CsvOptions) -> bool:
    try:
        from_cells(cells, parse_type(kind), form)
    except CONVERSION_ERRORS:
        return False
    return True


def _converted(raw: RawRows, kinds: Mapping[str, FieldType], form: CsvOptions, path: Path) -> list[Row]:
    """Return rows in the order of their lines. A cell that does not fit its type is a fault of its row."""
    columns: dict[str, list[Any]] = {}
    faults: dict[int, str] = {}
    for name, kind in kinds.items():
        cells, unreadable = _cells(raw.columns[name])
        for place in unreadable:
            faults.setdefault(place, f"{name}: it is not {form.encoding}")
        try:
            columns[name] = from_cells(cells, kind, form).to_pylist()
        except CONVERSION_ERRORS:
            columns[name] = made = []
            for place, cell in enumerate(cells):
                try:
                    made += from_cells(pa.array([cell.as_py()], pa.utf8()), kind, form).to_pylist()
                except CONVERSION_ERRORS:
                    made.append(None)
                    faults.setdefault(place, f"{name}: {cell.as_py()[:80]!r} is not a valid {kind.text}")
    found = []
    for place, (line, values) in enumerate(zip(raw.lines.tolist(), zip(*columns.values(), strict=True), strict=True)):
        fault = faults.get(place, "")
        found.append(Row(line, b"" if fault else encode(dict(zip(columns, values, strict=True))), fault))
    found += [Row(each.line, b"", each.why) for each in raw.bad]
    wrong = {each.line for each in found if each.fault}
    texts = _texts(path, wrong, form) if wrong else {}
    found = [each._replace(value=texts.get(each.line, b"")) if each.fault else each for each in found]
    return sorted(found, key=lambda each: each.line)


def _texts(path: Path, lines: set[int], form: CsvOptions) -> dict[int, bytes]:
    """Return the text of some lines, as UTF-8."""
    last = max(lines)
    with path.open("rb") as file, decompressed(file) as source:
        part = enumerate(islice(source, last), 1)
        return {
            number: text.strip(_BLANK)[:MAX_TEXT].decode(form.encoding, "replace").encode()
            for number, text in part
            if number in lines
        }


# --- formats with types -----------------------------------------------------------------------------------------------


def _typed(path: Path, kind: InputFormat, known: Mapping[str, str], size: int) -> Iterator[Page]:
    try:
        schema, batches = _parquet(path, size) if kind is InputFormat.PARQUET else _arrow(path, size)
        own = {field.name: type_of_arrow(field.name, field.type) for field in schema}
        types = {**known, **{name: joined(known.get(name), each.text) for name, each in own.items()}}
        strings = [name for name, each in own.items() if types[name] == "string" and each.kind != "string"]
        first = 1
        for batch in batches:
            columns = [from_arrow(batch.column(name), each).to_pylist() for name, each in own.items()]
            rows = []
            for line, values in enumerate(zip(*columns, strict=True), first):
                row = dict(zip(own, values, strict=True))
                for name in strings:
                    if row[name] is not None:
                        row[name] = encode(row[name]).decode().strip('"')
                rows.append(Row(line, encode(row)))
            first += len(rows)
            for part in _parts(iter(rows), size):
                yield Page(part, types)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidArgument(f"the {kind} file cannot be read: {error}") from None


def _parquet(path: Path, size: int) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path, coerce_int96_timestamp_unit="us", page_checksum_verification=True)
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    most = max((each.total_byte_size // max(1, each.num_rows) for each in groups), default=0)
    at_once = max(1, min(size, PAGE_BYTES // max(1, most)))
    return file.schema_arrow, (part for each in file.iter_batches(at_once) for part in _sized(each, size))


def _arrow(path: Path, size: int) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    source = pa.OSFile(str(path))  # a map would end the process if somebody shortened the file
    if source.read(6) == b"ARROW1":
        file = pa.ipc.open_file(source)
        schema, batches = file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        schema, batches = stream.schema, iter(stream)
    return schema, (part for each in batches for part in _sized(each, size))


def _sized(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Divide a batch into parts of at most `size` rows, and of about PAGE_BYTES if its rows are alike."""
    at_once = max(1, min(size, batch.num_rows * PAGE_BYTES // max(1, batch.nbytes)))
    return (batch.slice(first, at_once) for first in range(0, batch.num_rows, at_once))


def _avro(source: BinaryIO) -> Iterator[Row]:
    try:
        import fastavro
    except ModuleNotFoundError as error:
        raise missing_extra_error(error) or error from None
    try:
        for number, row in enumerate(fastavro.reader(source), 1):
            yield Row(number, encode(row))
    except (ValueError, EOFError, IndexError, KeyError, TypeError) as error:
        raise InvalidArgument(f"the Avro file cannot be read: {error}") from None
