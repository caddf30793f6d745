"""The upkeep of a key index: what each step reads and writes, and that a lost index is made anew."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from millrace.tables.key_index import index as index_module
from millrace.tables.key_index.index import MANIFEST_FILE, KeyIndex
from millrace.tables.key_index.run_file import BLOCK_ROWS
from tests.tables.key_index.stored_rows import Place, StoredRows, plain, schema_of

NUMBERS = schema_of("int64")


def rows_of(keys: range | list[int], tick: int = 1) -> list[Place]:
    return [Place((key,), 1, tick, tick) for key in keys]


def deletes_of(keys: range | list[int], tick: int = 1000) -> list[Place]:
    return [Place((key,), 0, tick, tick) for key in keys]


def test_a_catch_up_reads_the_files_that_no_run_covers_and_merges_are_amortised(tmp_path: Path) -> None:
    stored = StoredRows(tmp_path, NUMBERS)
    flush, merged, count = BLOCK_ROWS, 0, 40
    index = stored.index()
    for number in range(count):
        stored.commit(rows_of(range(number * flush, (number + 1) * flush), number + 1))
        work = index.catch_up(stored.table(), NUMBERS)
        assert (work.files_indexed, work.rows_indexed) == (1, flush)
        merged += work.rows_merged
        assert len(index.runs) <= 3 * (math.log(number + 1, 4) + 2)
    assert merged <= count * flush * (math.log(count, 4) + 1)
    assert index.rows == count * flush
    assert {each.name for each in stored.index_folder.glob("*.run")} == {each.path.name for each in index.runs}
    assert index.catch_up(stored.table(), NUMBERS) == index_module.IndexWork()
    assert plain(stored.find(deletes_of([5, flush + 1, count * flush]))) == stored.expected(deletes_of([5, flush + 1]))


def test_a_run_with_a_file_that_was_not_rewritten_still_finds_its_rows(tmp_path: Path) -> None:
    """Moonlink's run lost the entries of a file that compaction left as it was."""
    stored = StoredRows(tmp_path, NUMBERS)
    first, second = stored.commit(rows_of([1, 2]), rows_of([1, 3]))
    index = stored.catch_up()
    assert len(index.runs) == 1, "one run covers both"
    (third,) = stored.commit(rows_of([2, 1]), removes=[first])
    before = stored.find(deletes_of([1]), index=index)
    assert plain(before) == {second: [0], third: [1]}, "gone, live and unknown at once"
    assert before.work.rows_scanned == 2
    after = stored.find(deletes_of([1]), index=stored.catch_up())
    assert plain(after) == plain(before)
    assert after.work.rows_scanned == 0


def test_a_merge_keeps_a_live_row_whose_key_has_a_dead_one(tmp_path: Path) -> None:
    """StarRocks' merge dropped a key's live version with its dead one."""
    stored = StoredRows(tmp_path, NUMBERS)
    paths = [stored.commit(rows_of([7, 8], tick))[0] for tick in range(1, 6)]
    index = KeyIndex(stored.index_folder)
    for covered in (paths[:2], *([each] for each in paths[2:])):  # as after four publishes
        index.runs.extend(index._built(stored.table(), NUMBERS, dict.fromkeys(covered, 2), index_module.IndexWork()))
    stored.commit(removes=[paths[1]])
    index.catch_up(stored.table(), NUMBERS)
    assert len(index.runs) == 1
    assert plain(stored.find(deletes_of([7]))) == {path: [0] for path in (paths[0], *paths[2:])}


def test_a_run_that_is_mostly_gone_is_written_again_and_one_without_live_files_is_deleted(tmp_path: Path) -> None:
    stored = StoredRows(tmp_path, NUMBERS)
    first, second = stored.commit(rows_of(range(100)), rows_of(range(50)))
    stored.catch_up()
    stored.commit(removes=[first])
    index = stored.index()
    assert index.catch_up(stored.table(), NUMBERS).rows_merged == 50
    assert index.rows == 50
    stored.commit(removes=[second])
    index.catch_up(stored.table(), NUMBERS)
    assert not index.runs
    assert not list(stored.index_folder.glob("*.run"))


