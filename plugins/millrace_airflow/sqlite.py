"""Airflow's metadata database in SQLite: concurrent readers and one writer, and longer waits for another writer.

With SQLite's own defaults each reader blocks the writer, and a writer waits five seconds for another: dozens of
Airflow's processes then fail with "database is locked". This module is imported together with Airflow's settings, so it
imports nothing of Airflow.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from sqlalchemy.engine import make_url

WAIT_SECONDS: Final = 60.0
CONNECT_ARGS: Final[dict[str, Any]] = {"timeout": WAIT_SECONDS}
"""For ``[database] sql_alchemy_connect_args``: how long a statement waits for another's transaction."""


def enable_wal_mode(url: str) -> None:
    """Set the SQLite database at `url` to write-ahead logging. Any other database is not changed."""
    found = make_url(url)
    if found.get_backend_name() != "sqlite" or not found.database:
        return
    database = sqlite3.connect(found.database, timeout=WAIT_SECONDS)
    try:
        database.execute("PRAGMA journal_mode = WAL").fetchone()
    finally:
        database.close()
