"""What a Parquet file of ours promises.

Whole and durable with its name when closed, gone when discarded, bounds as they are.
"""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base import files
from millrace.base.errors import TableDamaged
from millrace.storage import local, parquet_file
from millrace.storage.local import LocalStore
from millrace.storage.parquet_file import (
    CUT_STAT_CHARACTERS,
    MAX_STAT_CHARACTERS,
    ParquetFileWriter,
    read_file,
    read_filtered,
    read_rows,
    scan_rows,
    storage_options,
    take_rows,
)

SCHEMA = pa.schema([("n", pa.int64()), ("name", pa.string())])


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": list(numbers), "name": [str(number) for number in numbers]}, schema=SCHEMA)


def test_what_was_written_is_read_back_and_described(tmp_path: Path) -> None:
    file = ParquetFileWriter(LocalStore(tmp_path), "a=1/b=2/file.parquet", SCHEMA, options={"compression": "snappy"})
    file.write(rows(5, 3))
    file.write(rows(9, 4, 8).to_batches()[0], row_group_size=2)
    made = file.close({"a": "1", "b": "2"}, ["n", "absent"])
    path = tmp_path / made.path
    with pq.ParquetFile(path) as parquet:
        assert (parquet.read(), parquet.num_row_groups) == (rows(5, 3, 9, 4, 8), 3)
    assert (made.size, made.rows, made.partition) == (path.stat().st_size, 5, {"a": "1", "b": "2"})
    assert json.loads(made.stats) == {
        "numRecords": 5,
        "minValues": {"n": 3},
        "maxValues": {"n": 9},
        "nullCount": {"n": 0},
    }


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3), max_size=3),
    st.sets(st.integers(0, 9)),
)
def test_rows_that_are_kept_by_one_column_come_with_the_others(
    contents: list[list[list[int]]], wanted: set[int]
) -> None:
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        names: list[str] = []
        for number, groups in enumerate(contents):
            file = ParquetFileWriter(store, f"{number}.parquet", SCHEMA, options={})
            for group in groups:
                file.write(rows(*group))
            names.append(file.close({}, []).path)

        def kept(looked: pa.Table) -> npt.NDArray[np.bool_]:
            assert looked.column_names == ["n"]
            return np.isin(looked["n"].to_numpy(), [*wanted])

        found = read_filtered(store, names, SCHEMA, columns=["name", "n"], filter_columns=["n"], keep=kept)
        expected = [n for groups in contents for group in groups for n in group if n in wanted]
        assert found.select(["n", "name"]).equals(rows(*expected))
        assert (
            read_filtered(store, names, SCHEMA, columns=[], filter_columns=["n"], keep=kept)["n"].to_pylist()
            == expected
        )


@example([[[4]], [[5, 1], [7, 8, 9]]], {0, 3}, None, 2)
@example([[], [[1], [7, 8, 9]]], {1, 2}, 5, 4)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3), max_size=3),
    st.sets(st.integers(0, 8)),
    st.none() | st.integers(0, 9),
    st.integers(1, 4),
)
def test_hidden_rows_are_left_out_by_their_position_before_any_filter(
    contents: list[list[list[int]]], gone: set[int], least: int | None, batch_rows: int
) -> None:
    """`least` excludes row groups by their bounds: positions count the rows of these, too (trino#28885)."""
    wanted = [
        (n, number % 2)
        for number, groups in enumerate(contents)
        for place, n in enumerate(n for group in groups for n in group)
        if (number % 2 == 0 or place not in gone) and (least is None or n >= least)
    ]
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        hidden: dict[str, npt.NDArray[np.int64]] = {}
        for number, groups in enumerate(contents):
            columns = SCHEMA if number else SCHEMA.remove(1)  # the first file has no names
            file = ParquetFileWriter(store, f"{number}.parquet", columns, options={})
            for group in groups:
                file.write(rows(*group).select(columns.names))
            count = file.close({}, []).rows
            hidden[file.name] = np.array([each for each in sorted(gone) if number % 2 and each < count], dtype=np.int64)
        batches = scan_rows(
            store,
            hidden,
            SCHEMA,
            columns=SCHEMA.names,
            where=None if least is None else (pc.field("n") >= least),
            batch_rows=batch_rows,
            hidden=hidden,
        )
        found = [row for batch in batches for row in batch.to_pylist()]
        assert sorted(row["n"] for row in found) == sorted(n for n, _ in wanted)
        assert all(row["name"] in (None, str(row["n"])) for row in found)


