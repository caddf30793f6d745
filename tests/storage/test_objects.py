"""The store on S3: what every store promises, and what requests that fail, hang or lose their answers come to."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest

import millrace.testing
from millrace.base.errors import InvalidSettings, StoreCannotPublish
from millrace.storage import commit as commits
from millrace.storage import objects
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.delta_log import LOG_FOLDER, trim_log
from millrace.storage.file_sink import FileSink
from millrace.storage.local import LocalStore
from millrace.storage.object_files import TAIL_BYTES
from millrace.storage.objects import ObjectStore, remove_old_uploads
from millrace.storage.spark import require_spark_writer
from millrace.storage.store import TableStore, store_at
from millrace.storage.table import create_table, table_at
from tests.s3_server import KEYS, Faults, bucket

SCHEMA = pa.schema([pa.field("id", pa.int64())])


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket(monkeypatch) as uri:
        yield f"{uri}/some/where"


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as proxy:
        yield proxy


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> Iterator[str]:
    with bucket(monkeypatch, faults.at) as uri:
        yield f"{uri}/t"
    objects._require_conditional_puts.cache_clear()


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TableStore:
    if request.param == "local":
        return LocalStore(tmp_path / "t")
    return store_at(f"{request.getfixturevalue('box')}/t")


def write_object(store: TableStore, name: str, data: bytes) -> None:
    file = store.put(name)
    try:
        file.write(data)
        assert file.sync() == len(data)
    finally:
        file.close()


def test_a_file_is_there_as_a_whole_once_it_is_synced(store: TableStore) -> None:
    assert (store.read("a/x"), store.size("a/x"), store.list("a")) == (None, None, [])
    unfinished = store.put("a/unfinished")
    unfinished.write(b"1")
    assert unfinished.tell() == 1
    unfinished.close()
    write_object(store, "a/x", b"12")
    write_object(store, "a/b/y", b"3")
    assert (store.read("a/x"), store.size("a/x")) == (b"12", 2)
    assert "x" in store.list("a")
    assert store.list("a/b") == ["y"]
    assert list(store_at(store.uri).folders()) == ["a"]
    assert store.list("a/b", age=60) == []
    store.delete(["a/x", "a/none"])
    store.delete([])
    assert store.size("a/x") is None


def test_a_large_file_goes_in_parts_and_one_that_fails_leaves_nothing(
    faulty: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(faulty)
    data = random.Random(1).randbytes(3 * objects.PART_BYTES + 17)
    write_object(store, "big", data)
    assert store.read("big") == data
    assert faults.requests["PUT"] >= 4
    faults.break_request = lambda method, path: "503" if method == "PUT" and "partNumber=2" in path else ""
    monkeypatch.setattr(objects, "_retrying", objects._single)
    with pytest.raises(OSError, match="503"):
        write_object(store, "torn", data)
    assert store.size("torn") is None
    assert faults.requests["DELETE"] == 1, "the upload was aborted"


def test_of_several_writers_of_one_name_one_wins(store: TableStore) -> None:
    for turn in range(5):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(store.put_if_absent, [f"n{turn}"] * 8, [b"%d" % n for n in range(8)]))
        assert won.count(True) == 1
        assert store.read(f"n{turn}") == b"%d" % won.index(True)


def test_a_file_is_taken_from_another_store(store: TableStore, tmp_path: Path) -> None:
    other = LocalStore(tmp_path / "other")
    write_object(other, "d/f", b"x" * 100)
    assert store.take(other, "d/f", "link")
    assert store.take(other, "d/f", "move")
    assert not store.take(other, "d/none", "copy")
    assert store.read("d/f") == b"x" * 100
    back = LocalStore(tmp_path / "back")
    assert back.take(store, "d/f", "copy")
    assert back.read("d/f") == b"x" * 100


def test_objects_are_files_at_random_access(box: str) -> None:
    store, chosen = store_at(box), random.Random(2)
    data = chosen.randbytes(3 * TAIL_BYTES)
    for name, content in (("large", data), ("small", data[:100]), ("empty", b"")):
        write_object(store, name, content)
        with store.filesystem.open_input_file(name) as file:
            assert file.size() == len(content)
            assert file.read() == content
            for _ in range(20):
                place, size = chosen.randrange(len(content) + 1), chosen.randrange(len(content) + 1)
                file.seek(place)
                assert file.read(size) == content[place : place + size]
    with pytest.raises(FileNotFoundError):
        store.filesystem.open_input_file("none")
    assert store.filesystem.get_file_info("none").type == fs.FileType.NotFound
    assert store.filesystem.get_file_info("small").size == 100
    found = store.filesystem.get_file_info(fs.FileSelector("", recursive=True))
    assert sorted(each.path for each in found) == ["empty", "large", "small"]
    pq.write_table(pa.table({"id": range(100_000)}), file_in := pa.BufferOutputStream())
    write_object(store, "t.parquet", file_in.getvalue().to_pybytes())
    assert pq.read_table("t.parquet", filesystem=store.filesystem)["id"].to_pylist() == list(range(100_000))


def test_requests_that_fail_now_and_then_are_repeated(faulty: str, faults: Faults) -> None:
    chosen = random.Random(3)
    faults.break_request = lambda method, path: chosen.choice(["", "", "", "503", "reset"])
    store = store_at(faulty)
    for number in range(8):
        write_object(store, f"f{number}", b"%d" % number)
    assert [store.read(f"f{number}") for number in range(8)] == [b"%d" % number for number in range(8)]


def test_a_put_whose_answer_is_lost_is_no_refusal(faulty: str, faults: Faults) -> None:
    faults.break_request = lambda method, path: "lost" if method == "PUT" else ""
    with pytest.raises(OSError, match="n: "):
        store_at(faulty).put_if_absent("n", b"1")
    faults.break_request = lambda method, path: ""
    assert store_at(faulty).read("n") == b"1"


def test_a_store_that_replaces_files_is_refused(faulty: str, faults: Faults) -> None:
    faults.break_request = lambda method, path: "blind"
    with pytest.raises(StoreCannotPublish, match="If-None-Match"):
        create_table(faulty, SCHEMA, partition_by=[])
    faults.break_request = lambda method, path: ""
    assert not store_at(faulty).exists()
    create_table(faulty, SCHEMA, partition_by=[])
    assert store_at(faulty).exists()


@pytest.mark.parametrize("uri", ["s3://", "s3:///of"])
def test_an_address_without_a_bucket_is_refused(uri: str) -> None:
    with pytest.raises(InvalidSettings, match="bucket"):
        store_at(uri)


def test_spark_reads_tables_on_s3_and_is_told_why_it_writes_none(box: str) -> None:
    store = store_at(box)
    assert store.spark_uri == f"s3a{box.removeprefix('s3')}"
    options = store.spark_options
    assert options["fs.s3a.endpoint"].startswith("http://127.0.0.1:")
    assert not any(secret in value for value in options.values() for secret in KEYS.values() if secret != "us-east-1")
    with pytest.raises(InvalidSettings, match="without a condition"):
        require_spark_writer(store)
    with pytest.raises(InvalidSettings, match="on S3 alone"):
        _ = store_at("gs://box/t").spark_uri


def _commit(uri: str, writer: str, number: int) -> bool:
    sink = FileSink.at(uri, SCHEMA, ())
    sink.write(pa.table({"id": [number]}, schema=SCHEMA), {})
    move = AppTransaction(base=None if number == 0 else number - 1, version=number)
    part = CommitPart(adds=tuple(sink.finish()), app_transactions={writer: move})
    return not commit_fenced(table_at(uri), [part]).fenced


@pytest.mark.parametrize("count", [4, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_racing_writers_commit_each_version_once_through_faults(faulty: str, faults: Faults, count: int) -> None:
    create_table(faulty, SCHEMA, partition_by=[])
    chosen, guard = random.Random(4), threading.Lock()

    def broken(method: str, path: str) -> str:
        with guard:
            return chosen.choice([""] * 12 + ["503", "reset", "lost"])

    faults.break_request = broken

    def writer(name: str) -> None:
        for number in range(count):
            assert _commit(faulty, name, number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(writer, ["a", "b"]))
    faults.break_request = lambda method, path: ""
    table = table_at(faulty)
    assert table.version == 2 * count
    assert sorted(table.delta.to_pyarrow_table(filesystem=table.store.filesystem)["id"].to_pylist()) == sorted(
        [*range(count)] * 2
    )


def test_requests_of_a_commit_and_of_a_look_are_few(faulty: str, faults: Faults) -> None:
    create_table(faulty, SCHEMA, partition_by=[])
    assert _commit(faulty, "a", 0)
    table = table_at(faulty)
    faults.requests.clear()
    table.refresh()
    assert faults.requests == {"GET": 1}
    faults.requests.clear()
    sink = FileSink.at(faulty, SCHEMA, ())
    sink.write(pa.table({"id": [1]}, schema=SCHEMA), {})
    commit_fenced(table, [CommitPart(adds=tuple(sink.finish()), app_transactions={"a": AppTransaction(0, 1)})])
    assert faults.requests == {"PUT": 2}, "the file, and the entry of the log"
    faults.requests.clear()
    opened = table_at(faulty)
    assert (opened.version, len(opened.live_files()), opened.app_version("a")) == (2, 2, 1)
    assert faults.requests == {"GET": 1}, "a listing: the entries are in the cache"


def test_entries_of_a_log_are_removed_only_once_they_are_old(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_table(box, SCHEMA, partition_by=[])
    for number in range(4):
        assert _commit(box, "a", number)
    store = store_at(box)
    store.delta().create_checkpoint()
    assert trim_log(store, keep=0) == 0
    assert len(store.list(LOG_FOLDER)) == 7
    monkeypatch.setattr(ObjectStore, "log_seconds", 0.5)
    time.sleep(1.1)  # a store's clock has whole seconds
    assert trim_log(store, keep=0) == 4
    assert table_at(box).version == 4


def test_a_commit_that_took_too_long_counts_as_unknown(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_table(box, SCHEMA, partition_by=[])
    clock = iter([0.0, objects.LOG_SECONDS, *[objects.LOG_SECONDS] * 10])
    monkeypatch.setattr(commits, "boot_seconds", lambda: next(clock))
    sink = FileSink.at(box, SCHEMA, ())
    sink.write(pa.table({"id": [1]}, schema=SCHEMA), {})
    part = CommitPart(adds=tuple(sink.finish()), app_transactions={"a": AppTransaction(base=None, version=1)})
    found = commit_fenced(table_at(box), [part])
    assert [each.may_be_committed for each in found.fenced.values()] == [True]
    assert table_at(box).version == 1


def test_a_deployment_has_its_tables_on_s3(box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TABLES", "/another/deployment's")  # the log's server reads the tables too
    with millrace.testing.deployment(tmp_path / "data", tables=box) as db:
        users = db.create_collection("users", {"id": "int64", "name": "string"}, key="id")
        users.insert([{"id": number, "name": str(number)} for number in range(100)])
        db.settle(deadline=60)
        users.delete_where("id < 10")
        users.upsert([{"id": 99, "name": "new"}])
        db.settle(deadline=60)
        found = users.read(order_by="id")
        assert found["id"].to_pylist() == list(range(10, 100))
        assert found["name"].to_pylist()[-1] == "new"
    assert not list(tmp_path.rglob("*.parquet"))
    assert {"wal", "segments", "checkpoints"} <= set(store_at(box).folders())


def test_parts_of_killed_uploads_are_removed_once_they_are_old(faulty: str, faults: Faults) -> None:
    def begin(name: str) -> None:
        """Begin an upload as a process does that is killed within it."""
        client = boto3.client("s3", endpoint_url=f"http://{faults.at}", region_name="us-east-1")
        bucket, _, prefix = faulty.removeprefix("s3://").partition("/")
        upload = client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}{name}")["UploadId"]
        client.upload_part(Bucket=bucket, Key=f"{prefix}{name}", UploadId=upload, PartNumber=1, Body=b"1")

    begin("/wal/a")
    begin("/wal/b")
    begin("2/wal/of-another-prefix")
    soon = time.time() + 60
    assert remove_old_uploads(faulty, before=1e9) == 0, "moto says of each that it began in 2010"
    assert remove_old_uploads(faulty, before=soon, dry_run=True) == 2
    assert remove_old_uploads(faulty, before=soon) == 2
    assert remove_old_uploads(faulty, before=soon) == 0
    assert remove_old_uploads(f"{faulty}2", before=soon) == 1
    assert remove_old_uploads("gs://elsewhere/t", before=soon) == 0
    faults.break_request = lambda method, path: "503"
    with pytest.raises(OSError, match="uploads below"):
        remove_old_uploads(faulty, before=soon)
