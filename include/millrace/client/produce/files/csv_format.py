"""Rows of CSV files.

Arrow cuts a block of text into cells at a time (:class:`_ArrowCells`). It reads some text in another way than Python's
csv module in strict mode: it joins ``"a"b`` to one cell, and it does not tell the lines of rows. So a block goes to
Arrow only after a check in numpy that each quote opens, closes or is doubled, and it counts only if Arrow finds the
same number of rows. Everything else goes through the csv module, row by row: the block is halved twice, then twice
more, until what remains is small. Both give the same cells, and the same code converts them.

Memory: a block of text, and the cells of a batch. A row that is longer than a block is held whole.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO, Final, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import from_python
from millrace.client.produce.files.formats import CsvOptions
from millrace.client.produce.files.row_conversion import BadRow, RawRows, from_text
from millrace.client.produce.files.text_formats import READ_ERRORS, check_header, read_error
from millrace.message.field_types import FieldType

MAX_CELL_CHARACTERS: Final = 64 << 20
BLOCK_BYTES = 1 << 20
"""Text that Arrow cuts at a time."""
SMALL_BLOCK_BYTES = 1 << 14
"""Text that goes row by row if Arrow cannot be used for it."""

_BOM: Final = codecs.BOM_UTF8
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_NEWLINE: Final = 0x0A
_RETURN: Final = 0x0D
_BLANKS: Final = r"[ \t\n\v\f\r]*"
_GROUPED: Final = rf"^{_BLANKS}[+-]?\d{{1,3}}(\.\d{{3}})+(,\d*)?([eE][+-]?\d+)?{_BLANKS}$"
"""A number with points between thousands and a decimal comma."""


class _Text:
    """The text of a file, as UTF-8 bytes with a position at the start of a line.

    Bytes that the encoding does not allow are kept: they become lone surrogates in :meth:`decode`, which Arrow strings
    refuse. So that row is bad, and the others are read.
    """

    def __init__(self, source: BinaryIO, encoding: str) -> None:
        self._source = cast(io.BufferedIOBase, source)
        self._encoding = encoding
        utf8 = codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
        self._decoder = None if utf8 else codecs.getincrementaldecoder(encoding)("surrogateescape")
        self._errors = "surrogateescape" if utf8 else "surrogatepass"
        self._held = b""
        self._at = 0
        self._passed = 0
        self._started = not utf8
        self._ended = False
        self._failure: Exception | None = None
        self.line = 1
        """The number of the next line."""

    @property
    def position(self) -> int:
        """The bytes before the next line."""
        return self._passed + self._at

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left. Raises READ_ERRORS if the file cannot be read further."""
        self._fill(1)
        if self._at < len(self._held):
            return False
        self._check_failure()
        return True

    def block(self, size: int) -> tuple[bytes, bool]:
        """Return the next `size` bytes, or what is left of the text, and whether they are the last ones."""
        self._fill(size)
        block = self._held[self._at : self._at + size]
        return block, self._ended and self._failure is None and self._at + len(block) == len(self._held)

    def skip(self, size: int, lines: int) -> None:
        """Move on by so many bytes, which have so many line ends."""
        self._at += size
        self.line += lines

    def lines(self) -> Iterator[str]:
        """Yield the lines with their ends (``\\n``, ``\\r\\n`` or ``\\r``), and move on by each. Raises READ_ERRORS."""
        while not self.exhausted:
            yield self._next_line().decode("utf-8", self._errors)

    def _next_line(self) -> bytes:
        searched = 0
        while True:
            match = _LINE_END.search(self._held, self._at + searched)
            # A \r at the end of what is held may be half of \r\n.
            if match and (self._ended or match.end() < len(self._held) or match.group() != b"\r"):
                end = match.end()
                break
            if self._ended:
                self._check_failure()
                end = len(self._held)
                break
            searched = max(0, len(self._held) - self._at - 1)
            self._fill(2 * (searched + 1) + SMALL_BLOCK_BYTES)
        line = self._held[self._at : end]
        self.skip(len(line), 1)
        return line

    def _fill(self, size: int) -> None:
        """Hold `size` bytes or more from the position on, unless the text ends before."""
        have = len(self._held) - self._at
        if have >= size or self._ended:
            return
        parts = [self._held[self._at :]]
        size = max(size, BLOCK_BYTES)
        while have < size and not self._ended:
            part = self._read(size - have)
            parts.append(part)
            have += len(part)
        self._passed += self._at
        self._held, self._at = b"".join(parts), 0
        if not self._started:
            self._started = True
            self._held = self._held.removeprefix(_BOM)

    def _read(self, size: int) -> bytes:
        try:
            part = self._source.read1(size)  # read() would lose what it has when a compressed file breaks off
            self._ended = not part
            return part if self._decoder is None else self._decoder.decode(part, not part).encode("utf-8", self._errors)
        except UnicodeError:
            self._failure = OSError(f"it is not {self._encoding}")
        except READ_ERRORS as error:
            self._failure = error
        self._ended = True
        return b""

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _ArrowCells:
    """Cuts blocks of text into the cells of `header`'s columns, of which those in `wanted` are returned."""

    def __init__(self, form: CsvOptions, header: list[str], wanted: pa.Schema) -> None:
        from pyarrow import csv as arrow_csv

        self._form = form
        self._wanted = wanted
        self._read_csv = arrow_csv.read_csv
        self._options = arrow_csv.ReadOptions
        self._header = header
        self._columns = [name for name in wanted.names if name in header]
        self.usable = bool(header) and fits_arrow(form) and not any(map(_SURROGATE.search, header))
        if self.usable:
            included = self._columns or header[:1]
            texts = dict.fromkeys(included, pa.utf8())
            self._convert = arrow_csv.ConvertOptions(
                column_types=texts, include_columns=included, null_values=form.nulls, strings_can_be_null=True
            )
            self._required = [name for name in self._columns if not wanted.field(name).nullable]
            self._without_nulls = arrow_csv.ConvertOptions(column_types=texts, include_columns=self._required)
            self._parse = [
                # Finding the end of a block takes Arrow another pass if cells may have newlines.
                arrow_csv.ParseOptions(
                    delimiter=form.delimiter, quote_char=form.quote or False, newlines_in_values=spanning
                )
                for spanning in (False, True)
            ]

    def cut(self, text: _Text, size: int) -> RawRows | None:
        """Return the whole rows in the next `size` bytes, and move on by them; None if Arrow may differ."""
        if not self.usable:
            return None
        block, last = text.block(size)
        found = self._layout(block, last)
        if found is None or block.startswith(_BOM):  # which Arrow leaves out, here a part of a cell
            return None
        end, lines, first_lines, spanning = found
        try:
            table = self._read(memoryview(block)[:end], self._convert, spanning=spanning)
            again = table
            if any(table[name].null_count for name in self._required):  # where no text means null
                again = self._read(memoryview(block)[:end], self._without_nulls, spanning=spanning)
        except pa.ArrowInvalid:
            return None
        if table.num_rows != len(first_lines):
            return None
        columns = {}
        for field in self._wanted:
            if field.name in self._columns:
                columns[field.name] = pa.concat_arrays((table if field.nullable else again)[field.name].chunks)
            else:
                columns[field.name] = pa.nulls(len(table))
        numbers = first_lines + text.line
        text.skip(end, lines)
        return RawRows(numbers, columns, [])

    def _read(self, block: memoryview, convert: Any, *, spanning: bool) -> pa.Table:
        return self._read_csv(
            pa.py_buffer(block),
            read_options=self._options(column_names=self._header, block_size=len(block) + 1),
            parse_options=self._parse[spanning],
            convert_options=convert,
        )

    def _layout(self, block: bytes, last: bool) -> tuple[int, int, npt.NDArray[np.int64], bool] | None:
        """Return where a block's last whole row ends, the lines up to there, by row the lines before it, and whether a
        cell has a newline.

        None if the block has no whole row, a quote that does not open, close or is doubled, or a ``\\r`` alone.
        """
        data = np.frombuffer(block, np.uint8)
        newlines = np.flatnonzero(data == _NEWLINE)
        quotes = newlines[:0]
        ends = np.arange(len(newlines))  # of the newlines, those that end a row
        if self._form.quote and self._form.quote.encode() in block:
            quotes = np.flatnonzero(data == ord(self._form.quote))
            ends = np.flatnonzero(np.searchsorted(quotes, newlines) % 2 == 0)
        end = int(newlines[ends[-1]]) + 1 if len(ends) else 0
        if last and len(quotes) % 2 == 0:
            end = len(block)
        if not end:
            return None
        quotes = quotes[: np.searchsorted(quotes, end)]
        if len(quotes) and not self._regular(data, quotes, end):
            return None
        if b"\r" in block and block.count(b"\r", 0, end) != block.count(b"\r\n", 0, end):
            return None
        starts = np.concatenate([[0], newlines[ends] + 1])
        first_lines = np.concatenate([[0], ends + 1])
        stops = np.append(newlines[ends], end)
        filled = stops - starts > (data[np.minimum(starts, len(data) - 1)] == _RETURN)
        lines = int(np.searchsorted(newlines, end))
        return end, lines, first_lines[filled], lines > len(ends)

    def _regular(self, data: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64], end: int) -> bool:
        """Return whether each quote opens a cell, closes it, or is one of two that stand for one in a quoted cell."""
        quote, delimiter = ord(self._form.quote), ord(self._form.delimiter)
        before = data[np.maximum(quotes[0::2] - 1, 0)]
        opens = (before == delimiter) | (before == _NEWLINE) | (before == quote)
        opens[0] |= quotes[0] == 0
        after = data[np.minimum(quotes[1::2] + 1, end - 1)]
        closes = (after == delimiter) | (after == _NEWLINE) | (after == _RETURN) | (after == quote)
        return bool(opens.all() and closes.all())


