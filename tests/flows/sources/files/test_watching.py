"""Files of a folder: each once, never half-written, whatever is killed, and what is told of those that change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings, PipelineInvalid
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.flows.records import FAULT, PLACE, Record
from millrace.flows.registry import feeder_of, reader_of, source_of
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.files import rows
from millrace.flows.sources.files.model import FilesSource
from millrace.flows.sources.files.watching import FilesPoller
from millrace.flows.sources.source import Limits, task_of
from millrace.pipelines.declaration import pipeline_of
from tests.waiting import until

GROUP = "millrace-files"


class Watched:
    """A folder, and the records that its files come to."""

    def __init__(self, folder: Path, **declared: Any) -> None:
        self.folder, self.settings = folder / "in", Settings(data_dir=folder / "data")
        self.folder.mkdir(exist_ok=True)
        self.declared = FilesSource(**{"folder": str(self.folder), "settle_seconds": 0, "page_rows": 4, **declared})

    def write(self, name: str, *numbers: int, at: int | None = None) -> Path:
        """Write a file of JSON lines, as one that was changed `at` so many seconds."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"n": each}) + "\n" for each in numbers))
        if at is not None:
            os.utime(path, (at, at))
        return path

    def once(self) -> None:
        """Read what there is."""
        with Spool(spool_folder(self.settings, GROUP), write=True) as spool:
            poller = FilesPoller(self.declared)
            poller.begin(None, spool)
            poller.poll(None, spool, lambda: True)

    def records(self) -> list[Record]:
        topic = self.declared.names[0]
        source = source_of(self.declared, self.settings, group=GROUP)
        reader = reader_of(self.declared, self.settings, group=GROUP, topic=topic, partition=0)
        try:
            ends, found = source.ends()[task_of(topic, 0)], list[Record]()
            start = ends.low
            while start < ends.high:
                for batch in reader.batches(start, ends.high, Limits(3, 1 << 20, 0.1)):
                    found += batch.records or ()
                    start = batch.end
            return found
        finally:
            source.close()
            reader.close()

    @property
    def numbers(self) -> list[Any]:
        return [json.loads(each.value or b"")["n"] for each in self.records() if not _fault(each)]

    @property
    def faults(self) -> list[str]:
        return [_fault(each) for each in self.records() if _fault(each)]


def _fault(record: Record) -> str:
    return (dict(record.headers).get(FAULT) or b"").decode().partition(": ")[2]


def test_each_file_is_read_once_in_the_order_of_their_times(tmp_path: Path) -> None:
    watched = Watched(tmp_path, key=("n",))
    watched.write("b.jsonl", *range(10), at=1)
    watched.write("sub/a.jsonl", 10, 11, at=2)
    for name in (".hidden.jsonl", "_tmp/c.jsonl", "d.jsonl.tmp", "e.csv.part.gz", "f.unknown"):
        watched.write(name, 99)
    watched.once()
    watched.once()
    assert watched.numbers == list(range(12))
    first = watched.records()[0]
    assert (first.key, dict(first.headers)[PLACE], first.timestamp) == (b"0", b"b.jsonl:1", 1000)
    watched.write("c.jsonl", 12, at=0)
    watched.once()
    assert watched.numbers == list(range(13))


def test_a_file_that_grows_is_read_when_it_has_stayed_the_same(tmp_path: Path) -> None:
    watched = Watched(tmp_path, settle_seconds=0.3, every_seconds=0.1)
    feeder = feeder_of(watched.declared, watched.settings, group=GROUP)
    assert feeder is not None
    try:
        path = watched.folder / "a.csv"
        with path.open("w") as file:
            file.write("n\n")
            for number in range(8):
                file.write(f"{number}\n")
                file.flush()
                time.sleep(0.1)
                assert watched.numbers == []
        until(lambda: len(watched.numbers) == 8, "the file is read", seconds=20)
        (watched.folder / "b.jsonl.part").write_text('{"n": 8}\n')
        (watched.folder / "b.jsonl.part").rename(watched.folder / "b.jsonl")
        until(lambda: watched.numbers == list(range(9)), "the other one too", seconds=20)
    finally:
        feeder.close()


