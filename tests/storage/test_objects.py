"""The store on S3: what every store promises, and what requests that fail, hang or lose their answers come to."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest

import millrace.testing
from millrace.base.errors import (
    InvalidSettings,
    StagedFileDamaged,
    StoreCannotPublish,
    TableDamaged,
    TableUnavailable,
)
from millrace.base.settings import Settings
from millrace.message.bodies import ImportFile
from millrace.storage import commit as commits
from millrace.storage import log_mirror, objects
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.delta_log import LOG_FOLDER, trim_log
from millrace.storage.file_sink import FileSink
from millrace.storage.local import LocalStore
from millrace.storage.object_files import TAIL_BYTES
from millrace.storage.objects import ObjectStore, remove_old_uploads
from millrace.storage.spark import require_spark_writer
from millrace.storage.store import StoreUnreachable, TableStore, conditional, list_below, put_stream, store_at, tagged
from millrace.storage.table import create_table, table_at
from millrace.tables.collections.staged_files import check_staged_files
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
    objects._CONDITIONAL.clear()
    objects._TAGGED.clear()


def _trouble(seed: int) -> Callable[[str, str], str]:
    """What befalls requests: each trouble that a store repeats a request for, and answers that come in pieces."""
    chosen, guard = random.Random(seed), threading.Lock()

    def broken(method: str, path: str) -> str:
        with guard:
            return chosen.choice([""] * 6 + ["slow", "503", "reset", "torn"] + ["lost"] * (method != "PUT NEW"))

    return broken


@pytest.fixture(params=["local", "s3", "s3 in trouble"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TableStore:
    if request.param == "local":
        return LocalStore(tmp_path / "t")
    if request.param == "s3":
        return store_at(f"{request.getfixturevalue('box')}/t")
    uri, faults = request.getfixturevalue("faulty"), request.getfixturevalue("faults")
    faults.break_request = _trouble(5)
    return store_at(f"{uri}/t")


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
    store.delete(["a/none", "a/x"])
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


def _put_first(store: TableStore, name: str, number: int) -> bool | None:
    """Return whether the put won; None if it failed."""
    try:
        return conditional(store).put_if_absent(name, b"%d" % number)
    except OSError:
        return None


def test_of_several_writers_of_one_name_one_wins(store: TableStore) -> None:
    for turn in range(5):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(partial(_put_first, store, f"n{turn}"), range(8)))
        winner = store.read(f"n{turn}")
        assert winner is not None or True not in won
        # An attempt that failed may have won: its caller reads the file back, as a commit does.
        assert winner is None or won[int(winner)] in (True, None)
        assert won.count(True) == (winner is not None and won[int(winner)] is True)


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


def test_a_small_file_is_replaced_as_a_whole_and_what_lies_below_is_listed(store: TableStore) -> None:
    for number in range(5):
        store.replace("notes/state.json", b"%d" % number * 1000)
        assert store.read("notes/state.json") == b"%d" % number * 1000
    assert put_stream(store, "notes/more/large", io.BytesIO(b"x" * 100_000)) == 100_000
    assert list_below(store, "notes") == {"notes/more/large": 100_000, "notes/state.json": 1000}
    assert list_below(store, "nothing") == {}
    with pytest.raises(FileNotFoundError):
        store.filesystem.open_input_stream("notes/none")
    with store.filesystem.open_input_file("notes/more/large") as file:
        assert file.read_at(10, 99_985) == b"x" * 10
    store.sync(["notes/more/large"])
    store.delete(list_below(store))
    assert list_below(store) == {}


def test_a_table_is_made_by_one_of_several_and_opened_at_any_version(store: TableStore) -> None:
    if isinstance(store, ObjectStore):
        objects._CONDITIONAL.clear()
    assert not store.exists()
    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(lambda _: create_table(store.uri, SCHEMA, partition_by=[]), range(4)))
    assert store.exists()
    assert {each.version for each in tables} == {0}
    for number in range(3):
        assert _commit(store.uri, "a", number)
    assert store.delta().version() == 3
    assert store.delta(1).version() == 1
    assert len(table_at(store.uri).live_files()) == 3


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


def test_a_store_that_does_not_answer_has_no_damaged_files(
    faulty: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(faulty, SCHEMA, partition_by=[])
    assert _commit(faulty, "a", 0)
    table, store = table_at(faulty), store_at(faulty)
    [name] = table.live_files()
    size = store.size(name)
    assert size is not None
    staged: ImportFile = {"path": name, "bytes": size, "digest": "", "rows": 1}  # type: ignore[typeddict-item]
    with monkeypatch.context() as once:
        once.setattr(objects, "_retrying", objects._single)
        faults.break_request = lambda method, path: "503"
        with pytest.raises(TableUnavailable, match="cannot reach"):
            table.read(name)
        with pytest.raises(TableUnavailable, match="cannot reach"):
            table_at(faulty)
        with pytest.raises(TableUnavailable, match="cannot reach the staged files"):
            check_staged_files(faulty, [staged])
    faults.break_request = lambda method, path: ""
    assert table_at(faulty).read(name).num_rows == 1
    store.replace(name, b"no Parquet")
    with pytest.raises(TableDamaged, match="repair"):
        table_at(faulty).read(name)
    with pytest.raises(StagedFileDamaged):
        check_staged_files(faulty, [staged])


def test_an_answer_that_ends_early_is_asked_for_again(
    faulty: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_retrying", objects._single)
    store, torn = store_at(faulty), [0]
    write_object(store, "d/f", b"x" * 1000)

    def broken(method: str, path: str) -> str:
        torn[0] += method == "GET"
        return "torn" if method == "GET" and torn[0] % 3 else ""

    faults.break_request = broken
    assert store.read("d/f") == b"x" * 1000
    assert store.list("d") == ["f"]
    with store.filesystem.open_input_file("d/f") as file:
        assert file.read_at(5, 10) == b"x" * 5
    faults.break_request = lambda method, path: "torn"
    with pytest.raises(StoreUnreachable, match="body"):
        store.read("d/f")


def test_a_put_whose_answer_is_lost_is_no_refusal(faulty: str, faults: Faults) -> None:
    faults.break_request = lambda method, path: "lost" if "PUT" in method else ""
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


def test_a_store_that_does_not_know_conditional_puts_is_refused_at_once(faulty: str, faults: Faults) -> None:
    faults.break_request = lambda method, path: "501" if method == "PUT NEW" else ""
    with pytest.raises(StoreCannotPublish, match="If-None-Match"):
        create_table(faulty, SCHEMA, partition_by=[])
    assert faults.requests["PUT"] == 1


def test_a_store_that_is_busy_while_it_is_tried_is_tried_again(
    faulty: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    answers = ["409", "503", "lost", *[""] * 100]
    faults.break_request = lambda method, path: answers.pop(0) if method == "PUT NEW" else ""
    objects.require_conditional_puts(faulty)
    answers[:0] = ["409"]
    objects.require_tagged_puts(faulty)
    assert store_at(faulty).list("") == []


def test_a_process_tries_the_store_once_before_its_first_commit(faulty: str, faults: Faults) -> None:
    create_table(faulty, SCHEMA, partition_by=[])
    objects._CONDITIONAL.clear()  # another process, and the bucket is on another server now
    faults.break_request = lambda method, path: "blind"
    with pytest.raises(StoreCannotPublish, match="If-None-Match"):
        _commit(faulty, "a", 0)
    faults.break_request = lambda method, path: ""
    assert table_at(faulty).version == 0
    faults.requests.clear()
    for number in range(3):
        assert _commit(faulty, "a", number)
    assert sum(each for method, each in faults.requests.items() if method == "PUT") == 2 * 3 + 2


def test_a_file_that_changed_since_it_was_read_is_not_replaced(faulty: str, faults: Faults) -> None:
    store = tagged(store_at(faulty))
    first = store.put_new("n", b"1")
    assert first is not None
    second = store.replace_tagged("n", b"2", first)
    assert second is not None
    assert store.replace_tagged("n", b"3", first) is None
    assert store.read_tagged("n") == (b"2", second)
    store.delete(["n"])
    assert store.replace_tagged("n", b"3", second) is None, "it is gone"
    assert store.read("n") is None
    assert [name for name in store.list("") if "probe" in name] == []
    faults.break_request = lambda method, path: "lost" if method == "PUT" else ""
    first = store.put_new("n", b"1")
    assert first is not None
    with pytest.raises(OSError, match="n: "):
        store.replace_tagged("n", b"2", first)
    assert store.read("n") == b"2"


def test_a_store_that_ignores_tags_is_refused_before_the_first_such_put(faulty: str, faults: Faults) -> None:
    store = tagged(store_at(faulty))
    tag = store.put_new("n", b"1")
    assert tag is not None
    faults.break_request = lambda method, path: "blind" if method == "PUT" else ""
    with pytest.raises(StoreCannotPublish, match="If-Match"):
        store.replace_tagged("n", b"2", tag)
    assert store.read("n") == b"1"
    assert store.list("") == ["n"]
    faults.break_request = lambda method, path: ""
    tag = store.replace_tagged("n", b"2", tag)
    faults.requests.clear()
    assert store.replace_tagged("n", b"3", str(tag)) is not None
    assert faults.requests.total() == 1, "a process tries it once"


def test_a_disk_has_no_tags(tmp_path: Path) -> None:
    with pytest.raises(StoreCannotPublish, match="replace_tagged"):
        tagged(store_at(tmp_path))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://id:opensesame@bucket/x",
        "s3://opensesame%40bucket/x",
        "s3://bucket/x?AWS_SECRET_ACCESS_KEY=opensesame",
        "az://bucket/x?sv=2024&sig=opensesame",
        "s3://bucket/x?X-Amz-Signature=opensesame",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(uri: str) -> None:
    for use in (store_at, lambda tables: Settings.load(env={"HOME": "/h", "MILLRACE_TABLES": tables})):
        with pytest.raises(InvalidSettings, match="holds credentials") as found:
            use(uri)
        assert "opensesame" not in str(found.value)
        assert "object-stores.md" in str(found.value)
    assert store_at("s3://bucket/me@host/x").uri.endswith("me@host/x"), "a prefix may have any name"
    assert Settings.load(env={"HOME": "/h", "MILLRACE_TABLES": "/data/me@host"}).tables == "/data/me@host"


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
    assert faults.requests == {"LIST": 1}, "the entries are in the cache"


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


def test_an_address_is_at_one_server_in_a_process(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, of_log = store_at(f"{faulty}/t"), log_mirror.news_key(f"{faulty}/t")
    assert store.list("") == []
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        with monkeypatch.context() as other:
            other.setenv(name, "http://127.0.0.1:1")
            for call in (lambda: store.list(""), store.delta, lambda: store_at(f"{faulty}/t").read("n")):
                with pytest.raises(InvalidSettings, match=r"has used .* at http.* names http://127.0.0.1:1 now"):
                    call()
            assert log_mirror.news_key(f"{faulty}/t") != of_log, "nor do files of news and caches mix"
    assert store.list("") == []


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
