"""The access log: its files are bounded, nobody waits for a line, and denied calls are always in it."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from millrace.access.access_log import AccessLog
from millrace.access.grants import Grant, Role
from millrace.base.errors import MillraceError, PermissionDenied
from millrace.catalog.collection import CollectionInfo
from millrace.observe.log_probe import host_metrics
from tests.access.conftest import Guarded
from tests.access.test_remote_clients import connected, own, rows
from tests.waiting import until

__all__ = ["own"]

BATCH = pa.RecordBatch.from_pydict({"id": [1, 2, 3]})


def lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a log's files, the oldest first."""
    files = sorted(path.parent.glob("*.jsonl"), key=lambda file: -int((file.suffixes[:-1] or [".0"])[0][1:]))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def pieces(count: int = 2) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    return iter([(BATCH, b"{}")] * count)


def log_at(path: Path, **options: Any) -> AccessLog:
    return AccessLog(path, **{"sample": 1.0, "file_bytes": 1 << 20, "files": 3} | options)


def test_a_line_says_who_read_what_when_and_how_much(tmp_path: Path) -> None:
    with log_at(tmp_path / "server.jsonl") as log:
        assert len(list(log.read("ada", "append/do_get", "users", pieces()))) == 2
        with log.writing("bo", "append/do_exchange", "dml_0", lambda: (7, 900)):
            pass
    read, write = lines(log.path)
    assert (read["access"], read["principal"], read["on"], read["rows"], read["outcome"]) == (
        "read",
        "ada",
        "users",
        6,
        "ok",
    )
    assert read["bytes"] == 2 * BATCH.nbytes
    assert (write["access"], write["principal"], write["rows"], write["bytes"]) == ("write", "bo", 7, 900)
    assert read["at"].endswith("+00:00")


def test_a_read_that_fails_or_is_left_says_so(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[pa.RecordBatch, bytes]]:
        yield BATCH, b"{}"
        raise PermissionDenied("revoked")

    with log_at(tmp_path / "server.jsonl") as log:
        with suppress(MillraceError):
            list(log.read("ada", "read", "users", failing()))
        left = log.read("ada", "read", "users", pieces())
        next(left)
        left.close()  # type: ignore[attr-defined]  # a sampled read is a generator
    assert [(each["outcome"], each["rows"]) for each in lines(log.path)] == [("PERMISSION_DENIED", 3), ("abandoned", 3)]


@settings(deadline=None, max_examples=25)
@given(st.integers(4 << 10, 12 << 10), st.integers(1, 4), st.integers(1, 400), st.text(max_size=400))
def test_the_files_never_hold_more_than_their_bound_and_keep_the_newest_lines(
    tmp_path_factory: pytest.TempPathFactory, file_bytes: int, files: int, count: int, name: str
) -> None:
    folder = tmp_path_factory.mktemp("bounded")
    for begin in (0, count):  # a second process goes on in the same files
        with log_at(folder / "server.jsonl", file_bytes=file_bytes, files=files) as log:
            for number in range(begin, begin + count):
                log.denied(name, "read", str(number))
    sizes = [file.stat().st_size for file in folder.iterdir()]
    assert max(sizes) <= file_bytes
    assert len(sizes) <= files
    kept = [int(each["on"]) for each in lines(log.path)]
    assert kept == list(range(2 * count - len(kept), 2 * count))


def test_the_share_of_sampled_accesses_is_logged_and_every_denied_one(tmp_path: Path) -> None:
    chances = [0.0, 0.5, 0.09, 0.1]
    with log_at(tmp_path / "server.jsonl", sample=0.1, chance=iter([*chances, 0.9, 0.0]).__next__) as log:
        for number in range(len(chances)):
            list(log.read("ada", "read", str(number), pieces()))
        with suppress(PermissionDenied), log.writing("eve", "append", "dml_0", lambda: (1, 10)):
            raise PermissionDenied("no")
        with suppress(PermissionDenied), log.writing("eve", "append", "merged", lambda: (1, 10), alone=False):
            raise PermissionDenied("each of them comes again")
        log.denied("eve", "read", "orders")
    assert [(each["principal"], each["on"]) for each in lines(log.path)] == [
        ("ada", "0"),
        ("ada", "2"),
        ("eve", "dml_0"),
        ("eve", "orders"),
    ]
    assert [each["sample"] for each in lines(log.path)] == [0.1, 0.1, 1.0, 1.0]


