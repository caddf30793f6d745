"""Pins: readers and tasks that use old versions of a deployment's tables for long, so that no file of them is removed.

A pin is a file whose name says since when versions are in use, and until when the pin is valid. Its process renews it,
so a killed process holds nothing for longer than PIN_SECONDS. The same form works on a local disk and in an object
store. A read that takes less than ``file_retention`` needs no pin (millrace.storage.replaced_files).
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from millrace.storage.store import TableStore, store_at

PIN_SECONDS: Final = 300.0
"""Time that a pin is valid without renewal. It bears with clocks of hosts that differ by a minute."""
_RENEW_SECONDS: Final = 60.0
_log = logging.getLogger(__name__)
_NAME: Final = re.compile(r"(\d{13})-(\d{13})-[0-9a-f]{16}\.pin")


class TablePins:
    """The pins of one deployment's tables, in the folder at `uri`."""

    def __init__(self, uri: object, *, now: Callable[[], float] = time.time) -> None:
        """`now` returns Unix seconds."""
        self._store: TableStore = store_at(uri)
        self._now = now

    def oldest(self) -> int | None:
        """Return the time since when a reader uses old versions, in Unix milliseconds; None if there is no pin.

        Removes pins of processes that were killed.
        """
        now, found = self._ms(), []
        for name in self._store.list(""):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            if int(match[2]) < now:
                self._store.delete([name])
            else:
                found.append(int(match[1]))
        return min(found, default=None)

    @contextmanager
    def pinned(self, since_ms: int | None = None) -> Iterator[None]:
        """Keep the files of all table versions of now, or of Unix time `since_ms`, until the block ends.

        Where the pin cannot be written, such as in a copy that may only be read, the block runs without.
        """
        since = self._ms() if since_ms is None else since_ms
        ended = threading.Event()
        held: list[str] = []

        def renew() -> None:
            while not ended.wait(_RENEW_SECONDS):
                put()

        def put() -> None:
            try:
                held.append(self._put(since))
                self._store.delete(held[:-1])
                del held[:-1]
            except OSError as error:
                _log.warning("cannot pin the tables (%s): a long read may have to be repeated", error)

        put()

        thread = threading.Thread(target=renew, name="table-pin", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._store.delete(held)

    def _put(self, since: int) -> str:
        name = f"{since:013d}-{self._ms() + int(PIN_SECONDS * 1000):013d}-{secrets.token_hex(8)}.pin"
        file = self._store.put(name)
        try:
            file.sync()
        finally:
            file.close()
        return name

    def _ms(self) -> int:
        return int(self._now() * 1000)