def test_a_row_group_whose_rows_are_all_hidden_is_not_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    file = ParquetFileWriter(store, "file.parquet", SCHEMA, options={"compression": "none", "use_dictionary": False})
    for group in (rows(1111, 2222), rows(3333, 4444)):
        file.write(group)
    path = tmp_path / file.close({}, []).path
    page = b"\x04\0\0\0".join([b"", b"1111", b"2222"])
    assert page in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(page, page[:-1] + b"3"))

    def read(*gone: int) -> list[int]:
        hidden = {path.name: np.array(gone)}
        batches = scan_rows(store, hidden, SCHEMA, columns=SCHEMA.names, where=None, batch_rows=9, hidden=hidden)
        return [n for batch in batches for n in batch["n"].to_pylist()]

    assert read(0, 1, 3) == [3333]
    with pytest.raises(TableDamaged, match="recovery"):
        read(0, 3)


def test_of_a_row_group_without_a_row_that_is_kept_the_other_columns_are_not_read(tmp_path: Path) -> None:
    file = ParquetFileWriter(
        LocalStore(tmp_path), "file.parquet", SCHEMA, options={"compression": "none", "use_dictionary": False}
    )
    file.write(rows(1111, 2222))
    file.write(rows(3333))
    path = tmp_path / file.close({}, []).path
    page = b"\x04\0\0\0".join([b"", b"1111", b"2222"])  # the names, which are text
    assert page in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(page, page[:-1] + b"3"))

    def read(number: int) -> list[str]:
        found = read_filtered(
            LocalStore(tmp_path),
            [path.name],
            SCHEMA,
            columns=SCHEMA.names,
            filter_columns=["n"],
            keep=lambda looked: looked["n"].to_numpy() == number,
        )
        return found["name"].to_pylist()

    assert read(3333) == ["3333"]
    with pytest.raises(TableDamaged, match="recovery"):
        read(1111)


@pytest.mark.slow
def test_no_flipped_byte_of_a_page_gives_other_rows(tmp_path: Path) -> None:
    file = ParquetFileWriter(
        LocalStore(tmp_path), "file.parquet", SCHEMA, options={"compression": "none", "use_dictionary": False}
    )
    file.write(rows(*range(1_000_000, 1_000_050)))
    path = tmp_path / file.close({}, []).path
    sound = path.read_bytes()
    page = sound.index(b"".join(number.to_bytes(8, "little") for number in range(1_000_000, 1_000_050)))
    for place in range(page, page + 400):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << place % 8]) + sound[place + 1 :])
        with pytest.raises(TableDamaged, match="recovery"):
            read_file(LocalStore(tmp_path), path.name)
        with pytest.raises(TableDamaged, match="recovery"):
            read_rows(LocalStore(tmp_path), [path.name], SCHEMA)


def test_a_file_that_is_missing_is_told_apart_from_one_that_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(TableDamaged) as missing:
        read_file(LocalStore(tmp_path), "absent.parquet")
    (tmp_path / "empty.parquet").write_bytes(b"")
    with pytest.raises(TableDamaged) as garbled:
        read_file(LocalStore(tmp_path), "empty.parquet")
    assert (missing.value.missing, garbled.value.missing) == (True, False)
    again = pickle.loads(pickle.dumps(missing.value))
    assert (str(again), again.missing) == (str(missing.value), True)


def test_a_column_without_statistics_has_no_bounds(tmp_path: Path) -> None:
    file = ParquetFileWriter(LocalStore(tmp_path), "file.parquet", SCHEMA, options={"write_statistics": ["name"]})
    file.write(rows(1))
    made = json.loads(file.close({}, ["n", "name"]).stats)
    assert (made["minValues"], made["maxValues"]) == ({"name": "1"}, {"name": "1"})