def test_the_system_tells_of_a_file_long_before_the_next_look(tmp_path: Path) -> None:
    pytest.importorskip("watchfiles")  # it is pinned; a system without it looks by time alone
    watched = Watched(tmp_path, every_seconds=3600)
    feeder = feeder_of(watched.declared, watched.settings, group=GROUP)
    assert feeder is not None
    try:
        feeder.wait_complete(20)
        time.sleep(0.5)
        watched.write("a.jsonl", 1)
        until(lambda: watched.numbers == [1], "it is read", seconds=20)
    finally:
        feeder.close()


@pytest.mark.parametrize(("changed", "numbers", "faults"), [("letter", [1, 2], 1), ("read", [1, 2, 1, 2, 3], 0)])
def test_a_file_that_changes_later_is_told_of_or_read_again(
    tmp_path: Path, changed: str, numbers: list[int], faults: int
) -> None:
    watched = Watched(tmp_path, changed=changed)
    watched.write("a.jsonl", 1, 2, at=1)
    watched.once()
    watched.write("a.jsonl", 1, 2, 3, at=2)
    watched.once()
    watched.once()
    assert (watched.numbers, len(watched.faults)) == (numbers, faults)


def test_what_was_read_is_deleted_if_that_is_declared_and_forgotten_when_it_is_gone(tmp_path: Path) -> None:
    watched = Watched(tmp_path, after="delete")
    for number in range(5):
        path = watched.write("a.jsonl", number, at=number)
        watched.once()
        assert not path.exists()
    watched.once()
    assert watched.numbers == list(range(5))
    with Spool(spool_folder(watched.settings, GROUP)) as spool:
        assert spool.rows_of("select * from files") == []


def test_a_file_with_rows_that_could_not_be_read_is_never_deleted(tmp_path: Path) -> None:
    watched = Watched(tmp_path, after="delete", page_rows=2)
    path = watched.write("a.jsonl", *range(8))
    path.write_text("{\n" + path.read_text())
    (watched.folder / "b.parquet").write_bytes(b"PAR1 nothing")
    env = os.environ | {VARIABLE: "capture.spooled@4", "PYTHONPATH": f"include{os.pathsep}."}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps({"after": "delete", "page_rows": 2})]
    assert subprocess.run(command, env=env, check=False, timeout=60).returncode == -9
    watched.once()
    watched.once()
    assert (watched.numbers, len(watched.faults)) == (list(range(8)), 2)
    assert path.exists()
    assert (watched.folder / "b.parquet").exists()


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_files_that_are_there_are_left_out_if_that_is_declared(tmp_path: Path, start: str) -> None:
    watched = Watched(tmp_path, start=start, after="delete")
    old = watched.write("a.jsonl", 1)
    watched.once()
    watched.write("b.jsonl", 2)
    watched.once()
    assert watched.numbers == ([1, 2] if start == "earliest" else [2])
    assert old.exists() == (start == "latest")


