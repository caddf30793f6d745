"""Engines that scan files of an object store by themselves: no deadlock; columns and filters are pushed down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.storage.parquet_file import ObjectScanner, dataset
from millrace.storage.store import TableStore, store_at
from tests.s3_server import bucket

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
SCANS = """
import random, sys, threading, time
from types import SimpleNamespace
import duckdb, pyarrow as pa, pyarrow.fs as fs, pyarrow.parquet as pq
from millrace.storage.parquet_file import dataset

class Slow(fs.FileSystemHandler):
    def __eq__(self, other): return self is other
    def __ne__(self, other): return self is not other
    def get_type_name(self): return "slow"
    def normalize_path(self, path): return path
    def get_file_info(self, paths): return fs.LocalFileSystem().get_file_info(paths)
    def open_input_file(self, path):
        time.sleep(random.choice([0, 0.0001, 0.001, 0.003]))
        return pa.PythonFile(open(path, "rb"), mode="r")
    open_input_stream = open_input_file
    def _refuse(self, *_): raise NotImplementedError
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    get_file_info_selector = move = copy_file = open_output_stream = open_append_stream = _refuse

def compute():
    while True:
        sum(range(1000))

names = [f"{sys.argv[1]}/{number}.parquet" for number in range(40)]
for name in names:
    pq.write_table(pa.table({"id": range(1000)}), name)
for _ in range(2):
    threading.Thread(target=compute, daemon=True).start()
store = SimpleNamespace(filesystem=fs.PyFileSystem(Slow()))
rows = dataset(store, names, pa.schema([("id", pa.int64())]))
for _ in range(80):
    with duckdb.connect() as db:
        db.register("rows", rows)
        assert db.execute("select count(*), sum(id) from rows").fetchall() == [(40_000, 19_980_000)]
"""
"""Scans whose files are opened by Python, beside threads that keep the GIL. pyarrow's own reader deadlocked in it
after 40 of them."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TableStore]:
    with bucket(monkeypatch) as uri:
        yield store_at(f"{uri}/rows")


def test_duckdb_scans_objects_by_a_reader_that_cannot_deadlock(
    store: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{part}.parquet" for part in range(3)]
    for part, name in enumerate(names):
        _write(store, name, pa.table({"id": range(10 * part, 10 * part + 10), "name": ["x"] * 10}, SCHEMA))
    asked: list[list[str]] = []
    reader = ObjectScanner.to_reader

    def noted(scanner: ObjectScanner) -> pa.RecordBatchReader:
        asked.append(scanner.projected_schema.names)
        return reader(scanner)

    monkeypatch.setattr(ObjectScanner, "to_reader", noted)
    rows = dataset(store, names, SCHEMA)
    with duckdb.connect() as db:
        db.register("rows", rows)
        assert db.execute("select sum(id), count(*) from rows where id >= 25").fetchall() == [(135, 5)]
    assert asked == [["id"]]
    assert rows.to_table(columns=["name"], filter=pc.field("id") < 3)["name"].to_pylist() == ["x"] * 3
    assert rows.count_rows() == 30
    assert rows.head(2).num_rows == 2


def _write(store: TableStore, name: str, rows: pa.Table) -> None:
    import pyarrow.parquet as pq

    sink = store.put(name)
    pq.write_table(rows, sink)
    sink.sync()
    sink.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_scans_end_while_other_threads_compute(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCANS, str(tmp_path)], check=True, timeout=360)
