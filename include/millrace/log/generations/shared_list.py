"""The list of the log's backends in the tables' store, for machines that do not share a log folder.

    <tables>/log/<number>.json

Each change has the next number, and is put only if the number is free: of two machines that change the list at once,
one reads the other's first. A machine's file (millrace.log.generations.generation_file) is a copy of the newest. Each
process reads it when it opens the log, and before it changes the list. Only deployments with an object store have this.
A process that outlives a move of the tables (millrace.operations.move) goes on where they are then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings, follows
from millrace.storage.store import ConditionalStore, TableStore, conditional, store_at

KEEP: Final = 3
"""Number of lists to retain, so that a reader that has just listed them can still read the newest."""
_FOLDER: Final = "log"
_DIGITS: Final = 20


class SharedList:
    """The lists below the URI that `uri` returns. None: the tables lie on a disk now, and nothing is shared."""

    def __init__(self, uri: Callable[[], str | None]) -> None:
        self._uri = uri

    def _lists(self) -> ConditionalStore | None:
        uri = self._uri()
        return None if uri is None else conditional(store_at(uri))

    def is_there(self) -> bool:
        """Return whether the tables lie in an object store now."""
        return self._uri() is not None

    def newest(self) -> tuple[int, bytes]:
        """Return the newest list and its number; 0 and nothing if there is none. Raises LogUnavailable."""
        store = self._lists()
        if store is None:
            return 0, b""
        for _ in range(KEEP):
            try:
                names = store.list("")
                if not names:
                    return 0, b""
                data = store.read(names[-1])
            except OSError as error:
                raise _unavailable(store, error) from error
            if data is not None:  # else others have changed it so often meanwhile
                return int(names[-1].partition(".")[0]), data
        raise LogUnavailable(f"the list of the log's backends in {store.uri} changes all the time: retry")

    def put(self, number: int, data: bytes) -> bool:
        """Put a list with this number. Returns False if the number is taken. Raises LogUnavailable."""
        store = self._lists()
        if store is None:
            return True
        name = f"{number:0{_DIGITS}d}.json"
        try:
            made = store.put_if_absent(name, data)
        except OSError as error:
            try:
                there = store.read(name)
            except OSError:
                raise _unavailable(store, error) from error
            if there is None:
                raise _unavailable(store, error) from error
            made = there == data
        if made:
            try:
                store.delete(store.list("")[:-KEEP])
            except OSError:
                pass  # the next change removes them
        return made


def _unavailable(store: TableStore, error: OSError) -> LogUnavailable:
    return LogUnavailable(f"cannot reach the list of the log's backends in {store.uri} ({error}): retry")


def shared_list(settings: Settings) -> SharedList | None:
    """Return the deployment's shared list; None if its tables lie on a disk, and the settings do not follow a move."""

    def uri() -> str | None:
        scheme, separator, _ = settings.tables_place.partition("://")
        return settings.table_uri(_FOLDER) if separator and scheme != "file" else None

    return SharedList(uri) if follows(settings) or uri() is not None else None
