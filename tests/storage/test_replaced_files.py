"""Files that commits replaced are removed once nobody can need them, and no file that is live or uncommitted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.growth.history import ReplacedFile, age_table
from millrace.base.errors import FileReplaced, TableDamaged
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.delta_log import first_commit, log_files
from millrace.storage.file_sink import FileSink
from millrace.storage.pins import PIN_SECONDS, TablePins
from millrace.storage.replaced_files import FileRemover
from millrace.storage.table import LogMaintenance, TableHandle, create_table, table_at
from tests.failpoints import at_failpoints
from tests.in_memory import folder_in_memory

COLUMNS = pa.schema([pa.field("id", pa.int64())])
RETENTION = 600.0


@contextmanager
def allowed() -> Iterator[bool]:
    yield True


def remover(now: float, *, pin: int | None = None, keep: int = 0, permit: Any = allowed) -> FileRemover:
    return FileRemover(retention=RETENTION, oldest_pin=lambda: pin, permit=permit, keep=keep, now=lambda: now)


def written(table: TableHandle, value: int) -> Any:
    sink = FileSink.at(table.uri, COLUMNS, ("id",))
    sink.write(pa.table({"id": [value]}, schema=COLUMNS), {})
    return sink.finish()


def replaced_table(folder: Path, monkeypatch: pytest.MonkeyPatch, *, commits: int = 5) -> TableHandle:
    """A table whose commit number n, at second 100 n, replaced the file of the one before."""
    table = create_table(folder, COLUMNS, partition_by=[])
    for number in range(1, commits + 1):
        monkeypatch.setattr("millrace.storage.commit.time.time", lambda number=number: 100.0 * number)
        old = list(table.live_files())
        commit_fenced(table, [CommitPart(written(table, number), old)], maintenance=LogMaintenance(1, 100))
    monkeypatch.undo()
    # delta-rs stamps the commit itself with the clock of this machine: have the log tell the same time as the actions.
    for name in (each for each in log_files(table.store) if each.endswith(".json")):
        path = folder / name
        lines = [line for line in path.read_text().splitlines() if '"commitInfo"' not in line]
        path.write_text("\n".join([*lines, '{"commitInfo":{"operation":"WRITE"}}']) + "\n")
    return table_at(folder)


def on_disk(folder: Path) -> int:
    return len(list(folder.glob("*.parquet")))


def test_a_replaced_file_goes_once_its_commit_is_older_than_the_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = replaced_table(tmp_path, monkeypatch)
    assert on_disk(tmp_path) == 5
    assert remover(RETENTION + 199).remove(table) == 0
    assert remover(RETENTION + 200).remove(table) == 1, "the second commit replaced the first file at 200"
    again = remover(RETENTION + 450)
    assert again.remove(table) == 3  # one of them is gone already
    assert again.remove(table) == 0
    assert on_disk(tmp_path) == 2, "the live file, and the one that the last commit replaced"
    assert table.read(next(iter(table.live_files())))["id"].to_pylist() == [5]


def test_a_removal_that_died_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = replaced_table(tmp_path, monkeypatch)

    def die(point: str) -> None:
        raise KeyboardInterrupt(point)

    with at_failpoints(die), pytest.raises(KeyboardInterrupt, match=r"replaced\.removed"):
        remover(10_000).remove(table)
    assert on_disk(tmp_path) == 1
    assert table.replaced_from == 0, "the log still names them"
    assert remover(10_000).remove(table_at(tmp_path)) == 4
    assert table.read(next(iter(table.live_files())))["id"].to_pylist() == [5]


def test_a_pin_keeps_what_was_replaced_after_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = replaced_table(tmp_path, monkeypatch)
    assert remover(10_000, pin=250_000).remove(table) == 1
    assert on_disk(tmp_path) == 4


def test_the_newest_versions_keep_their_files_whatever_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = replaced_table(tmp_path, monkeypatch)
    assert remover(10_000, keep=3).remove(table) == 1
    assert remover(10_000, keep=0).remove(table) == 4


def test_nothing_goes_while_it_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def blocked() -> Iterator[bool]:
        yield False

    table = replaced_table(tmp_path, monkeypatch)
    assert remover(10_000, permit=blocked).remove(table) == 0
    assert on_disk(tmp_path) == 5


def test_a_file_that_no_commit_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = replaced_table(tmp_path, monkeypatch)
    (waiting,) = written(table, 99)
    remover(10_000).remove(table)
    assert (tmp_path / waiting.path).exists()
    commit_fenced(table, [CommitPart([waiting])])


def test_a_file_that_a_restore_made_live_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = replaced_table(tmp_path, monkeypatch)
    table.delta.restore(2)
    table.refresh()
    remover(10_000).remove(table)
    assert table.read(next(iter(table.live_files())))["id"].to_pylist() == [2]


def test_the_log_keeps_the_entries_whose_files_may_still_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = replaced_table(tmp_path, monkeypatch)
    remover(RETENTION + 250).remove(table)
    for _ in range(2):
        commit_fenced(table, [CommitPart(written(table, 6))], maintenance=LogMaintenance(1, 0))
    assert first_commit(table.store) == table.replaced_from == 3
    remover(10_000).remove(table)
    commit_fenced(table, [CommitPart(written(table, 7))], maintenance=LogMaintenance(1, 0))
    assert first_commit(table.store) == table.replaced_from == 6, "what was committed just now stays"


@given(
    st.lists(st.sampled_from(["commit", "compact", "remove", "pin", "read", "task", "wait"]), min_size=5, max_size=40)
)
def test_no_interleaving_of_readers_tasks_and_removals_loses_a_row_or_a_file(steps: list[str]) -> None:
    with folder_in_memory() as folder:
        now, pins = 1_000_000.0, TablePins(folder / "pins", now=lambda: now)
        table = create_table(folder / "table", COLUMNS, partition_by=[])
        _stamp(table, now)
        removing = FileRemover(retention=RETENTION, oldest_pin=pins.oldest, permit=allowed, now=lambda: now)
        rows, waiting, pinned = 0, [], None
        held: Any = None
        for step in steps:
            if step in ("commit", "task"):
                rows += 1
                actions = written(table, rows)
                if step == "task":  # it commits later, if at all
                    waiting.append(actions)
                    rows -= 1
                else:
                    _commit(table, CommitPart(actions), now)
            elif step == "compact" and table.live_files():
                old = list(table.live_files())
                sink = FileSink.at(table.uri, COLUMNS, ("id",))
                sink.write(pa.concat_tables([table.read(name) for name in old]), {})
                _commit(table, CommitPart(sink.finish(), old), now)
            elif step == "remove":
                removing.remove(table)
            elif step == "pin" and held is None:
                held = pins.pinned()
                held.__enter__()
                pinned = table_at(folder / "table"), rows
            elif step == "wait":
                now += min(RETENTION + 1, PIN_SECONDS - 1)  # the renewal of a pin has its own thread and clock
                if held is not None:
                    held.__exit__(None, None, None)
                    held = pins.pinned(since_ms=int((now - 10 * RETENTION) * 1000))
                    held.__enter__()
            if pinned is not None:
                assert sum(pinned[0].read(name).num_rows for name in pinned[0].live_files()) == pinned[1]
            assert sum(table.read(name).num_rows for name in table.live_files()) == rows
            assert all((folder / "table" / each.path).exists() for actions in waiting for each in actions)
        if held is not None:
            held.__exit__(None, None, None)
        now += RETENTION + 1
        removing.remove(table)
        assert on_disk(folder / "table") == len(table.live_files()) + len(waiting)


def _commit(table: TableHandle, part: CommitPart, now: float) -> None:
    """Commit at the simulated time `now`."""
    commit_fenced(table, [part])
    _stamp(table, now)


def _stamp(table: TableHandle, now: float) -> None:
    path = Path(table.uri) / log_files(table.store)[-1]
    lines = path.read_text().replace('"timestamp":', '"was":').splitlines()
    at = int(now * 1000)
    path.write_text("\n".join(_stamped(line, at) for line in lines) + "\n")


def _stamped(line: str, at: int) -> str:
    action = json.loads(line)
    if "remove" in action:
        action["remove"]["deletionTimestamp"] = at
    return json.dumps(action)


def test_a_reader_that_lost_a_file_is_told_to_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = replaced_table(tmp_path, monkeypatch)
    old = table_at(tmp_path, version=2)
    remover(10_000).remove(table)
    with pytest.raises(FileReplaced, match="Read again") as gone:
        old.read(next(iter(old.live_files())))
    assert gone.value.retriable
    assert gone.value.missing
    (tmp_path / next(iter(table.live_files()))).unlink()
    with pytest.raises(TableDamaged, match="recovery") as damaged:
        table.read(next(iter(table.live_files())))
    assert not damaged.value.retriable


def test_pins_of_killed_processes_end(tmp_path: Path) -> None:
    now = 1_000.0
    pins = TablePins(tmp_path, now=lambda: now)
    assert pins.oldest() is None
    with pins.pinned(), pins.pinned(since_ms=400_000):
        assert pins.oldest() == 400_000
        now += PIN_SECONDS + 1
        assert pins.oldest() is None
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_an_old_table_opens_and_commits_as_a_young_one(tmp_path: Path) -> None:
    """What a handle reads at its opening is bounded, however long the history."""
    sizes = {}
    for commits in (200, 2_000):
        table = create_table(tmp_path / str(commits), COLUMNS, partition_by=[])
        old = age_table(table, [ReplacedFile("", 1000)], commits=commits, seconds=commits * 60.0, keep_commits=64)
        store = old.store
        sizes[commits] = len(log_files(store)), sum(store.size(name) or 0 for name in log_files(store))
        assert old.live_files() == {}
    (few, small), (many, large) = sizes[200], sizes[2_000]
    assert many <= few + 1
    assert large <= 1.5 * small


def test_a_day_of_commits_leaves_the_files_of_the_retention() -> None:
    """One commit in five minutes, each of which replaces a file: 288 of them."""
    with folder_in_memory() as folder:
        now = 1_000_000.0
        table = create_table(folder, COLUMNS, partition_by=[])
        _stamp(table, now)
        removing = FileRemover(retention=RETENTION, oldest_pin=lambda: None, permit=allowed, now=lambda: now)
        counts = []
        for number in range(288):
            now += 300
            _commit(table, CommitPart(written(table, number), list(table.live_files())), now)
            removing.remove(table)
            counts.append(on_disk(folder))
        assert max(counts) <= 1 + RETENTION / 300 + 1
        assert max(counts[250:]) == max(counts[20:40])