def fits_arrow(form: CsvOptions) -> bool:
    """Return whether Arrow has the options of `form`: its delimiter and quote are one byte each."""
    signs = form.delimiter + form.quote
    return signs.isascii() and len(set(signs)) == len(signs) and not set(signs) & {"\r", "\n", "\0"}


def csv_rows(
    source: BinaryIO,
    wanted: pa.Schema,
    batch_rows: int,
    keys_only: bool,
    quote: bool,
    form: CsvOptions,
    *,
    batch_bytes: float = math.inf,
) -> Iterator[list[RawRows]]:
    """Yield the rows of a CSV file, with the columns of its header, or those of the schema if it has none.

    A batch comes in parts; it has `batch_rows` rows, bad ones included, or fewer if they have `batch_bytes`.
    """
    nested = [field.name for field in wanted if pa.types.is_nested(field.type)]
    if nested:
        raise InvalidArgument(
            f"CSV cannot hold lists, maps or structs (field {nested[0]!r}): write JSON lines or Parquet"
        )
    text = _Text(source, form.encoding)
    try:
        header = _header(text, form) if form.header else list(wanted.names)
        check_header(header or [], wanted, keys_only, quote)
        if header is not None:
            yield from _batches(text, header, wanted, batch_rows, batch_bytes, form)
    except READ_ERRORS as error:
        raise read_error(text.line, error) from None


