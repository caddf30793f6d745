"""The position of each task: one live row a task in the flow's own Delta table, changed only by the fenced commit.

Everything before ``position`` is in the sink, in the error topic, or was filtered. A commit succeeds only onto the row
from which its range was planned, so that one of two workers is fenced. Changing an offset by hand is a commit, too, and
fences running work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.flows.sinks.delta.sink import OUTPUTS
from millrace.storage.closing import check_not_moved
from millrace.storage.commit import AppTransaction, CommitOutcome, CommitPart, add_columns, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, create_table, open_table

TASK: Final = "task"
FOLDER: Final = "pipelines"
"""The folder of these tables, below the deployment's tables."""
FORGOTTEN: Final = -1
COUNTS: Final = ("records_in", "records_out", "records_error", "records_filtered", "bulks", "retries", "records_stale")
"""The counts of a task. A table of an earlier build lacks `records_stale` and the columns after `topic_id` until it is
opened to be written."""
WINDOW: Final = ("window_in", "window_error", "in_a_row")
"""Counts for `errors.limit` and `errors.in_a_row`."""
COLUMNS: Final = pa.schema(
    [
        pa.field("position", pa.int64()),
        pa.field("commits", pa.int64()),
        *(pa.field(name, pa.int64()) for name in COUNTS),
        pa.field("topic_id", pa.utf8()),
        pa.field("generation", pa.int64()),
        *(pa.field(name, pa.int64()) for name in WINDOW),
        pa.field("written_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""Columns of the files; the table is partitioned by task."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a task, and its counts since its beginning."""

    task: str
    position: int
    commits: int = 0
    """The number of the task's newest commit. A range is planned from one number and fenced by it."""
    records_in: int = 0
    records_out: int = 0
    records_error: int = 0
    records_filtered: int = 0
    bulks: int = 0
    retries: int = 0
    records_stale: int = 0
    """Documents left out because the sink had a newer one of their id."""
    topic_id: str = ""
    """The id of the position's topic. A topic that is created again has another. Empty if unknown."""
    generation: int = 0
    """How often it was set by hand or forgotten. A sink's own position belongs to one generation."""
    window_in: int = 0
    """Records of the present window of `errors.limit`."""
    window_error: int = 0
    """Records of that window that failed."""
    in_a_row: int = 0
    """Records that the sink refused since it last accepted one."""
    path: str | None = None

    @property
    def forgotten(self) -> bool:
        """Whether the task has no position. Its row remains, because its commit number fences older work."""
        return self.position == FORGOTTEN

    def moved(self, position: int, **more: int) -> Position:
        """Return the position after a range, with its counts (`more`) added."""
        counts = {name: getattr(self, name) + more.get(name, 0) for name in COUNTS}
        return replace(self, position=position, commits=self.commits + 1, **counts)

    def counted(self, records: int, errors: int, *, over: int) -> Position:
        """Return it with a range's counts in its window. After `over` records the next window begins."""
        if self.window_in >= over:
            return replace(self, window_in=records, window_error=errors)
        return replace(self, window_in=self.window_in + records, window_error=self.window_error + errors)

    def uncounted(self) -> Position:
        """Return it with an empty window."""
        return replace(self, window_in=0, window_error=0, in_a_row=0)


def positions_uri(settings: Settings, flow: str) -> str:
    """Return the URI of a flow's table of positions."""
    return settings.table_uri(f"{FOLDER}/{flow}")


def flow_tables(settings: Settings) -> dict[str, str]:
    """Return the tables of all flows, by name. Maintenance must remove the small file that each commit replaces."""
    found = {}
    for folder in (FOLDER, OUTPUTS):
        for name in store_at(settings.table_uri(folder)).folders():
            found[f"{folder}/{name}"] = settings.table_uri(f"{folder}/{name}")
    return found


def ensure_positions(uri: str) -> TableHandle:
    """Open the table of positions, or create it. Raises TablesMoved if the tables have moved away from `uri`."""
    wanted = pa.schema([*COLUMNS, pa.field(TASK, pa.utf8())])
    known = open_table(uri)
    table = known or create_table(uri, wanted, partition_by=[TASK])
    if known is None:
        check_not_moved(uri.rsplit("/", 2)[0])  # a move closes the tables that it finds
    if table.missing_columns(wanted)[0]:
        add_columns(table, wanted)
    return table


class Positions:
    """The positions in a table, for repeated reads. A read opens only the files that were added since the last one.

    One thread at a time.
    """

    def __init__(self, table: TableHandle) -> None:
        self.table = table
        self._files: dict[str, Position] = {}
        self._newest: dict[str, Position] = {}
        self._version: int | None = None

    def now(self) -> dict[str, Position]:
        """Return the positions by task at the table's newest version, including forgotten ones."""
        self.table.refresh()
        return self.there()

    def there(self) -> dict[str, Position]:
        """Return the positions by task at the table's loaded version, including forgotten ones."""
        if self._version != self.table.version:
            self._files = {
                action["path"]: self._files.get(action["path"]) or self._read(action)
                for action in self.table.actions().to_pylist()
            }
            self._newest = {}
            for each in self._files.values():
                known = self._newest.get(each.task)
                if known is None or known.commits < each.commits:
                    self._newest[each.task] = each
            self._version = self.table.version
        return self._newest

    def _read(self, action: Mapping[str, Any]) -> Position:
        row = self.table.read(action["path"]).to_pylist()[0]
        counts = {name: row.get(name) or 0 for name in (*COUNTS, *WINDOW)}
        topic_id = row.get("topic_id") or ""
        task = action[f"partition.{TASK}"]
        return Position(
            task,
            row["position"],
            row["commits"],
            **counts,
            topic_id=topic_id,
            generation=row.get("generation") or 0,
            path=action["path"],
        )


def read_positions(table: TableHandle | None) -> dict[str, Position]:
    """Return the positions by task at the loaded version of `table`, including forgotten ones."""
    return {} if table is None else Positions(table).there()


def commit_positions(table: TableHandle, moves: Sequence[tuple[Position | None, Position]]) -> CommitOutcome:
    """Move each task from the row that it was planned from; return the fenced ones. Raises as commit_fenced."""
    parts = []
    for before, after in moves:
        sink = FileSink.at(table.uri, COLUMNS, ())
        row: dict[str, Any] = {name: getattr(after, name) for name in COLUMNS.names[:-1]}
        row["written_at"] = time.time_ns() // 1000
        sink.write(pa.Table.from_pylist([row], schema=COLUMNS), {TASK: after.task})
        base = 0 if before is None else before.commits
        parts.append(
            CommitPart(
                adds=sink.finish(),
                removes=() if before is None or before.path is None else (before.path,),
                app_transactions={f"pipeline/{after.task}": AppTransaction(base, after.commits)},
            )
        )
    return commit_fenced(table, parts)


def forget_positions(settings: Settings, flow: str) -> None:
    """Remove the positions of a flow's tasks, since a later flow of the same id may have other topics.

    Running work is fenced. Raises CommitFenced if another commit was first.
    """
    table = open_table(positions_uri(settings, flow))
    known = [] if table is None else [each for each in read_positions(table).values() if not each.forgotten]
    if table is not None and known:
        moves = [
            (each, Position(each.task, FORGOTTEN, each.commits + 1, generation=each.generation + 1)) for each in known
        ]
        commit_positions(table, moves).raise_if_fenced()


def change_positions(settings: Settings, flow: str, offsets: Mapping[str, int]) -> dict[str, Position]:
    """Set the next offset of tasks (``flights-0``) by hand, while no worker runs; return all rows. Counts stay.

    A running worker is fenced once and continues from there. Raises CommitFenced if another commit was first.
    """
    table = ensure_positions(positions_uri(settings, flow))
    known = read_positions(table)
    moves = []
    for task, offset in offsets.items():
        before = known.get(task)
        moved = (before or Position(task, 0)).moved(offset).uncounted()
        # The position belongs to the topic that exists now.
        moves.append((before, replace(moved, topic_id="", generation=moved.generation + 1)))
    if moves:
        commit_positions(table, moves).raise_if_fenced()
    return positions_of(settings, flow)


def reset_windows(settings: Settings, flow: str) -> list[str]:
    """Reset the windows of `errors.limit`, as a manual restart does. Return the tasks that had counts.

    A running worker is fenced once and continues. Raises CommitFenced if another commit was first.
    """
    uri = positions_uri(settings, flow)
    known = read_positions(open_table(uri)).values()
    counted = [each for each in known if not each.forgotten and any(getattr(each, name) for name in WINDOW)]
    if counted:
        table = ensure_positions(uri)
        commit_positions(table, [(each, each.moved(each.position).uncounted()) for each in counted]).raise_if_fenced()
    return [each.task for each in counted]


def positions_of(settings: Settings, flow: str) -> dict[str, Position]:
    """Return the positions of the tasks of `flow`; empty before its first commit and after its deletion."""
    found = read_positions(open_table(positions_uri(settings, flow)))
    return {task: each for task, each in found.items() if not each.forgotten}
