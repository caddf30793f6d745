"""A batch appender that knows its collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.base.closeable import Closeable
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import Keys, Rows

if TYPE_CHECKING:
    from millrace.client.produce.batch_appender import BatchAppender


class CollectionBatch(Closeable):
    """A batch appender of one collection. Thread-safe; made by :meth:`millrace.client.database.CollectionInfo.batch`."""

    def __init__(self, definition: CollectionInfo, appender: BatchAppender) -> None:
        self._definition = definition
        self._appender = appender

    def insert(self, rows: Rows, **where: Any) -> Any:
        """Take rows to append; a future of :class:`Written`. Raises BufferFull, InvalidArgument."""
        return self._appender.insert(self._definition, rows, **where)

    def upsert(self, rows: Rows, **where: Any) -> Any:
        """Take rows to upsert; as `insert`."""
        return self._appender.upsert(self._definition, rows, **where)

    def delete(self, keys: Keys, **where: Any) -> Any:
        """Take keys to delete; as `insert`."""
        return self._appender.delete(self._definition, keys, **where)

    def flush(self) -> None:
        """Send all that is held now, and wait until it is settled. Raises DeadlineExceeded."""
        self._appender.flush()

    def close(self) -> None:
        """Flush and stop. Raises DeadlineExceeded where anything was given up."""
        self._appender.close()
