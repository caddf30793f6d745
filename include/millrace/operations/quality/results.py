"""The Delta table ``quality/results``: one row per expectation and run, and one state row accumulated over all runs.

Partitioned by `kind` (``result`` or ``state``). The rows of a run and the new state are one commit, so the gate never
sees one without the other. Of two concurrent runs the second is fenced, and then folds its results into the state of
the first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import DeadlineExceeded, TableUnavailable
from millrace.base.settings import Settings
from millrace.operations.quality.checks import TableCheckResult
from millrace.operations.quality.state import QualityState, apply_run
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.parquet_file import FileAction
from millrace.storage.table import TableHandle, create_table, open_table
from millrace.tables.quality_state import KIND_STATE, files_of_kind, quality_results_uri, read_state_row

KIND_RESULT: Final = "result"
APP_ID: Final = "quality"
ATTEMPTS: Final = 20
COMPACT_REVISIONS: Final = 32
"""Runs between two compactions of the small files that runs leave."""

RESULT_COLUMNS: Final = pa.schema(
    [
        pa.field("run_id", pa.utf8()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("table", pa.utf8()),
        pa.field("collection_id", pa.int64()),  # 0: none
        pa.field("expectation", pa.utf8()),  # the check's name
        pa.field("type", pa.utf8()),  # Great Expectations' type
        pa.field("column", pa.utf8()),
        pa.field("arguments", pa.utf8()),  # JSON
        pa.field("words", pa.utf8()),
        pa.field("source", pa.utf8()),  # law, schema or user
        pa.field("severity", pa.utf8()),
        pa.field("critical", pa.bool_()),
        pa.field("success", pa.bool_()),
        pa.field("observed", pa.utf8()),
        pa.field("elements", pa.int64()),
        pa.field("unexpected", pa.int64()),
        pa.field("sample", pa.utf8()),  # JSON list
        pa.field("error", pa.utf8()),
        pa.field("after_tick", pa.int64()),  # least and greatest over the PChannels; 0, 0: the whole table
        pa.field("up_to_tick", pa.int64()),
        pa.field("ranges", pa.utf8()),  # JSON: PChannel -> [after, up to]
        pa.field("seconds", pa.float64()),  # of all checks of the table
        pa.field("state", pa.utf8()),  # only in the state row
    ]
)
"""Columns of the files."""


def quality_path(settings: Settings) -> Path:
    """Return the folder of all quality data."""
    return settings.data_dir / "quality"


def read_state(settings: Settings) -> QualityState:
    """Return the state accumulated over all runs, or the empty state before the first. Reads one small file."""
    table = open_table(quality_results_uri(settings))
    return QualityState() if table is None else _state(table)[0]


def record_run(
    settings: Settings,
    run_id: str,
    tables: Sequence[TableCheckResult],
    *,
    at: float | None = None,
) -> QualityState:
    """Write the results of a run, fold them into the state in the same commit, and return the new state."""
    moment = time.time() if at is None else at
    rows = [row for table in tables for row in _rows(run_id, moment, table)]
    return update_state(settings, lambda state: apply_run(state, run_id, moment, tables), rows, at=moment)


def update_state(
    settings: Settings,
    fold: Callable[[QualityState], QualityState],
    rows: Sequence[dict[str, Any]] = (),
    *,
    at: float | None = None,
) -> QualityState:
    """Replace the state by `fold(state)` and add `rows` in the same commit.

    `fold` may be called again after a conflict.
    """
    path = quality_results_uri(settings)
    table = create_table(path, _with_kind(RESULT_COLUMNS), partition_by=["kind"])
    moment = time.time() if at is None else at
    for _ in range(ATTEMPTS):
        table.refresh()
        state, live = _state(table)
        found = fold(state)
        made = _write(path, rows, KIND_RESULT) if rows else []
        made += _write(path, [{"at": int(moment * 1_000_000), "state": found.to_json()}], KIND_STATE)
        part = CommitPart(made, live, {APP_ID: AppTransaction(state.revision, found.revision)})
        if commit_fenced(table, [part]).fenced:
            continue
        if found.revision % COMPACT_REVISIONS == 0:
            _compact(table)
        return found
    raise DeadlineExceeded(f"{ATTEMPTS} concurrent writers changed {path} first; run it again")


def remove_old_results(settings: Settings, *, before: float, dry_run: bool = False) -> int:
    """Remove the results of runs before `before` (Unix seconds) and return the number of rows.

    The state stays: blocks, and what is checked. Rewrites one file at a time. A file that another writer replaced
    meanwhile is left to the next call.
    """
    table = open_table(quality_results_uri(settings))
    if table is None:
        return 0
    moment, count = pa.scalar(int(before * 1_000_000), RESULT_COLUMNS.field("at").type), 0
    for name in files_of_kind(table, KIND_RESULT):
        at = table.read_rows([name], RESULT_COLUMNS, columns=["at"])["at"]
        gone = int(pc.sum(pc.less(at, moment)).as_py() or 0)
        if gone and not dry_run:
            adds = []
            if gone < len(at):
                remaining = table.read_rows([name], RESULT_COLUMNS, where=pc.field("at") >= moment)
                adds = _write(table.uri, remaining.to_pylist(), KIND_RESULT)
            if commit_fenced(table, [CommitPart(adds, [name])], data_change=False).fenced:
                continue
        count += gone
    return count


def read_results(
    settings: Settings,
    *,
    table: str | None = None,
    run_id: str | None = None,
    failed_only: bool = False,
    limit: int = 500,
) -> pa.Table:
    """Return the newest `limit` result rows, newest first, of `table` and `run_id` if given."""
    path = quality_results_uri(settings)
    found = open_table(path)
    empty = RESULT_COLUMNS.empty_table().drop_columns("state")
    if found is None:
        return empty
    files = files_of_kind(found, KIND_RESULT)
    chosen = pc.scalar(True)
    for name, value in (("table", table), ("run_id", run_id)):
        if value is not None:
            chosen = chosen & (pc.field(name) == value)
    if failed_only:
        chosen = chosen & ~pc.field("success")
    rows = found.read_rows(files, RESULT_COLUMNS, columns=empty.column_names, where=chosen)
    return rows.sort_by([("at", "descending")]).slice(0, limit)


def _rows(run_id: str, at: float, table: TableCheckResult) -> list[dict[str, Any]]:
    ranges = {name: list(each) for name, each in table.ranges.items()}
    return [
        {
            "run_id": run_id,
            "at": int(at * 1_000_000),
            "table": table.table,
            "collection_id": table.collection_id,
            "expectation": outcome.check.name,
            "type": outcome.check.type,
            "column": str(outcome.check.kwargs.get("column", "")),
            "arguments": json.dumps(dict(outcome.check.kwargs), sort_keys=True, default=str),
            "words": outcome.check.words,
            "source": outcome.check.source,
            "severity": outcome.check.severity,
            "critical": outcome.check.critical,
            "success": outcome.success,
            "observed": outcome.observed,
            "elements": outcome.elements,
            "unexpected": outcome.unexpected,
            "sample": json.dumps(list(outcome.sample)),
            "error": outcome.error,
            "after_tick": min((each[0] for each in ranges.values()), default=0),
            "up_to_tick": max((each[1] for each in ranges.values()), default=0),
            "ranges": json.dumps(ranges),
            "seconds": table.seconds,
        }
        for outcome in table.results
    ]


def _write(uri: str, rows: Sequence[dict[str, Any]], kind: str) -> list[FileAction]:
    sink = FileSink.at(uri, RESULT_COLUMNS, ("after_tick", "up_to_tick"))
    sink.write(pa.Table.from_pylist(list(rows), schema=RESULT_COLUMNS), {"kind": kind})
    return sink.finish()


def _state(table: TableHandle) -> tuple[QualityState, list[str]]:
    """Return the state at the table's version, and the files that hold it."""
    text, live = read_state_row(table)
    return QualityState() if text is None else QualityState.from_text(text), live


def _compact(table: TableHandle) -> None:
    """Compact the small files of past runs. After a conflict with another writer, leave it to the next time."""
    with suppress(TableUnavailable):
        table.compact([("kind", "=", KIND_RESULT)])


def _with_kind(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*schema, pa.field("kind", pa.utf8())])
