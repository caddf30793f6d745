"""Views of table health, and of what operations and quality checks recorded. Missing data yields empty views."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from heapq import nlargest
from typing import Any, Final

import numpy as np

from millrace.base.settings import Settings
from millrace.client.progress import operation_words
from millrace.observe.models import OperationRow, QualityBlock, QualityRow, QualityTable, QualityView, TableView
from millrace.observe.payloads import truncate_value
from millrace.observe.table_cache import TableSnapshot
from millrace.operations.quality.results import KIND_RESULT, read_state
from millrace.runtime.launch import history as launch_history
from millrace.runtime.launch.folder import RUN_ID_PATTERN, RunFolder, operations_path, read_json
from millrace.runtime.launch.launcher import log_tail
from millrace.runtime.spark.slots import EXPECTED_START, JOBS_AHEAD
from millrace.storage.store import table_name
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import deletes_uri, rows_uri

SMALL_FILE_BYTES: Final = 16 << 20
MAX_OPERATIONS: Final = 200
MAX_LINES_SEARCHED: Final = 2000
"""Lines of the history that are searched for operations of one job."""
MAX_RUN_FOLDERS: Final = 100
"""Run folders that are read, newest first."""
MAX_TEXT_CHARACTERS: Final = 2000
LOG_LINES: Final = 200
"""Lines of a run's log that its page shows."""

_KINDS: Final = {"rows": rows_uri, "deletes": deletes_uri}
_QUALITY_TEXTS: Final = ("run_id", "table", "expectation", "column", "source", "severity", "observed", "words", "error")
_QUALITY: Final = ["at", *_QUALITY_TEXTS, "critical", "success", "elements", "unexpected"]


def table_view(name: str, title: str, pinned: TableSnapshot) -> TableView:
    """Return a table's files by number and size."""
    sizes = pinned.sizes()
    return TableView(
        name=name,
        title=title,
        version=pinned.version,
        files=len(sizes),
        bytes=int(sizes.sum()) if len(sizes) else 0,
        rows=pinned.total("num_records"),
        small_files=int((sizes < SMALL_FILE_BYTES).sum()),
        largest=int(sizes.max()) if len(sizes) else 0,
        median=int(np.median(sizes)) if len(sizes) else 0,
    )


class TableSurvey:
    """The health of the collections' tables. Each call looks at some of them again, in turn, for a limited time.

    So the page of ten thousand collections costs as much as that of a few, and shows what was seen last. Thread-safe.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str], TableView] = {}
        self._due: deque[tuple[int, str]] = deque()

    def look(self, names: Mapping[int, str], *, seconds: float, limit: int) -> tuple[list[TableView], int]:
        """Return the `limit` tables with the most small files, the worst first, and how many tables are known.

        `names`: the collections by id. Looks at tables for about `seconds`, and at least at one.
        """
        with self._lock:
            for key in [key for key in self._known if key[0] not in names]:
                del self._known[key]
            until, left = self._clock() + seconds, 2 * len(names)
            while left and (not self._due or self._clock() < until):
                if not self._due:
                    self._due.extend((number, kind) for number in names for kind in _KINDS)
                number, kind = self._due.popleft()
                left -= 1
                if number in names:
                    self._look(number, kind, names[number])
            worst = nlargest(limit, self._known.values(), key=lambda each: (each.small_files, each.bytes))
            return worst, len(self._known)

    def _look(self, number: int, kind: str, name: str) -> None:
        uri = _KINDS[kind](self._settings, number)
        table = open_table(uri)
        if table is None:
            self._known.pop((number, kind), None)
            return
        title = name if kind == "rows" else f"{name}, deletes"
        shown = table_name(self._settings.tables_uri, uri)
        self._known[number, kind] = table_view(shown, title, TableSnapshot(table))


def finished_operations(settings: Settings, *, job: str = "", limit: int = 50) -> list[OperationRow]:
    """Return the last finished operations, newest first, of one job if given."""
    lines = launch_history.read_history(
        launch_history.history_path(settings, launch_history.OPERATIONS), limit=MAX_LINES_SEARCHED if job else limit
    )
    return [_finished(value) for value in lines if not job or value.get("job") == job][:limit]


def run_attempts(settings: Settings, run: str) -> list[OperationRow]:
    """Return the attempts of one run, newest first, including a running one.

    `run` is the id shown by its Airflow task.
    """
    history = launch_history.history_path(settings, launch_history.OPERATIONS)
    ended = [
        _finished(value)
        for value in launch_history.read_history(history, limit=MAX_LINES_SEARCHED)
        if value.get("run_id") == run
    ]
    return [*(each for each in running_operations(settings) if each.run_id == run), *ended]


def run_log(settings: Settings, run: str) -> str:
    """Return the last lines of a run's log, or "" if there is none."""
    if RUN_ID_PATTERN.fullmatch(run) is None:
        return ""
    return log_tail(RunFolder(settings, run).log, lines=LOG_LINES)


def _finished(value: Mapping[str, Any]) -> OperationRow:
    """Parse a line of the history. Missing or invalid fields are left out."""
    error = value.get("error")
    return OperationRow(
        job=str(value.get("job") or "?")[:80],
        run_id=str(value.get("run_id") or "")[:250],
        state=str(value.get("state") or "?")[:40],
        attempt=value["attempt"] if isinstance(value.get("attempt"), int) else 1,
        started=unix_seconds(value.get("started_at")),
        ended=unix_seconds(value.get("ended_at")),
        words=f"{error.get('code', '')}: {error.get('message', '')}"[:MAX_TEXT_CHARACTERS]
        if isinstance(error, dict)
        else "",
        params=_object(value.get("params")),
        report=_object(value.get("report")),
    )


