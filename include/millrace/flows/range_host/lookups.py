"""The rows of a collection by key, for lookups: read in full, and again once they are older than the step allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from millrace.base.errors import InvalidSettings, MillraceError
from millrace.base.settings import Settings
from millrace.flows.declare.steps import Lookup
from millrace.flows.documents import Refused
from millrace.flows.range_host.in_hand import alarm_paused
from millrace.flows.transform.casts import to_string

MAX_ROWS: Final = 1_000_000
"""The most rows that a lookup holds in memory."""


class CollectionRows:
    """Rows as JSON values, by the text of their primary key. Thread-safe: the tasks of a process share them."""

    def __init__(self, settings: Settings, step: Lookup) -> None:
        self._settings, self._step = settings, step
        self._rows: dict[str, dict[str, Any]] | None = None
        self._read_at = 0.0
        self._lock = threading.Lock()

    def get(self, key: str, /) -> Mapping[str, Any] | None:
        """Return the row of `key`, or None.

        If the collection cannot be read, use the old rows; raise if there are none.
        """
        rows = self._rows
        if rows is None or time.monotonic() - self._read_at >= self._step.refresh_seconds:
            rows = self._fresh()
        return rows.get(key)

    def _fresh(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            if self._rows is None or time.monotonic() - self._read_at >= self._step.refresh_seconds:
                try:
                    with alarm_paused():
                        self._rows = self._read()
                except MillraceError as error:
                    if self._rows is None or not error.retriable:
                        raise
                self._read_at = time.monotonic()
            return self._rows

    def _read(self) -> dict[str, dict[str, Any]]:
        import msgspec

        from millrace.client.database import connect

        step = self._step
        with connect(self._settings.data_dir, settings=self._settings) as database:
            collection = database[step.collection]
            keys = collection.schema.key_names
            if len(keys) != 1:
                raise InvalidSettings(
                    f"collection {step.collection}: a lookup needs a primary key of one field, not {len(keys)}"
                )
            rows = collection.read(limit=MAX_ROWS + 1)
        if rows.num_rows > MAX_ROWS:
            raise InvalidSettings(
                f"collection {step.collection} has more than {MAX_ROWS} rows, too many for a lookup in memory"
            )
        found = {}
        for row in rows.select([name for name in rows.column_names if not name.startswith("_")]).to_pylist():
            plain = msgspec.to_builtins(row, builtin_types=())
            try:
                found[to_string(plain[keys[0]])] = plain
            except Refused as error:
                raise InvalidSettings(
                    f"collection {step.collection}: the key of a lookup must be a text or a number: {error}"
                ) from None
        return found
