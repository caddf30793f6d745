"""The rows that deletes hit, by index, equal those that a plain scan finds, whatever the index covers."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.tables.key_index import index as index_module
from millrace.tables.key_index import lookup as lookup_module
from millrace.tables.key_index.hashes import KeyHashes, hash_keys
from tests.laws.profile import examples
from tests.tables.key_index.stored_rows import Place, StoredRows, plain, schema_of

KEYS: dict[str, list[tuple[Any, ...]]] = {
    "int64": [(0,), (-1,), (1 << 62,), (5,)],
    "int16": [(0,), (-1,), (300,), (5,)],
    "string": [("",), ("a",), ("a\x00",), ("12345678",), ("é" * 40,)],
    "date": [(date(1970, 1, 1),), (date(1960, 5, 5),), (date(9999, 12, 31),)],
    "timestamp": [(datetime(2026, 11, 26, 1, 2, 3, 4, UTC),), (datetime(1960, 1, 1, tzinfo=UTC),)],
    "decimal(20,2)": [(Decimal("0.00"),), (Decimal("-1.25"),), (Decimal("123456789012345678.90"),)],
    "uuid": [("00000000-0000-0000-0000-000000000000",), ("6f1c3f0e-3f43-4e52-9d3c-1f7d8f8f8f8f",)],
    "int32 string": [(1, "a"), (1, ""), (2, "a"), (-1, "b\x00")],
    "string string": [("a", "b"), ("ab", ""), ("", "ab")],
}

PLACES = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 3))
"""The number of a key, a partition, ticks."""


def weak(keys: pa.Array | pa.ChunkedArray) -> KeyHashes:
    """A hash with collisions in both halves."""
    found = hash_keys(keys)
    return KeyHashes(found.high & 1, found.low & 1)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("weakened", [False, True], ids=["", "collisions"])
@pytest.mark.parametrize("kinds", sorted(KEYS))
def test_the_index_finds_what_a_scan_finds(
    tmp_path_factory: pytest.TempPathFactory, kinds: str, weakened: bool
) -> None:
    keys = KEYS[kinds]

    @given(
        st.lists(st.lists(PLACES, min_size=1, max_size=6), min_size=1, max_size=5),
        st.lists(PLACES, min_size=1, max_size=6),
        st.sets(st.integers(0, 4)),
        st.sets(st.integers(0, 4)),
    )
    @examples(12)
    def check(
        files: list[list[tuple[int, ...]]], deletes: list[tuple[int, ...]], uncovered: set[int], rewritten: set[int]
    ) -> None:
        stored = StoredRows(tmp_path_factory.mktemp("rows"), schema_of(*kinds.split()))

        def placed(each: tuple[int, ...]) -> Place:
            return Place(keys[each[0] % len(keys)], *each[1:])

        paths = []
        for rows in files:  # partition 0 is none of a row's
            rows_here = [placed(each)._replace(partition=max(1, each[1])) for each in rows]
            paths += stored.commit(rows_here)
            if len(paths) - 1 not in uncovered:
                stored.catch_up()
        for number, path in enumerate(paths):
            if number in rewritten:
                stored.commit(list(reversed(stored.files[path])), removes=[path])
        wanted = [placed(each) for each in deletes]
        assert plain(stored.find(wanted)) == stored.expected(wanted)
        stored.catch_up()
        whole = stored.find(wanted)
        assert plain(whole) == stored.expected(wanted)
        assert whole.work.rows_scanned == 0

    with pytest.MonkeyPatch.context() as patch:
        if weakened:
            patch.setattr(index_module, "hash_keys", weak)
            patch.setattr(lookup_module, "hash_keys", weak)
            patch.setattr(lookup_module, "identifies_keys", lambda keys: False)
        check()


def test_an_upsert_hits_the_row_before_it_and_not_its_own(tmp_path: Path) -> None:
    """Its delete and its row have the same ticks."""
    stored = StoredRows(tmp_path, schema_of("int64"))
    first, second = stored.commit([Place((1,), 1, 5, 5)], [Place((1,), 1, 9, 9), Place((1,), 1, 9, 8)])
    stored.catch_up()
    assert plain(stored.find([Place((1,), 0, 9, 9)])) == {first: [0], second: [1]}


def test_a_number_is_decided_by_the_index_alone_and_a_text_by_its_row_groups(tmp_path: Path) -> None:
    read = {}
    for kind, keys in (("int64", [(each,) for each in range(100)]), ("string", [(str(each),) for each in range(100)])):
        stored = StoredRows(tmp_path / kind, schema_of(kind))
        stored.commit([Place(key, 1, 1, 1) for key in keys])
        stored.catch_up()
        deletes = [Place(keys[3], 0, 2, 2)]
        hits = stored.find(deletes)
        assert plain(hits) == stored.expected(deletes)
        read[kind] = hits.work.rows_read
    assert read == {"int64": 0, "string": 4}, "the rows up to the one that it hits"


def test_deletes_without_a_hit_and_no_deletes_find_nothing(tmp_path: Path) -> None:
    stored = StoredRows(tmp_path, schema_of("int64"))
    stored.commit([Place((1,), 1, 5, 5)])
    stored.catch_up()
    assert not stored.find([]).positions
    assert not stored.find([Place((2,), 0, 9, 9)]).positions
    assert not stored.find([Place((1,), 2, 9, 9)]).positions
    assert not stored.find([Place((1,), 1, 5, 5)]).positions