def test_bounds_stand_there_unescaped_for_delta_rs_reads_escaped_pairs_of_surrogates_as_others(tmp_path: Path) -> None:
    file = ParquetFileWriter(LocalStore(tmp_path), "file.parquet", SCHEMA, options={})
    file.write(pa.table({"n": [1], "name": ["\U00020bb7"]}, schema=SCHEMA))
    assert '"\U00020bb7"' in file.close({}, ["name"]).stats


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")], ids=str)
def test_days_and_moments_beyond_pythons_years_have_no_bounds_and_are_written(
    tmp_path: Path, kind: pa.DataType
) -> None:
    whole = pa.int32() if pa.types.is_date(kind) else pa.int64()
    most = (1 << (whole.bit_width - 1)) - 1
    rows = pa.table({"n": [1, 2], "at": pa.array([-most - 1, most], whole).cast(kind)})
    file = ParquetFileWriter(LocalStore(tmp_path), "file.parquet", rows.schema, options={})
    file.write(rows)
    assert list(json.loads(file.close({}, ["n", "at"]).stats)["minValues"]) == ["n"]
    assert read_file(LocalStore(tmp_path), "file.parquet").equals(rows)


def test_bounds_of_moments_are_milliseconds_outwards_and_moments_without_a_zone_have_none(tmp_path: Path) -> None:
    whole = pa.array([-1, 1_500_001], pa.int64())
    rows = pa.table({"at": whole.cast(pa.timestamp("us", "UTC")), "wall": whole.cast(pa.timestamp("us"))})
    file = ParquetFileWriter(LocalStore(tmp_path), "file.parquet", rows.schema, options={})
    file.write(rows)
    made = json.loads(file.close({}, ["at", "wall"]).stats)
    assert made["minValues"] == {"at": "1969-12-31T23:59:59.999Z"}
    assert made["maxValues"] == {"at": "1970-01-01T00:00:01.501Z"}
    assert made["nullCount"] == {"at": 0, "wall": 0}


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4), st.integers(0, 70))
def test_the_bounds_of_long_strings_are_short_and_enclose_them_in_every_order(names: list[str], longer: int) -> None:
    names = [name * longer if longer else name for name in names]
    with TemporaryDirectory() as folder:
        file = ParquetFileWriter(LocalStore(Path(folder)), "file.parquet", SCHEMA, options={})
        file.write(pa.table({"n": range(len(names)), "name": names}, schema=SCHEMA))
        made = json.loads(file.close({}, ["n", "name"]).stats)
    if "name" not in made["maxValues"]:
        long = [name for name in names if len(name) > MAX_STAT_CHARACTERS]
        assert any(min(name[1 : CUT_STAT_CHARACTERS + 1]) >= "\x7f" for name in long), "no ASCII"
        return
    low, high = made["minValues"]["name"], made["maxValues"]["name"]
    assert max(len(low), len(high)) <= MAX_STAT_CHARACTERS
    least, greatest = min(names, key=str.encode), max(names, key=str.encode)
    for order in (str.encode, lambda text: text.encode("utf-16-be")):
        assert order(low) <= order(least)
        assert order(high) >= order(greatest)


@pytest.mark.parametrize("groups", [1, 2])
def test_what_readers_could_misjudge_has_a_count_of_nulls_and_no_bounds(tmp_path: Path, groups: int) -> None:
    inner = pa.struct([("n", pa.int64())])
    columns = {
        "inner": pa.array([{"n": 1}, None], inner),  # its leaf is before the others
        "whole": pa.array([1.5, None]),
        "nan": pa.array([1.5, float("nan")]),
        "endless": pa.array([1.5, float("-inf")], pa.float32()),
        "decimal": pa.array([Decimal("1.5"), None]),
        "wall": pa.array([0, None], pa.timestamp("us")),
        "flag": pa.array([True, None]),
        "raw": pa.array([b"x", None]),
        "nothing": pa.array([None, None], pa.int64()),
        "inner.n": pa.array([7, 8]),
    }
    table = pa.table(columns)
    file = ParquetFileWriter(LocalStore(tmp_path), "file.parquet", table.schema, options={})
    for part in [table] if groups == 1 else [table.slice(1), table.slice(0, 1)]:
        file.write(part)
    made = json.loads(file.close({}, table.column_names).stats)
    assert made["minValues"] == {"whole": 1.5, "inner.n": 7}
    assert made["maxValues"] == {"whole": 1.5, "inner.n": 8}
    assert made["nullCount"] == {
        "whole": 1, "nan": 0, "endless": 0, "decimal": 1, "wall": 1, "flag": 1, "nothing": 2, "inner.n": 0
    }  # fmt: skip


