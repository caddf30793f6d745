"""Translate SQLite's busy errors for files that several processes write."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from millrace.base.errors import MillraceError

_HELD: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@contextmanager
def translate_busy(refusal: Callable[[sqlite3.OperationalError], MillraceError]) -> Iterator[None]:
    """Raise `refusal(error)` instead of SQLite's busy or locked error inside the block; other errors pass through."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _HELD:
            raise
        raise refusal(error) from error