def running_operations(settings: Settings) -> list[OperationRow]:
    """Return operations whose job is alive, by their run folders.

    Those that wait for a slot have the state "waiting".
    """
    try:
        runs = sorted(operations_path(settings).iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return []
    found = []
    for path in runs[:MAX_RUN_FOLDERS]:
        if RUN_ID_PATTERN.fullmatch(path.name) is None:
            continue
        run = RunFolder(settings, path.name)
        if not run.is_locked():
            continue
        asked, progress = read_json(run.params) or {}, read_json(run.progress) or {}
        done = progress.get("done")
        figures = dict(progress.get("figures") or {})
        before, expected = figures.pop(JOBS_AHEAD, None), figures.pop(EXPECTED_START, None)
        found.append(
            OperationRow(
                job=str(asked.get("job") or "?")[:80],
                run_id=path.name,
                state="running" if before is None else "waiting",
                attempt=asked["attempt"] if isinstance(asked.get("attempt"), int) else 1,
                started=unix_seconds(asked.get("started_at") or asked.get("at")),
                ended=None,
                words=operation_words(progress)[:MAX_TEXT_CHARACTERS],
                done=float(done) if isinstance(done, int | float) else None,
                before=before,
                expected_start=unix_seconds(expected),
                params=_object(asked.get("params")),
                report=_object(figures),
            )
        )
    return found


def _object(value: Any) -> dict[str, Any]:
    shown, _ = truncate_value(value if isinstance(value, dict) else {})
    return dict(shown)


def unix_seconds(value: Any) -> float | None:
    """Return a time (a number, ISO 8601, or a datetime) in Unix seconds, or None for anything else."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


def quality_view(
    settings: Settings, pinned: TableSnapshot | None, *, limit: int, names: Mapping[int, str]
) -> QualityView:
    """Return the results of the newest runs and their blocks, or an empty view before the first check.

    `names` are the collections' by id.

    `docs` is not set.
    """
    if pinned is None:
        return QualityView(present=False, rows=[], blocks=[], docs=False)
    blocks = [
        QualityBlock(
            id=each.id,
            table=each.table,
            expectation=each.expectation,
            run_id=each.run_id,
            at=unix_seconds(each.at),
            words=each.words[:MAX_TEXT_CHARACTERS],
        )
        for each in read_state(settings).blocks
    ]
    rows = [each.model_copy(update={"title": title_of(each.table, names)}) for each in _quality_rows(pinned, limit)]
    blocks = [each.model_copy(update={"title": title_of(each.table, names)}) for each in blocks]
    tables = quality_tables(rows)
    return QualityView(
        present=True, words=quality_sentence(tables), tables=tables, rows=rows, blocks=blocks, docs=False
    )


def title_of(table: str, names: Mapping[int, str]) -> str:
    """Return a checked table's name for people: ``collections/3`` is the collection's name."""
    kind, _, number = table.partition("/")
    return names.get(int(number), table) if kind == "collections" and number.isdigit() else table


def quality_tables(rows: Iterable[QualityRow]) -> list[QualityTable]:
    """Return the newest result of each expectation in `rows` (newest first), by table, those with failures first."""
    newest: dict[str, dict[tuple[str, str, str], QualityRow]] = {}
    for each in rows:
        newest.setdefault(each.title, {}).setdefault((each.expectation, each.column, each.source), each)
    tables = [
        QualityTable(
            title=title,
            at=max((each.at for each in found.values() if each.at is not None), default=None),
            expectations=len(found),
            failed=sorted((each for each in found.values() if not each.success), key=lambda each: not each.critical),
        )
        for title, found in newest.items()
    ]
    return sorted(tables, key=lambda each: (not each.failed, each.title))


def quality_sentence(tables: Sequence[QualityTable]) -> str:
    """Return the state of the checks in one sentence, failures first."""
    total, failed = sum(each.expectations for each in tables), sum(len(each.failed) for each in tables)
    if not total:
        return ""
    names = [each.title for each in tables if each.failed]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    tables_checked = f"{len(tables)} {'table' if len(tables) == 1 else 'tables'}"
    if not failed:
        return f"All {total} expectations on {tables_checked} hold."
    critical = sum(row.critical for each in tables for row in each.failed)
    return (
        f"{failed} of {total} expectations on {tables_checked} failed, {critical or 'none'} of them critical:"
        f" {', '.join(names[:3])}{more}."
    )


def _quality_rows(pinned: TableSnapshot, limit: int) -> list[QualityRow]:
    """Return the newest results, from the newest files until there are enough."""
    files = sorted(
        (
            (str(at), path)
            for at, path, kind in zip(
                pinned.column("modification_time"), pinned.column("path"), pinned.column("partition.kind"), strict=True
            )
            if kind == KIND_RESULT
        ),
        reverse=True,
    )
    found: list[QualityRow] = []
    for _, path in files:
        with pinned.opened(path) as parquet:
            for batch in parquet.iter_batches(batch_size=1024, columns=_QUALITY):
                found += map(_quality_row, batch.to_pylist())
        found = sorted(found, key=lambda each: each.at or 0.0, reverse=True)[:limit]
        if len(found) >= limit:
            break
    return found


def _quality_row(row: dict[str, Any]) -> QualityRow:
    texts = {name: str(row[name] or "")[:MAX_TEXT_CHARACTERS] for name in _QUALITY_TEXTS}
    return QualityRow(
        **texts,
        at=unix_seconds(row["at"]),
        critical=bool(row["critical"]),
        success=bool(row["success"]),
        elements=row["elements"] or 0,
        unexpected=row["unexpected"] or 0,
    )
