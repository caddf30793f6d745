"""The embedded log without a server.

A look shows what opening it would show, changes nothing, and stands in nobody's way.
"""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import ChannelNotFound, LogBusy, LogCorrupted, LogUnavailable, PositionTruncated
from millrace.log.generations.service import open_deployment_log
from millrace.log.protocol import LogService
from millrace.log.rocksmq.read_only import ReadOnlyRocksMQ
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import EARLIEST, LogId
from millrace.rpc.discovery import LOCK_FILE
from tests.conformance.reading import Entry, read_all

SMALL = RocksMQSettings(segment_bytes=16 << 10, spare_files=2, lock_wait=0.2)


def filled(folder: Path) -> LogId:
    """Some segments of entries, truncated in the first; a position in the second."""
    with RocksMQ(folder, settings=SMALL) as service:
        service.create("p")
        log = service.open("p")
        ids = [log.append([bytes([number]) * 900, b"", b"x" * number])[0] for number in range(60)]
        log.truncate(ids[3])
        service.move_group("g", "p", ids[5])
    return ids[30]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def look(folder: Path) -> ReadOnlyRocksMQ:
    return ReadOnlyRocksMQ(folder, server_folder=folder)


def entries(service: LogService) -> list[Entry] | str:
    """All entries of the log; the name of what opening or reading it raises."""
    try:
        log = service.open("p")
        return read_all(log, log.describe().begin, max_bytes=4096)
    except LogCorrupted as error:
        return type(error).__name__


def test_a_look_shows_what_opening_shows_and_changes_nothing(tmp_path: Path) -> None:
    middle = filled(tmp_path / "log")
    for name in ("spare-77", "segment.new"):  # of another size, and of a segment that was being made
        (tmp_path / "log" / "channels" / "~p" / name).write_bytes(b"x")
    before = contents(tmp_path / "log")
    with look(tmp_path / "log") as looked:
        log = looked.open("p")
        shown, described, checked = entries(looked), log.describe(), log.verify()
        behind, until = read_all(log, middle), read_all(log, middle, end=described.end)
        with pytest.raises(PositionTruncated):
            log.read(EARLIEST)
        assert (looked.names(), looked.groups()) == (["p"], ["g"])
        position = looked.group_position("g", "p")
        for write in (
            lambda: log.append([b"a"]),
            lambda: log.truncate(middle),
            lambda: looked.create("q"),
            lambda: looked.drop("p"),
            lambda: looked.move_group("g", "p", middle),
            lambda: looked.drop_group("g"),
        ):
            with pytest.raises(LogUnavailable, match="through its server"):
                write()
        with pytest.raises(ChannelNotFound):
            looked.open("q")
    assert contents(tmp_path / "log") == before
    with RocksMQ(tmp_path / "log", settings=SMALL) as service:
        opened = service.open("p")
        assert shown == entries(service)
        assert (described, checked, position) == (opened.describe(), opened.verify(), service.group_position("g", "p"))
        assert behind == until == read_all(opened, middle)


def test_whatever_a_crash_left_a_look_ends_where_opening_would(tmp_path: Path) -> None:
    with RocksMQ(tmp_path / "log", settings=SMALL) as service:
        service.create("p")
        log = service.open("p")
        for number in range(30):
            log.append([bytes([number]) * 700, b"tail"])
        shutil.copytree(tmp_path / "log", tmp_path / "crashed")
    newest = max((tmp_path / "crashed" / "channels" / "~p").glob("*.log"))
    whole = newest.read_bytes()
    ends = set()
    for cut in [*range(0, 4000, 333), len(whole) - 1, len(whole)]:
        newest.write_bytes(whole[:cut])
        before = contents(tmp_path / "crashed")
        with look(tmp_path / "crashed") as looked:
            shown = entries(looked)
        assert contents(tmp_path / "crashed") == before
        shutil.copytree(tmp_path / "crashed", tmp_path / f"opened-{cut}")
        with RocksMQ(tmp_path / f"opened-{cut}", settings=SMALL) as service:
            assert shown == entries(service), cut
        ends.add(shown if isinstance(shown, str) else len(shown))
    assert len(ends) > 3, "the cuts fall into several records"


def test_a_look_and_a_writer_keep_each_other_out(tmp_path: Path) -> None:
    filled(tmp_path / "log")
    with RocksMQ(tmp_path / "log", settings=SMALL), pytest.raises(LogBusy):
        look(tmp_path / "log")
    with look(tmp_path / "log"), look(tmp_path / "log"), pytest.raises(LogBusy):
        RocksMQ(tmp_path / "log", settings=replace(SMALL, lock_wait=0.1))
    with RocksMQ(tmp_path / "log", settings=SMALL) as service:
        assert entries(service)


def test_a_look_gives_way_to_a_server_that_starts_and_stays_away(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    middle = filled(folder)
    with look(folder) as looked:
        log = looked.open("p")
        assert log.read(middle).batch.num_rows
        with (folder / LOCK_FILE).open("ab") as server:
            fcntl.flock(server, fcntl.LOCK_EX)
            for step in (lambda: log.read(middle), log.verify, log.describe, lambda: looked.open("p")):
                with pytest.raises(LogUnavailable, match="ask again"):
                    step()
            with RocksMQ(folder, settings=SMALL) as service:
                assert entries(service)
        with pytest.raises(LogUnavailable):
            log.read(middle)  # what it holds of the files may be old by now


def test_a_deployment_that_is_empty_is_looked_at_and_nothing_is_made(tmp_path: Path) -> None:
    with open_deployment_log(tmp_path / "log", read_only=True) as service:
        assert service.names() == []
    assert not any(tmp_path.iterdir())