DEEP = b'{"n": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.jsonl", DEEP, "not JSON"),
        ("a.jsonl", b'{"n": "\xff"}', "not JSON"),
        ("a.jsonl", b'{"n": 1e999}', "not JSON"),
        ("a.json", b"[" + DEEP + b"]", "nests too deeply"),
        ("a.csv", b"n,m\n\xff,1", "it is not utf-8"),
        ("a.arrow", b"ARROW1" + bytes(100), "cannot be read"),
        ("a.avro", b"Obj\x01" + b"\xff" * 100, "cannot be read"),
    ],
)
def test_no_file_stops_the_others(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    watched = Watched(tmp_path)
    (watched.folder / name).write_bytes(data + b"\n")
    os.utime(watched.folder / name, (1, 1))
    watched.write("b.jsonl", 1, 2, at=2)
    watched.once()
    watched.once()
    assert watched.numbers == [1, 2]
    [fault] = watched.faults
    assert why in fault


def test_a_line_that_no_message_holds_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE", 100)
    monkeypatch.setattr(rows, "PAGE_BYTES", 30)
    watched = Watched(tmp_path, page_rows=1000)
    path = watched.write("a.jsonl", *range(20))
    with path.open("a") as file:
        file.write(json.dumps({"n": "x" * 3_000_000}) + "\n" + '{"n": 20}')
    watched.once()
    assert watched.numbers == list(range(21))
    assert watched.faults == ["the line is longer than 100 bytes"]
    with path.open("rb") as file:
        parts = [len(each.rows) for each in rows._json(rows._lines(file), {}, 1000, frozenset())]
    assert max(parts) < 10


def test_a_name_that_is_no_text_is_read_like_others(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    path = os.fsencode(watched.folder) + b"/\xff.jsonl"
    with open(path, "w") as file:
        file.write('{"n": 1}\n')
    watched.once()
    watched.once()
    assert watched.numbers == [1]
    assert dict(watched.records()[0].headers)[PLACE] == b"\\xff.jsonl:1"


def test_a_file_that_cannot_be_read_is_told_of_and_the_others_go_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    (watched.folder / "a.parquet").write_bytes(b"PAR1 nothing")
    watched.write("b.jsonl", 1)
    (watched.folder / "b.jsonl").open("a").write("{\n")
    watched.once()
    watched.once()
    assert watched.numbers == [1]
    assert [each.split(":")[0] for each in watched.faults] == ["the file was read only up to row 0", "not JSON"]


def test_a_folder_that_may_not_be_read_for_a_moment_has_the_same_files_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    watched.write("sub/a.jsonl", 1, 2)
    watched.once()
    scandir, look = os.scandir, Path.stat

    def refuse(path: Any) -> None:
        if "sub" in Path(path).parts:
            raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:  # root is refused nothing
        patched.setattr(os, "scandir", lambda path: refuse(path) or scandir(path))
        patched.setattr(Path, "stat", lambda path, **how: refuse(path) or look(path, **how))
        watched.write("b.jsonl", 3)
        watched.once()
    watched.once()
    assert watched.numbers == [1, 2, 3]


PROGRAM = """
import json, sys
from pathlib import Path
from tests.flows.sources.files.test_watching import Watched
Watched(Path(sys.argv[1]), **json.loads(sys.argv[2])).once()
"""


@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("capture.spooling", "delete"),
        ("capture.spooled", "keep"),
        ("capture.file", "delete"),
        pytest.param("capture.spooling", "keep", marks=pytest.mark.slow),
        pytest.param("capture.spooled", "delete", marks=pytest.mark.slow),
        pytest.param("capture.file", "keep", marks=pytest.mark.slow),
    ],
)
def test_rows_come_once_whenever_the_reader_is_killed(tmp_path: Path, point: str, after: str) -> None:
    watched = Watched(tmp_path, after=after)
    watched.write("b.jsonl", *range(10), at=5)
    watched.write("c.jsonl", *range(10, 14), at=6)
    for visit in (2, 3):
        env = os.environ | {VARIABLE: f"{point}@{visit}", "PYTHONPATH": f"include{os.pathsep}."}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps({"after": after})]
        code = subprocess.run(command, env=env, check=False, timeout=60).returncode
        assert code == -9 or (point == "capture.file" and visit == 3)
    watched.write("a.jsonl", *range(14, 20), at=1)  # older than the one in which the reader was killed
    watched.once()
    assert sorted(watched.numbers) == list(range(20))
    assert not watched.faults


def test_the_rest_of_a_file_is_read_though_its_folder_could_not_be_listed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    path = watched.write("a.jsonl", *range(10))
    env = os.environ | {VARIABLE: "capture.spooled@3", "PYTHONPATH": f"include{os.pathsep}."}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "{}"]
    assert subprocess.run(command, env=env, check=False, timeout=60).returncode == -9
    look = Path.stat

    def refused(each: Path, **how: Any) -> os.stat_result:
        if each == path:
            raise PermissionError(13, "Permission denied", str(path))
        return look(each, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refused)
        with pytest.raises(PermissionError):
            watched.once()
    watched.once()
    assert (watched.numbers, watched.faults) == (list(range(10)), [])


