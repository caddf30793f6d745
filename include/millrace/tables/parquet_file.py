"""One Parquet file of a Delta table, durable before anyone hears of it: what every writer of ours writes files with.

The file goes past the page cache (millrace.tables.direct_file). When :meth:`ParquetFile.close` returns, its bytes, its name and
the folders above it are durable, and its footer says what is in it. Naming it in a commit is left to others; so is a name that
no other attempt has: a file that is there already is never written over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from millrace.errors import TableDamaged
from millrace.tables.direct_file import DirectFile
from millrace.tables.fsync import make_folder, sync

REPAIR: Final = "run the operation recovery (mode repair), which makes it anew"
CHECKED: Final = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
"""How datasets read our files: pages that have a checksum must match it."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Reading the file (or the files of the table) at `path`: one that is missing or does not read is TableDamaged."""
    try:
        yield
    except TableDamaged:
        raise
    except FileNotFoundError as error:
        raise TableDamaged(
            f"a file of a table is missing: {error.filename or error}: {REPAIR}", missing=True
        ) from error
    except (pa.ArrowException, OSError, LookupError, UnicodeError) as error:  # the last two: a garbled footer's names
        if isinstance(error, MemoryError) or getattr(error, "errno", None):
            raise
        raise TableDamaged(f"{path} does not read ({error}): {REPAIR}") from error


@contextmanager
def opened(path: Path, *, read_dictionary: Sequence[str] | None = None) -> Iterator[pq.ParquetFile]:
    """The file at `path`, for reading: pages that have a checksum must match it. Raises TableDamaged."""
    with (
        readable(path),
        pq.ParquetFile(path, read_dictionary=read_dictionary, page_checksum_verification=True) as file,
    ):
        yield file


def read_file(path: Path) -> pa.Table:
    """All rows of the file at `path`. Raises TableDamaged."""
    with opened(path) as file:
        return file.read()


@dataclass(frozen=True, slots=True)
class Written:
    """A durable file: its size in bytes, its footer, and when it was written (Unix milliseconds)."""

    size: int
    footer: pq.FileMetaData
    written_ms: int

    def bounds(self, columns: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """Least and greatest value of those `columns` for which the footer has both, over all row groups."""
        found: dict[str, tuple[Any, Any]] = {}
        for place in range(self.footer.num_columns):
            name = self.footer.schema.column(place).path
            if name not in columns:
                continue
            groups = [
                self.footer.row_group(group).column(place).statistics for group in range(self.footer.num_row_groups)
            ]
            if groups and all(group is not None and group.has_min_max for group in groups):
                found[name] = min(group.min for group in groups), max(group.max for group in groups)
        return found


class ParquetFile:
    """A new file at `path` of rows of `schema`, made with the `options` of pyarrow's ParquetWriter."""

    def __init__(self, path: Path, schema: pa.Schema, *, options: Mapping[str, Any]) -> None:
        self.path = path
        make_folder(path.parent)
        self._sink = DirectFile(path)
        self._footers: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            store_schema=False,
            metadata_collector=self._footers,
            **{"write_page_checksum": True, **options},
        )

    def write(self, rows: pa.Table | pa.RecordBatch, *, row_group_size: int | None = None) -> None:
        """Add rows, in row groups of their own; of at most `row_group_size` rows each."""
        self._writer.write(rows, row_group_size)

    def close(self) -> Written:
        """End the file and make it durable, with its name."""
        self._writer.close()
        size = self._sink.sync()
        self._sink.close()
        sync(self.path.parent)
        (footer,) = self._footers
        return Written(size, footer, self.path.stat().st_mtime_ns // 1_000_000)

    def discard(self) -> None:
        """Remove the file."""
        # What made the attempt fail (a full disk) makes closing fail too, and the file goes in any case.
        for stream in (self._writer, self._sink):
            with suppress(OSError, pa.ArrowException, RuntimeError):
                stream.close()
        self.path.unlink(missing_ok=True)
