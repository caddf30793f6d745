"""Folds of the tables that the flusher appends to, after its commits and in its process (millrace.tables.rewrite.fold).

A table is looked at after every FAN_IN files that a flush added to it, so the cost follows the flushes and not the
tables. Folds are of no consequence for a flush: a failed one is logged, and repeated after the next files.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Final

from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.message.stored_columns import key_columns
from millrace.node.flush.flusher import DELETES, FlushReport
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.rewrite.fold import FAN_IN, fold_files
from millrace.tables.rewrite.rewrite import merge_job, segments_job

FOLD_SECONDS: Final = 5.0
"""Time that folds may take after one flush. The remaining folds are due after the next flush."""

_log: Final = logging.getLogger(__name__)


class FlushedFiles:
    """Counts the files of flushes by table, and folds a table's small files when enough were added."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._added: Counter[str] = Counter()
        self._keys: dict[str, tuple[str, ...]] = {}
        """Columns of the primary key by table of a collection, of tables that are due."""

    def record(self, reports: Sequence[FlushReport]) -> None:
        """Count the files of the committed `reports`, and fold the tables that are due."""
        segments = self._settings.segments_uri
        for report in reports:
            self._add(segments, len(report.segments.actions))
            for number, parts in report.collections.items():
                for kind, part in parts.items():
                    uri = (deletes_uri if kind == DELETES else rows_uri)(self._settings, number)
                    if self._add(uri, len(part.actions)):
                        self._keys[uri] = key_columns(report.schemas[number])
        end = time.monotonic() + FOLD_SECONDS
        for uri in [*self._keys, *([segments] if self._added[segments] >= FAN_IN else [])]:
            if time.monotonic() >= end:
                break
            self._fold(uri, self._keys.pop(uri, None))
            self._added[uri] = 0

    def _add(self, uri: str, files: int) -> bool:
        """Count files and return whether the table is due. After a start, tables are due in turn, not all at once."""
        if uri not in self._added:
            self._added[uri] = zlib.crc32(uri.encode()) % FAN_IN
        self._added[uri] += files
        return self._added[uri] >= FAN_IN

    def _fold(self, uri: str, key: tuple[str, ...] | None) -> None:
        try:
            table = table_at(uri)
            done, given_up = fold_files(table, segments_job(uri) if key is None else merge_job(table, key))
        except (MillraceError, OSError) as error:
            _log.warning("small files of %s stay for now: %s", uri, error)
            return
        for words in given_up:
            _log.info("small files of %s stay for now: %s", uri, words)
        self._metrics.flusher_folded_bytes_total.inc(sum(each.group.size for each in done))
