"""SQLite files that several processes write in turn: who waits for another one's transaction for too long gets an error that says so."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from millrace.base.errors import MillraceError

_HELD: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@contextmanager
def translate_busy(refusal: Callable[[sqlite3.OperationalError], MillraceError]) -> Iterator[None]:
    """Inside, what another process keeps from this one is what `refusal` makes of SQLite's error; any other one goes through."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _HELD:
            raise
        raise refusal(error) from error
