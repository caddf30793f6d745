"""The publish status of a collection, for views: version, tick, rows, lag and its reason."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.message.ids import tick_physical_ms
from millrace.node.publish.publisher import DELETES_VERSION, MASKED_ROWS, ROWS_VERSION, WHOLE, pause_after
from millrace.storage.published import VECTOR_BYTES, PublishedTable
from millrace.storage.store import store_at
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import deletes_uri, published_uri, rows_uri


@dataclass(frozen=True, slots=True)
class PublishedStatus:
    """The publish status of one collection."""

    uri: str
    """URI of the published table."""
    version: int | None
    """The newest version of the table; None: nothing is published yet."""
    tick: int
    """Tick that its rows are of; 0 if nothing is published yet."""
    rows: int
    lag_seconds: float
    """Age of that tick, if the collection's tables have news since; else 0.0."""
    error: str
    """Reason that the last attempt to publish failed; empty if it did not."""
    vector_bytes_per_row: float = 0.0
    """Bytes of deletion vectors that the newest version wrote for each row of an older file that it hides."""
    pause_seconds: float = 0.0
    """Pause before the next publish, because the vectors outweighed what was flushed; else 0.0."""

    @property
    def words(self) -> str:
        """The status in one line."""
        if self.error:
            return f"not published: {self.error}" if self.version is None else f"{self.uri}, behind: {self.error}"
        if self.version is None:
            return "nothing yet"
        late = f", {self.lag_seconds:.0f} s behind" if self.lag_seconds else ""
        cost = f"{self.vector_bytes_per_row:,.0f} bytes a changed row"
        slow = f", published every {self.pause_seconds:.0f} s for its deletion vectors ({cost})"
        slow = slow if self.pause_seconds else ""
        return f"{self.uri}: {self.rows:,} rows at tick {self.tick}{late}{slow}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def published_status(settings: Settings, collection_id: int) -> PublishedStatus:
    """Return what is published of a collection. Opens its tables.

    A table or a place that cannot be published from is an error of the status, not of this call.
    """
    error = publish_failures(settings).get(collection_id, "")
    uri = ""
    try:
        uri = published_uri(settings, collection_id)
        table = PublishedTable.open(store_at(uri))
        if table is None:
            return PublishedStatus(uri, None, 0, 0, 0.0, error)
        rows, deletes = (open_table(each(settings, collection_id)) for each in (rows_uri, deletes_uri))
        info = table.commit_info
        versions = [-1 if each is None else each.version for each in (rows, deletes)]
        now = dict(zip((ROWS_VERSION, DELETES_VERSION), versions, strict=True))
        current = bool(info.get(WHOLE)) and all(info.get(name) == version for name, version in now.items())
        lag = 0.0 if current else max(0.0, time.time() - tick_physical_ms(table.tick) / 1000)
        per_row = info.get(VECTOR_BYTES, 0) / max(1, info.get(MASKED_ROWS, 0))
        pause = pause_after(info, settings.publish_interval)
        return PublishedStatus(
            uri, table.version, table.tick, table.row_count, round(lag, 3), error, round(per_row, 1), round(pause, 1)
        )
    except MillraceError as failure:
        return PublishedStatus(uri, None, 0, 0, 0.0, error or f"{failure.code}: {failure}")


def publish_failures(settings: Settings) -> dict[int, str]:
    """Return by collection why its last publish failed, of those whose last publish did. Reads one small file."""
    from millrace.node.publish.definition import NAME

    try:
        found = json.loads(settings.progress_path(NAME).read_text(encoding="utf-8"))["pchannels"]
    except (OSError, ValueError, KeyError):
        return {}
    return {int(name): str(each["failure"]) for name, each in found.items() if each.get("failure")}