def test_the_file_and_each_new_folder_are_durable_in_the_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = files.sync
    for module in (local, files):
        monkeypatch.setattr(module, "sync", lambda path: (synced.append(path), real(path)))
    file = ParquetFileWriter(LocalStore(tmp_path), "a/b/file.parquet", SCHEMA, options={})
    assert synced == [tmp_path, tmp_path / "a"]
    file.write(rows(1))
    file.close({}, [])
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_discarded_file_is_gone_even_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ParquetFileWriter(LocalStore(tmp_path), "file.parquet", SCHEMA, options={})
    file.write(rows(1))

    def full(*_: object) -> int:
        raise OSError(28, "disk full")

    monkeypatch.setattr("millrace.storage.local.os.write", full)
    with pytest.raises(OSError, match="disk full"):
        file.close({}, [])
    file.discard()
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file.parquet").touch()
    with pytest.raises(FileExistsError):
        ParquetFileWriter(LocalStore(tmp_path), "file.parquet", SCHEMA, options={})


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_rows_are_taken_by_position_and_each_row_group_is_read_up_to_the_last_of_them(
    sizes: list[int], data: st.DataObject
) -> None:
    total = sum(sizes)
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))), dtype=np.int64)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_file, "TAKE_BATCH_ROWS", 8)
        store = LocalStore(folder)
        file = ParquetFileWriter(store, "f.parquet", SCHEMA, options={})
        begins = np.cumsum([0, *sizes])
        for begin, size in zip(begins.tolist(), sizes, strict=False):
            file.write(rows(*range(begin, begin + size)))
        file.close({}, [])
        found, read = take_rows(store, "f.parquet", positions, columns=["name", "n", "nowhere"])
        assert found.select(["n", "name"]).equals(rows(*range(total)).take(positions))
        last = {int(np.searchsorted(begins, each, "right")) - 1: int(each) for each in positions}
        needed = {group: each - int(begins[group]) + 1 for group, each in last.items()}
        batches = {group: -(-rows // 8) for group, rows in needed.items()}
        assert sum(needed.values()) <= read <= sum(needed.values()) + sum(batches.values()) - len(batches)
        with pytest.raises(TableDamaged, match="no row"):
            take_rows(store, "f.parquet", np.array([total]), columns=["n"])


def test_columns_are_stored_as_their_values_repeat_and_shrink(tmp_path: Path) -> None:
    """Engines take longer to decompress, and to look up dictionaries, than to read such a column as it is."""
    draw = np.random.default_rng(0)
    count = 40_000
    texts = pa.array([f"{draw.bytes(4).hex()}: {'the same words ' * 3}" for _ in range(count)])
    made = {
        "random": draw.integers(0, 1 << 62, count),
        "key": np.sort(draw.choice(1 << 17, count, replace=False)),
        "few": draw.integers(0, 100, count),
        "text": texts,
        "kind": pa.array(["a", "b"] * (count // 2)),
        "list": pa.array([[int(n)] for n in draw.integers(0, 1 << 62, count)], pa.list_(pa.int64())),
        "null": pa.nulls(count, pa.float64()),
    }
    rows = pa.table(made)
    options = storage_options(rows, compression="snappy")
    file = ParquetFileWriter(LocalStore(tmp_path), "f.parquet", rows.schema, options=options)
    file.write(rows)
    file.close({}, [])
    group = pq.read_metadata(tmp_path / "f.parquet").row_group(1)
    stored = {
        leaf.path_in_schema: (leaf.compression, "RLE_DICTIONARY" in leaf.encodings)
        for leaf in (group.column(number) for number in range(group.num_columns))
    }
    assert stored == {
        "random": ("UNCOMPRESSED", False),
        "key": ("SNAPPY", False),
        "few": ("UNCOMPRESSED", True),
        "text": ("SNAPPY", False),
        "kind": stored["kind"],
        "list.list.element": ("UNCOMPRESSED", True),
        "null": stored["null"],
    }
    assert read_file(LocalStore(tmp_path), "f.parquet") == rows


def test_few_rows_are_not_encoded_twice() -> None:
    few = pa.table({"n": np.arange(parquet_file.SAMPLE_ROWS - 1)})
    assert storage_options(few, compression="snappy") == {"compression": "snappy"}