def test_the_rest_of_a_file_that_is_gone_is_told_of(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    path = watched.write("a.jsonl", *range(10))
    env = os.environ | {VARIABLE: "capture.spooled@3", "PYTHONPATH": f"include{os.pathsep}."}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "{}"]
    assert subprocess.run(command, env=env, check=False, timeout=60).returncode == -9
    path.unlink()
    watched.once()
    watched.once()
    assert (watched.numbers, len(watched.faults)) == (list(range(8)), 1)
    assert "removed when 8 of its rows were read" in watched.faults[0]


@pytest.mark.parametrize("pattern", ["**/*", "*", "day=*/*.jsonl", "day=2/a.jsonl"])
def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, pattern: str) -> None:
    """Neither those of files, nor those of folders, which a pattern may name."""
    watched = Watched(tmp_path, pattern=pattern)
    for path in (tmp_path / "secret.jsonl", tmp_path / "elsewhere" / "a.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"n": 1}\n')
    (watched.folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (watched.folder / "nowhere.jsonl").symlink_to(tmp_path / "nowhere")
    (watched.folder / "day=1").symlink_to(tmp_path / "elsewhere")
    (watched.folder / "day=2").symlink_to(tmp_path / "elsewhere")
    watched.once()
    assert watched.numbers == []


def test_columns_come_with_the_rows_and_grow_with_the_files(tmp_path: Path) -> None:
    watched = Watched(tmp_path, key=("id",))
    (watched.folder / "a.csv").write_text("id,v\n1,2\n")
    watched.once()
    (watched.folder / "b.csv").write_text("id,w\n2,x\n")
    watched.once()
    topic = watched.declared.names[0]
    reader = reader_of(watched.declared, watched.settings, group=GROUP, topic=topic, partition=0)
    batches = [batch for start in (0, 1) for batch in reader.batches(start, 2, Limits(10, 1 << 20, 0.1))]
    reader.close()
    shapes = [each.columns for each in batches]
    assert [dict(each.types) for each in shapes if each] == [
        {"id": "int64", "v": "int64?"},
        {"id": "int64", "v": "int64?", "w": "string?"},
    ]
    assert shapes[0] is not None
    assert shapes[0].key == ("id",)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["file", "look", "restart", "remove"]), max_size=14), st.integers(1, 5))
def test_no_row_is_lost_or_doubled_whatever_order_files_come_and_go_in(steps: list[str], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(Path(folder), page_rows=size)
        wanted: list[int] = []
        seen: list[Path] = []
        for number, step in enumerate(steps):
            if step == "file":
                rows = list(range(number * 10, number * 10 + number))
                seen.append(watched.write(f"{number % 3}/{number}.jsonl", *rows, at=1000 - number))
                wanted += rows
            elif step == "remove" and seen:
                watched.once()
                seen.pop(0).unlink()
            else:
                watched.once()
        watched.once()
        assert sorted(watched.numbers) == sorted(wanted)
        assert not watched.faults


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"folder": "in"}, "source.files.folder"),
        ({"pattern": "../*"}, "pattern"),
        ({"columns": {"a": "int65"}}, "columns"),
        ({"csv": {"delimiter": ";;"}}, "delimiter"),
        ({"csv": {"header": False}}, "columns"),
        ({"key": ["a", "a"]}, "key"),
    ],
)
def test_a_wrong_declaration_says_which_field(more: dict[str, Any], field: str) -> None:
    declared = {
        "id": "x",
        "source": {"kind": "files", "folder": "/in", **more},
        "sink": {"kind": "collection", "collection": "a"},
        "errors": {"collection": "b"},
    }
    with pytest.raises(PipelineInvalid) as error:
        pipeline_of(declared)
    assert field.rpartition(".")[2] in str(error.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.folder.rmdir()
    with pytest.raises(InvalidSettings, match="there is no folder"):
        feeder_of(watched.declared, watched.settings, group=GROUP)


def test_a_closed_feeder_ends_at_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path, every_seconds=3600)
    feeder = feeder_of(watched.declared, watched.settings, group=GROUP)
    assert feeder is not None
    feeder.wait_complete(20)
    begun = time.monotonic()
    feeder.close()
    assert time.monotonic() - begun < 10
    assert not [each for each in threading.enumerate() if each.name == "capture"]
