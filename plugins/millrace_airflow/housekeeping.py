"""Trims Airflow's metadata database with `airflow db clean`, in its own process.

    python -m millrace_airflow.housekeeping --before 2026-11-01T00:00:00+00:00 [--dry-run]

Prints one line of JSON: rows by table, freed bytes, and what was not removed. Not every table that `airflow db clean`
supports may be trimmed by age:

- ``trigger``: the watcher of the asset `segments_flushed` is a row as old as the installation, and so is a long wait in
  the triggerer. Airflow removes unused rows itself.
- ``dag``: it stores whether a user paused a DAG. After a month without Airflow, each row would be older than a month.

DAGs with unfinished runs of that age (which wait for an approval) are left out until they end. The newest scheduled run
of each DAG stays, so that its schedule continues.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sqlite3
import sys
from contextlib import closing, redirect_stdout
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, Final

from millrace_airflow.sqlite import WAIT_SECONDS

OF_DAGS: Final = ("dag_run", "dag_version", "job", "log")
"""Tables to trim DAG by DAG. `airflow db clean` adds their dependents: task instances, their history, XComs, ..."""
OF_ALL: Final = (
    "asset_event",
    "callback",
    "connection_test_request",
    "import_error",
    "partitioned_asset_key_log",
    "revoked_token",
)
"""Tables to trim by age only."""
NOT_BY_DAG: Final = ["deadline"]
"""Tables that `airflow db clean` adds to OF_DAGS but cannot trim DAG by DAG: Airflow 3.3.2 names a missing column.
Their rows are removed with those of their runs."""
BATCH_ROWS: Final = 5_000
"""Rows of one transaction. SQLite has one writer at a time, and the scheduler waits for it."""
SPARE_SHARE: Final = 0.25
"""The share of unused pages from which an SQLite file is rewritten."""
SPARE_BYTES: Final = 16 << 20
"""The bytes of unused pages below which rewriting is not worthwhile."""

_FOUND: Final = re.compile(r"^Checking table (\w+)\nFound (\d+) rows", re.MULTILINE)


def main() -> int:
    """Trim, print what was removed, and return 0."""
    parser = argparse.ArgumentParser(description="Trims Airflow's metadata database.")
    parser.add_argument("--before", required=True, type=datetime.fromisoformat)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    # Before Airflow's settings are imported: wait for other writers.
    os.environ.setdefault("AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS", "millrace_airflow.sqlite.CONNECT_ARGS")
    with redirect_stdout(sys.stderr):  # Airflow prints while it is imported
        found = trim(arguments.before, dry_run=arguments.dry_run)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def trim(before: datetime, *, dry_run: bool) -> dict[str, Any]:
    """Remove rows that are older than `before`; the result is described in operations/housekeeping/airflow_history."""
    from airflow.configuration import conf
    from sqlalchemy.engine import make_url

    url = make_url(conf.get_mandatory_value("database", "sql_alchemy_conn"))
    file = Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None
    if file is not None and not file.is_file():
        words = f"no database at {file}: if an environment variable sets another one, set it in airflow.cfg"
        return {"rows": {}, "bytes": 0, "words": words}
    rows, busy = _clean(before, dry_run=dry_run)
    freed = 0 if file is None or dry_run else _give_back(file)
    words = f"the runs of {', '.join(busy)} stay: one of them has not ended for so long" if busy else ""
    return {"rows": rows, "bytes": freed, "words": words}


def _clean(before: datetime, *, dry_run: bool) -> tuple[dict[str, int], list[str]]:
    """Return the rows removed by table, and the DAGs that were left out."""
    from airflow.utils.db_cleanup import run_cleanup

    busy = _unfinished_since(before)
    said = StringIO()
    try:
        with redirect_stdout(said):
            for tables, left_out in ((OF_DAGS, busy), (OF_ALL, [])):
                try:
                    run_cleanup(
                        clean_before_timestamp=before,  # type: ignore[arg-type] # it takes any datetime
                        table_names=list(tables),
                        exclude_dag_ids=left_out or None,
                        dry_run=dry_run,
                        confirm=False,
                        skip_archive=True,
                        batch_size=BATCH_ROWS,
                        error_on_cleanup_failure=True,
                    )
                except RuntimeError as error:  # raised last, with the tables that failed
                    if not left_out or f": {NOT_BY_DAG}." not in str(error):
                        raise
    finally:
        sys.stderr.write(said.getvalue())
    rows: dict[str, int] = {}
    for table, count in _FOUND.findall(said.getvalue()):
        rows[table] = rows.get(table, 0) + int(count)
    return {table: count for table, count in rows.items() if count}, busy


def _unfinished_since(before: datetime) -> list[str]:
    """Return the DAGs that have a run which began before that moment and has not ended."""
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from airflow.utils.state import State
    from sqlalchemy import select

    wanted = select(DagRun.dag_id).where(DagRun.start_date < before, DagRun.state.in_(State.unfinished_dr_states))
    with create_session() as session:
        return sorted(set(session.scalars(wanted)))


def _give_back(file: Path) -> int:
    """Rewrite an SQLite file if much of it is unused, and return the bytes by which it shrank.

    If the file is busy, or the disk has no room for a second copy, do nothing: unused pages are reused.
    """
    size = file.stat().st_size
    with closing(sqlite3.connect(file, timeout=WAIT_SECONDS)) as database:
        spare, page = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
        if spare * page < max(SPARE_BYTES, SPARE_SHARE * size):
            return 0
        try:
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            sys.stderr.write(f"{file} keeps its unused pages: {error}\n")
    return max(0, size - file.stat().st_size)


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    """Leave through Airflow's finally clauses, which drop the table of the current batch."""
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main())
