"""The list of the log's backends in the tables' store, for machines that do not share a log folder.

    <tables>/log/<number>.json

Each change has the next number, and is put only if the number is free: of two machines that change the list at once,
one reads the other's first. A machine's file (millrace.log.generations.generation_file) is a copy of the newest. Each
process reads it when it opens the log, and before it changes the list. Only deployments with an object store have this.
"""

from __future__ import annotations

from typing import Final

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.storage.store import conditional, store_at

KEEP: Final = 3
"""Lists that stay: who has just listed them still reads the newest."""
_FOLDER: Final = "log"
_DIGITS: Final = 20


class SharedList:
    """The lists below a store's URI."""

    def __init__(self, uri: str) -> None:
        self._store = conditional(store_at(uri))

    def newest(self) -> tuple[int, bytes]:
        """Return the newest list and its number; 0 and nothing if there is none. Raises LogUnavailable."""
        for _ in range(KEEP):
            try:
                names = self._store.list("")
                if not names:
                    return 0, b""
                data = self._store.read(names[-1])
            except OSError as error:
                raise self._unavailable(error) from error
            if data is not None:  # else others have changed it so often meanwhile
                return int(names[-1].partition(".")[0]), data
        raise LogUnavailable(f"the list of the log's backends in {self._store.uri} changes all the time: retry")

    def put(self, number: int, data: bytes) -> bool:
        """Put a list with this number. Returns False if the number is taken. Raises LogUnavailable."""
        name = f"{number:0{_DIGITS}d}.json"
        try:
            made = self._store.put_if_absent(name, data)
        except OSError as error:
            try:
                there = self._store.read(name)
            except OSError:
                raise self._unavailable(error) from error
            if there is None:
                raise self._unavailable(error) from error
            made = there == data
        if made:
            try:
                self._store.delete(self._store.list("")[:-KEEP])
            except OSError:
                pass  # the next change removes them
        return made

    def _unavailable(self, error: OSError) -> LogUnavailable:
        return LogUnavailable(f"cannot reach the list of the log's backends in {self._store.uri} ({error}): retry")


def shared_list(settings: Settings) -> SharedList | None:
    """Return the deployment's shared list; None if its tables lie on a disk."""
    scheme, elsewhere, _ = settings.tables_place.partition("://")
    return SharedList(settings.table_uri(_FOLDER)) if elsewhere and scheme != "file" else None
