"""Airflow's metadata database, where it is SQLite: readers and a writer beside each other, and patience with another
writer.

With SQLite's own defaults each reader keeps the writer out, and a writer waits five seconds for another: dozens of
Airflow's processes then end in "database is locked". Imported while Airflow's settings are: it imports nothing of
Airflow.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from sqlalchemy.engine import make_url

WAIT_SECONDS: Final = 60.0
CONNECT_ARGS: Final[dict[str, Any]] = {"timeout": WAIT_SECONDS}
"""For ``[database] sql_alchemy_connect_args``: how long a statement waits for another's transaction."""


def enable_wal_mode(url: str) -> None:
    """Have the SQLite database at `url` write ahead from now on; any other database is left as it is."""
    found = make_url(url)
    if found.get_backend_name() != "sqlite" or not found.database:
        return
    database = sqlite3.connect(found.database, timeout=WAIT_SECONDS)
    try:
        database.execute("PRAGMA journal_mode = WAL").fetchone()
    finally:
        database.close()