def _lose(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _flip(name: str, place: int) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = min(folder.glob(name))
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return act


def _without_a_run(folder: Path) -> None:
    min(folder.glob("*.run")).unlink()


def _newer(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


@pytest.mark.parametrize(
    "damage",
    [_lose, _without_a_run, _newer, _flip(MANIFEST_FILE, 0), _flip("*.run", 40), _flip("*.run", -20)],
    ids=["lost", "a run lost", "newer", "manifest", "block", "trailer"],
)
def test_a_lost_or_damaged_index_changes_no_answer_and_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """StarRocks' rebuild ordered deletes unlike its publish: here the same function serves both."""
    stored = StoredRows(tmp_path, NUMBERS)
    for number in range(3):
        stored.commit(rows_of(range(number, number + 600, 2), number + 1))
        stored.catch_up()
    deletes = deletes_of([*range(0, 700, 7)], 3)
    wanted = stored.expected(deletes)
    whole = stored.find(deletes)
    assert plain(whole) == wanted
    damage(stored.index_folder)
    index = stored.index()
    assert plain(stored.find(deletes, index=index)) == wanted
    index.catch_up(stored.table(), NUMBERS)
    again = stored.find(deletes)
    assert plain(again) == wanted
    assert again.work.rows_scanned == 0
    assert again.work.candidates == whole.work.candidates


def test_a_lookup_uses_nothing_up(tmp_path: Path) -> None:
    """Iceberg's aborted cycle used up index entries: the next try succeeded, and the row came back."""
    stored = StoredRows(tmp_path, NUMBERS)
    stored.commit(rows_of([1, 2, 1]))
    index = stored.catch_up()
    first = stored.find(deletes_of([1]), index=index)
    assert plain(first) == plain(stored.find(deletes_of([1]), index=index)) == stored.expected(deletes_of([1]))


def test_the_first_row_of_the_first_file_is_a_row(tmp_path: Path) -> None:
    """Lance took the address 0 for none."""
    stored = StoredRows(tmp_path, NUMBERS)
    (path,) = stored.commit(rows_of([0]))
    assert plain(stored.find(deletes_of([0]), index=stored.catch_up())) == {path: [0]}


def test_the_manifest_names_its_version_and_strays_are_deleted_once_old(tmp_path: Path) -> None:
    stored = StoredRows(tmp_path, NUMBERS)
    stored.commit(rows_of([1]))
    stored.catch_up()
    young, old = stored.index_folder / "young.run", stored.index_folder / "old.run"
    for path in (young, old):
        path.write_bytes(b"")
    os.utime(old, (1, 1))
    stored.commit(rows_of([2]))
    index = stored.catch_up()
    said = json.loads((stored.index_folder / MANIFEST_FILE).read_text())
    assert said["table_version"] == stored.table().version == index.table_version
    assert said["runs"] == sorted(each.path.name for each in index.runs)
    assert young.exists()
    assert not old.exists()


def test_a_lookup_costs_the_same_beside_ten_times_the_rows(tmp_path: Path) -> None:
    found = {}
    for rows in (8 * BLOCK_ROWS, 80 * BLOCK_ROWS):
        stored = StoredRows(tmp_path / str(rows), NUMBERS)
        keys = np.random.default_rng(0).permutation(rows).tolist()
        stored.commit(rows_of(keys))
        stored.catch_up()
        work = stored.find(deletes_of([1, 17, 400])).work
        found[rows] = (work.candidates, work.rows_read, work.rows_scanned)
        assert work.blocks <= 6
    assert set(found.values()) == {(3, 0, 0)}


def test_files_that_bounds_exclude_cost_no_lookup(tmp_path: Path) -> None:
    stored = StoredRows(tmp_path, NUMBERS)
    for number in range(3):
        stored.commit(rows_of(range(100 * number, 100 * number + 100), 10 * number + 1))
    stored.catch_up()
    late = stored.find(deletes_of([500]))
    assert (late.work.files_excluded, late.work.blocks) == (3, 0)
    early = stored.find(deletes_of([5, 250], tick=5))
    assert early.work.files_excluded == 2, "the key is in the third file too, after the delete"
    assert plain(early) == stored.expected(deletes_of([5, 250], tick=5))
