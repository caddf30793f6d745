"""File formats, how their rows are written, and compression: gzip, zstd, bzip2."""

from __future__ import annotations

import bz2
import gzip
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final, cast

import pyarrow as pa

from millrace.base.errors import InvalidArgument

STDIN: Final = "-"
COMPRESSED_SUFFIXES: Final = (".gz", ".zst", ".zstd", ".bz2")
_GLOB: Final = frozenset("*?[")


class InputFormat(StrEnum):
    """Format of a file's rows."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    AVRO = "avro"


_SUFFIXES: Final = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".json": InputFormat.JSON,
    ".csv": InputFormat.CSV,
    ".tsv": InputFormat.CSV,
    ".parquet": InputFormat.PARQUET,
    ".pq": InputFormat.PARQUET,
    ".arrow": InputFormat.ARROW,
    ".arrows": InputFormat.ARROW,
    ".feather": InputFormat.ARROW,
    ".avro": InputFormat.AVRO,
}


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """The format of a CSV file.

    `nulls` are the cell texts that mean null in a nullable field. `dates` and `timestamps` are strptime formats
    (default: ISO 8601).
    """

    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    encoding: str = "utf-8"
    nulls: tuple[str, ...] = ("",)
    decimal: str = "."
    dates: str | None = None
    timestamps: str | None = None

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or len(self.quote) > 1:
            raise InvalidArgument("the CSV delimiter is one character, and the quote at most one")
        if self.decimal not in (".", ",") or self.decimal == self.delimiter:
            raise InvalidArgument("the CSV decimal mark is a point or a comma, and differs from the delimiter")
        try:
            "".encode(self.encoding)
        except LookupError:
            raise InvalidArgument(f"there is no encoding {self.encoding!r}") from None


def format_of(path: Path, given: InputFormat | None = None) -> InputFormat:
    """Return the format of a file: `given`, or by its suffix before that of a compression (stdin: JSON lines).

    Raises InvalidArgument.
    """
    if given is not None:
        return given
    if str(path) == STDIN:
        return InputFormat.JSONL
    bare = path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path
    found = _SUFFIXES.get(bare.suffix.lower())
    if found is None:
        raise InvalidArgument(
            f"{path.name}: the suffix {path.suffix!r} names no format; say --format {', '.join(InputFormat)}"
        )
    return found


def expand_paths(sources: Iterable[Path], given: InputFormat | None = None) -> list[Path]:
    """Return the files that `sources` name, in order.

    A source is a file, a pattern (``day=*/*.csv``), or a folder, which means all files below it with a known
    suffix, sorted by name.

    Raises InvalidArgument if a source names no file.
    """
    found: dict[Path, None] = {}
    for source in sources:
        if str(source) == STDIN:
            chosen = [source]
        elif source.is_dir():
            chosen = sorted(each for each in source.rglob("*") if each.is_file() and _is_rows(each, source, given))
        elif _GLOB & set(str(source)) and not source.exists():
            root = Path(source.anchor) if source.is_absolute() else Path()
            chosen = sorted(each for each in root.glob(str(source.relative_to(root))) if each.is_file())
        else:
            chosen = [source]
        if not chosen:
            raise InvalidArgument(f"{source} names no file of rows")
        found |= dict.fromkeys(chosen)
    return list(found)


def _is_rows(path: Path, folder: Path, given: InputFormat | None) -> bool:
    """Return whether a file in a folder has rows; hidden files and Spark's ``_SUCCESS`` do not."""
    if any(part.startswith((".", "_")) for part in path.relative_to(folder).parts):
        return False
    try:
        return bool(format_of(path, given))
    except InvalidArgument:
        return False


@contextmanager
def decompressed(source: BinaryIO) -> Iterator[BinaryIO]:
    """Open `source`, decompressed if its first bytes say that it is compressed.

    Reading raises OSError or EOFError if the data is damaged or cut off.
    """
    buffered = source if isinstance(source, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, source))
    start = buffered.peek(4)[:4]
    try:
        if start.startswith(b"\x1f\x8b"):
            yield cast(BinaryIO, gzip.GzipFile(fileobj=buffered))
        elif start.startswith(b"BZh"):
            yield cast(BinaryIO, bz2.BZ2File(buffered))
        elif start == b"\x28\xb5\x2f\xfd":
            yield cast(BinaryIO, io.BufferedReader(pa.input_stream(buffered, compression="zstd"), 1 << 20))
        else:
            yield cast(BinaryIO, buffered)
    finally:
        if buffered is not source and not buffered.closed:
            buffered.detach()  # closing it would close the caller's stream