def test_a_line_that_finds_the_queue_full_is_dropped_and_counted_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, inside = threading.Event(), threading.Event()
    log = log_at(tmp_path / "server.jsonl", queued=5)
    write = log._write

    def slow(line: bytes) -> None:
        inside.set()
        gate.wait(30)
        write(line)

    monkeypatch.setattr(log, "_write", slow)
    log.denied("eve", "read", "first")
    assert inside.wait(30)
    begun = time.monotonic()
    for number in range(1000):
        log.denied("eve", "read", str(number))
    assert time.monotonic() - begun < 5
    assert log.counts["dropped"] == 995
    gate.set()
    log.close()
    assert log.counts["written"] == len(lines(log.path)) == 6


def test_a_disk_that_refuses_lines_drops_them_and_the_log_goes_on_later(tmp_path: Path) -> None:
    blocked = tmp_path / "log"
    blocked.write_text("a file where the folder should be")
    with log_at(blocked / "server.jsonl") as log:
        log.denied("eve", "read", "lost")
        until(lambda: log.counts["dropped"] == 1, "the line is counted")
        blocked.unlink()
        log.denied("eve", "read", "kept")
        until(lambda: log.counts["written"] == 1, "the log goes on")
    assert [each["on"] for each in lines(log.path)] == ["kept"]


def test_a_disk_that_takes_a_part_of_a_line_keeps_none_of_it(tmp_path: Path) -> None:
    """The limit of a file's size stands for a full disk: the kernel writes what fits, and then refuses."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with log_at(tmp_path / "server.jsonl", file_bytes=1 << 20) as log:
        log.denied("eve", "read", "whole")
        until(lambda: log.counts["written"] == 1, "the first line is written")
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 40, limits[1]))
        try:
            log.denied("eve", "read", "cut")
            until(lambda: log.counts.total() == 2, "the second line is counted")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.denied("eve", "read", "later")
    assert [each["on"] for each in lines(log.path)] == ["whole", "later"]
    assert log.counts == {"written": 2, "dropped": 1}


def test_a_line_that_a_crash_cut_off_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "server.jsonl"
    path.write_bytes(b'{"at":"2026')
    with log_at(path) as log:
        log.denied("eve", "read", "later")
    torn, later = path.read_text().splitlines()
    assert (torn, json.loads(later)["on"]) == ('{"at":"2026', "later")


def test_a_name_with_a_line_break_stays_in_its_line(tmp_path: Path) -> None:
    with log_at(tmp_path / "server.jsonl") as log:
        log.denied("eve\n{}", "read", 'a"b\n')
    [line] = lines(log.path)
    assert (line["principal"], line["on"]) == ("eve\n{}", 'a"b\n')


def test_a_server_logs_what_it_denies(guarded: Guarded, own: CollectionInfo) -> None:
    name = f"eve-{own.id}"
    token = guarded.add(name, Grant(Role.PRODUCE, (own.name,)))
    with connected(guarded, token) as client:
        with pytest.raises(PermissionDenied):
            client.collection(own.name).read()
        with pytest.raises(PermissionDenied):
            client.new_producer().insert(guarded.client.definition("orders"), rows(1))
    with pytest.raises(MillraceError), connected(guarded, "x" * 43, deadline=2.0) as client:
        client.catalog.collections()
    path = guarded.client.settings.access_log_path

    def logged() -> set[tuple[str, str, str]]:
        return (
            {(each["principal"], each["access"], each["outcome"]) for each in lines(path)} if path.exists() else set()
        )

    until(lambda: (name, "write", "PERMISSION_DENIED") in logged(), "the denied append is logged")
    until(lambda: (name, "call", "PERMISSION_DENIED") in logged(), "the denied read is logged")
    until(lambda: ("-", "call", "UNAUTHENTICATED") in logged(), "the call without a valid token is logged")
    denied = [each for each in lines(path) if each["principal"] == name and each["access"] == "call"]
    assert {each["on"] for each in denied} == {own.name}
    families = text_string_to_metric_families(host_metrics(guarded.client.connection))
    samples = [each for family in families for each in family.samples]
    counted = [each.value for each in samples if each.name == "millrace_access_log_lines_total"]
    assert counted
    assert counted[0] >= len(denied)