def _batches(
    text: _Text, header: list[str], wanted: pa.Schema, batch_rows: int, batch_bytes: float, form: CsvOptions
) -> Iterator[list[RawRows]]:
    arrow, size = _ArrowCells(form, header, wanted), BLOCK_BYTES
    rest: RawRows | None = None
    ended = False
    while not ended:
        parts: list[RawRows] = []
        left, full = batch_rows, text.position + batch_bytes
        while left and (text.position < full or not parts):
            if rest is None and text.exhausted:
                ended = True
                break
            found, rest = rest or arrow.cut(text, size), None
            if found is not None:
                size = min(2 * size, BLOCK_BYTES)
                found, rest = _split(found, left)
            elif size > SMALL_BLOCK_BYTES and arrow.usable:
                size = max(size // 4, SMALL_BLOCK_BYTES)
                continue
            else:
                found = _row_by_row(text, header, wanted, form, size, left)
            parts.append(found)
            left -= len(found.lines) + len(found.bad)
        yield parts or [RawRows(np.empty(0, np.int64), {field.name: pa.nulls(0) for field in wanted}, [])]


def _split(found: RawRows, count: int) -> tuple[RawRows, RawRows | None]:
    """Return the first `count` rows, and the others."""
    if len(found.lines) <= count:
        return found, None
    first = {name: cells.slice(0, count) for name, cells in found.columns.items()}
    others = {name: cells.slice(count) for name, cells in found.columns.items()}
    return RawRows(found.lines[:count], first, []), RawRows(found.lines[count:], others, [])


def _header(text: _Text, form: CsvOptions) -> list[str] | None:
    """Return the cells of the header, None if the file is empty."""
    try:
        return next(_reader(text.lines(), form), None)
    except csv.Error as error:
        raise InvalidArgument(f"line 1: the header cannot be read: {error}") from None


def _row_by_row(text: _Text, header: list[str], wanted: pa.Schema, form: CsvOptions, size: int, most: int) -> RawRows:
    """Read rows with the csv module, up to the first one that ends `size` bytes on or later, or to `most` rows."""
    stop, nulls = text.position + size, frozenset(form.nulls)
    reader = _reader(text.lines(), form)
    lines: list[int] = []
    rows: list[list[str]] = []
    bad: list[BadRow] = []
    while len(rows) + len(bad) < most and text.position < stop:
        line = text.line  # the row's first line: a quoted cell may span lines
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            bad.append(BadRow(line, str(error)))
            continue
        except READ_ERRORS as error:
            raise read_error(line, error) from None
        if row and len(row) != len(header):
            bad.append(BadRow(line, f"it has {len(row)} cells, the header has {len(header)}"))
        elif row:
            lines.append(line)
            rows.append(row)
    cells = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else {}
    columns: dict[str, Any] = {}
    for field in wanted:
        if field.name not in cells:
            columns[field.name] = pa.nulls(len(rows))
        elif field.nullable:
            columns[field.name] = [None if cell in nulls else cell for cell in cells[field.name]]
        else:
            columns[field.name] = list(cells[field.name])
    return RawRows(np.array(lines, np.int64), columns, bad)


def csv_reader(source: BinaryIO, form: CsvOptions) -> Any:
    """Return a csv reader over `source`; it yields lists of cells, including the header's."""
    return _reader(_Text(source, form.encoding).lines(), form)


def _reader(lines: Iterator[str], form: CsvOptions) -> Any:
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    quoting: Literal[0, 3] = 0 if form.quote else 3  # csv.QUOTE_MINIMAL, csv.QUOTE_NONE
    return csv.reader(lines, strict=True, delimiter=form.delimiter, quotechar=form.quote or None, quoting=quoting)


def from_cells(values: Any, target: FieldType, form: CsvOptions) -> pa.Array:
    """Convert CSV cells, a list or an array of texts, to `target`."""
    texts = values if isinstance(values, pa.Array) else pa.array(values, pa.utf8())
    if pa.types.is_null(texts.type):  # the file has no such column
        return pa.nulls(len(texts), target.arrow)
    if form.decimal == "," and target.kind in ("float32", "float64", "decimal"):
        texts = _with_points(texts)
    pattern = {"date": form.dates, "timestamp": form.timestamps, "timestamp_ntz": form.timestamps}.get(target.kind)
    if pattern is None:
        return from_text(texts, target)
    distinct = texts.dictionary_encode()
    moments: list[Any] = [datetime.strptime(each, pattern) for each in distinct.dictionary.to_pylist()]  # noqa: DTZ007
    if target.kind == "date":
        moments = [each.date() for each in moments]
    return from_python(moments, target).take(distinct.indices)  # a timestamp without a zone is UTC


def _with_points(texts: pa.Array) -> pa.Array:
    """Replace decimal commas by points.

    A point that is not between thousands is refused: without this, 1.5 would become 15.
    """
    pointed = pc.match_substring(texts, ".")
    if pc.any(pc.and_not(pointed, pc.match_substring_regex(texts, _GROUPED))).as_py():
        raise ValueError("a point that is not between thousands")
    return pc.replace_substring(pc.replace_substring(texts, ".", ""), ",", ".")
