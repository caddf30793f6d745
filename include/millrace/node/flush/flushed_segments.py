"""The newest flushed segments in one small file, for Airflow's triggerer, which has no Delta reader.

The ``segments`` table is the truth. The file is written after the commit, and rebuilt from the table when the flusher
starts, so a crash in between loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.node.flush.flusher import FlushReport
from millrace.storage.parquet_file import read_file
from millrace.storage.store import store_at
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import PCHANNEL, read_segments

MAX_SEGMENTS: Final = 500
FLUSHED: Final = "flushed"

_COLUMNS: Final = ["collection_id", "segment_id", "rows", "bytes", "time_tick", "state"]


def flushed_segments_path(settings: Settings) -> Path:
    """Return the file with the newest flushed segments."""
    return settings.progress_path("flushed-segments")


class FlushedSegments:
    """Maintains the file. One writer: the flusher's driver."""

    def __init__(self, settings: Settings) -> None:
        self._uri = settings.segments_uri
        self._file = flushed_segments_path(settings)
        stored = read_segments(open_table(self._uri))
        self._segments = _newest_flushed(stored.select([PCHANNEL, *_COLUMNS]).to_pylist())
        self._write()

    def record(self, reports: Sequence[FlushReport]) -> None:
        """Add the segments that the committed `reports` flushed."""
        fresh = [
            {PCHANNEL: report.channel, **row}
            for report in reports
            for action in report.segments.actions
            for row in read_file(store_at(self._uri), action.path).select(_COLUMNS).to_pylist()
        ]
        if any(row["state"] == FLUSHED for row in fresh):
            self._segments = _newest_flushed([*self._segments, *fresh])
            self._write()

    def _write(self) -> None:
        replace_json(self._file, {"segments": self._segments})


def _newest_flushed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    flushed = [row for row in rows if row["state"] == FLUSHED]
    return sorted(flushed, key=lambda row: (row["time_tick"], row["segment_id"]))[-MAX_SEGMENTS:]
