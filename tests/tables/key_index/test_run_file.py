"""A run of the key index: what is found in it, and that nothing is found in a damaged one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.tables.key_index.hashes import KeyHashes
from millrace.tables.key_index.run_file import BLOCK_ROWS, CoveredFile, Entries, Run, RunDamaged, write_run


def entries_of(hashes: list[int]) -> Entries:
    """Entries with these upper halves; all else follows from their order."""
    count = len(hashes)
    numbers = np.arange(count)
    return Entries(
        np.array(hashes, dtype=np.uint64), (numbers % 2).astype(np.uint64), numbers + 100, numbers.astype(np.uint32)
    ).ordered()


def found_in(run: Run, high: list[int], low: int) -> dict[int, list[tuple[int, int]]]:
    """(tick, ordinal) by upper half, of entries with `low`."""
    asked = np.array(sorted(set(high)), dtype=np.uint64)
    found: dict[int, list[tuple[int, int]]] = {}
    for matches, _ in run.find(KeyHashes(asked, np.full(len(asked), low, dtype=np.uint64))):
        for key, tick, ordinal in zip(*(each.tolist() for each in matches), strict=True):
            found.setdefault(int(asked[key]), []).append((tick, ordinal))
    return {each: sorted(found[each]) for each in found}


HASHES = st.one_of(st.integers(0, 3), st.integers((1 << 64) - 3, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))


COUNTS = st.sampled_from([1, 2, BLOCK_ROWS, BLOCK_ROWS + 1])


@given(st.lists(st.tuples(HASHES, COUNTS), max_size=6), st.integers(1, 1500))
@settings(max_examples=60, deadline=None)
def test_a_run_finds_every_entry_of_a_hash_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, repeated: list[tuple[int, int]], part: int
) -> None:
    """Also where a hash fills blocks, at the ends of the numbers, and beside the filling of the last block."""
    hashes = [value for value, times in repeated for _ in range(times)]
    path = tmp_path_factory.mktemp("run") / "a.run"
    whole = entries_of(hashes)
    parts = [Entries(*(each[at : at + part] for each in whole)) for at in range(0, len(hashes), part)]
    assert write_run(path, [CoveredFile("f", len(hashes))], parts) == len(hashes)
    run = Run.open(path)
    asked = [*hashes, 0, 7, (1 << 64) - 1]
    for low in (0, 1):
        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, value in enumerate(hashes):
            if place % 2 == low:
                wanted.setdefault(value, []).append((place + 100, place))
        assert found_in(run, asked, low) == wanted


def test_a_lookup_reads_a_block_for_each_key_however_many_rows_there_are(tmp_path: Path) -> None:
    read = {}
    for rows in (20 * BLOCK_ROWS, 200 * BLOCK_ROWS):
        path = tmp_path / f"{rows}.run"
        step = (1 << 64) // rows
        write_run(path, [CoveredFile("f", rows)], [entries_of([place * step for place in range(rows)])])
        run = Run.open(path)
        asked = np.array([step * (rows * each // 10 + 5) for each in range(10)], dtype=np.uint64)
        read[rows] = sum(blocks for _, blocks in run.find(KeyHashes(asked, np.zeros(10, dtype=np.uint64))))
        assert run.size == 28 * rows
        assert path.stat().st_size < 28.1 * rows
    assert set(read.values()) == {10}


@pytest.mark.parametrize("place", [0, 5_000, 14_000, -1, -9, -30, -200])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a.run"
    hashes = list(range(2 * BLOCK_ROWS))
    write_run(path, [CoveredFile("f", len(hashes))], [entries_of(hashes)])
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with pytest.raises(RunDamaged):
        found_in(Run.open(path), hashes, 0)


@pytest.mark.parametrize("kept", [0, 7, 24, 14_336, -1])
def test_a_torn_run_is_damaged(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.run"
    write_run(path, [CoveredFile("f", 600)], [entries_of(list(range(600)))])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RunDamaged):
        Run.open(path)
