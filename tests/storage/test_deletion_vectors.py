"""Deletion vectors have the bytes of Delta's specification, and one that cannot be read is damage."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from millrace.base.errors import InvalidArgument, TableDamaged
from millrace.storage.deletion_vectors import (
    NO_POSITIONS,
    Vector,
    check_positions,
    decode_id,
    decode_vector,
    encode_id,
    encode_vector,
    read_vector,
    write_vectors,
)
from millrace.storage.local import LocalStore
from tests.in_memory import folder_in_memory

POSITIONS = st.lists(st.integers(0, 2**32 - 1), unique=True, max_size=200).map(sorted)
DENSE = st.builds(lambda first, count: list(range(first, first + count)), st.integers(0, 2**20), st.integers(1, 70_000))


def test_an_id_of_the_specification_is_read() -> None:
    # The example of Delta's PROTOCOL.md.
    assert decode_id("^-aqEH.-t@S}K{vb[*k^") == uuid.UUID("d2c639aa-8816-431a-aaf6-d3fe2512ff61")
    assert encode_id(uuid.UUID("d2c639aa-8816-431a-aaf6-d3fe2512ff61")) == "^-aqEH.-t@S}K{vb[*k^"
    example = Vector("u", "ab^-aqEH.-t@S}K{vb[*k^", 4, 40, 6)
    assert example.file == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"


@given(st.one_of(POSITIONS, DENSE))
def test_a_vector_has_the_bytes_of_another_implementations_64_bit_bitmap(values: list[int]) -> None:
    data = encode_vector(np.array(values, dtype=np.int64))
    assert list(BitMap64.deserialize(data[4:])) == values
    assert decode_vector(data).tolist() == values


@given(st.lists(st.one_of(POSITIONS, DENSE), min_size=1, max_size=4))
def test_each_of_several_vectors_of_one_file_is_read(masks: list[list[int]]) -> None:
    with folder_in_memory() as folder:
        store = LocalStore(folder)
        given_masks = {f"file {place}": np.array(values, dtype=np.int64) for place, values in enumerate(masks)}
        name, vectors = write_vectors(store, "_rows/_vectors", given_masks)
        for path, values in given_masks.items():
            assert vectors[path].file == name
            assert read_vector(store, vectors[path]).tolist() == values.tolist()


def test_a_vector_file_that_is_missing_cut_or_another_is_damage_and_never_empty(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    masks = {"a": np.arange(5), "b": np.arange(7, 40, 3)}
    name, vectors = write_vectors(store, "v", masks)
    whole = (tmp_path / name).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        for damaged in (whole[:place], bytes(changed)):
            (tmp_path / name).write_bytes(damaged)
            for path, positions in masks.items():
                try:
                    found = read_vector(store, vectors[path])
                except TableDamaged:
                    continue
                assert found.tolist() == positions.tolist()
    (tmp_path / name).write_bytes(whole)
    with pytest.raises(TableDamaged, match="5 positions, the log says 4"):
        read_vector(store, replace(vectors["a"], cardinality=4))
    (tmp_path / name).unlink()
    with pytest.raises(TableDamaged, match="missing") as raised:
        read_vector(store, vectors["a"])
    assert raised.value.missing
    with pytest.raises(TableDamaged, match="does not write"):
        read_vector(store, Vector("i", "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L", 0, 40, 6))


def test_a_vector_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "no space left")

    monkeypatch.setattr("millrace.storage.local._LocalSink.sync", full)
    with pytest.raises(OSError, match="no space"):
        write_vectors(LocalStore(tmp_path), "v", {"a": np.arange(5)})
    assert not list((tmp_path / "v").iterdir())


@pytest.mark.parametrize("positions", [[-1], [3], [0, 0], [1, 0]])
def test_positions_outside_of_a_file_or_out_of_order_are_refused(positions: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="strictly increasing from 0 to 2"):
        check_positions("file", np.array(positions, dtype=np.int64), 3)
    check_positions("file", NO_POSITIONS, 0)
    check_positions("file", np.array([0, 2], dtype=np.int64), 3)
