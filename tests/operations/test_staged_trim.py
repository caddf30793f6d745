"""Staged files stay for as long as the WAL holds the Import that names them, go with it, and nothing else goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.message.bodies import ImportFile
from millrace.node.flush.definition import flush_to_end
from millrace.operations.checkpoint.staged_trim import TRIM_NOTES_FOLDER
from millrace.operations.recovery.table_repair import rebuild_collection
from millrace.runtime.progress import Progress
from tests.failpoints import at_failpoints
from tests.operations.log_maker import Things
from tests.operations.test_wal_trim import Died, contents, sound, take


def stage(things: Things, vchannel: str, path: str) -> ImportFile:
    (key,) = things.collection.keys_of(vchannel, 101)[100:]
    return things.collection.stage(path, {"id": [key], "body": [path]})


def load(things: Things, name: str, *, replace: bool = False) -> list[Path]:
    """Import a file on each VChannel, then go on; the files."""
    files = []
    for number, vchannel in enumerate(things.collection.vchannels):
        file = stage(things, vchannel, f"{name}/{number}.parquet")
        files.append(things.settings.staged_path / file["path"])
        things.collection.append(vchannel, things.collection.imported([file], vchannel=vchannel, replace=replace))
    things.maker.commit()
    things.fill(2)
    return files


def here(paths: list[Path]) -> list[bool]:
    return [path.exists() for path in paths]


@pytest.mark.slow
def test_the_files_of_trimmed_imports_go_and_no_other(things: Things, short: Settings) -> None:
    things.fill(1)
    first = load(things, "first")
    waiting = stage(things, things.collection.vchannels[0], "waiting/0.parquet")
    (short.staged_path / "first" / "manifest.json").write_text("{}")
    take(things, things.settings)
    assert here(first) == [True, True], "without a retention nothing goes"
    before = contents(short)
    take(things, short)
    assert here(first) == [False, False]
    assert (short.staged_path / waiting["path"]).exists(), "no message names it: it may be about to be named"
    assert [path.name for path in (short.staged_path / "first").iterdir()] == ["manifest.json"]
    assert list((short.staged_path / TRIM_NOTES_FOLDER).iterdir()) == []
    assert contents(short) == before
    sound(things, short)


@pytest.mark.slow
def test_a_file_that_another_message_of_the_wal_names_stays(things: Things, short: Settings) -> None:
    one = things.collection.vchannels[0]
    file = stage(things, one, "shared/0.parquet")
    things.collection.append(one, things.collection.imported([file], vchannel=one))
    things.maker.commit()
    things.fill(2)
    things.collection.append(one, things.collection.imported([file], vchannel=one, replace=True))
    things.maker.commit()
    # The trim goes to the flusher's tick: the second Import lies behind it.
    take(things, short)
    assert (short.staged_path / file["path"]).exists()
    things.fill(1)
    assert "shared/0.parquet" in {row["body"] for row in contents(short)}
    sound(things, short)


PLACES = ["wal_trim.recorded", "wal_trim.checked", "wal_trim.done", "staged_trim.removed"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_trim_that_dies_anywhere_keeps_what_is_needed_and_the_next_removes_the_rest(
    place: str, things: Things, short: Settings
) -> None:
    files = load(things, "load", replace=True)
    before = contents(short)

    def dies(name: str) -> None:
        if name == place:
            raise Died

    with pytest.raises(Died), at_failpoints(dies):
        take(things, short)
    if place in ("wal_trim.recorded", "wal_trim.checked"):
        assert here(files) == [True, True], "nothing was committed"
    assert contents(short) == before
    sound(things, short)
    # A file that was staged since is of nobody's note.
    fresh = stage(things, things.collection.vchannels[0], "fresh/0.parquet")
    take(things, short)
    assert here(files) == [False, False]
    assert (short.staged_path / fresh["path"]).exists()
    assert list((short.staged_path / TRIM_NOTES_FOLDER).iterdir()) == []
    assert contents(short) == before
    sound(things, short)


@pytest.mark.slow
def test_a_damaged_file_keeps_its_pchannel_from_a_base_and_the_others_go_on(things: Things, short: Settings) -> None:
    files = load(things, "load")
    flush_to_end(short)
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-1])
    report = take(things, short)
    assert not report.ok
    problems = {each.pchannel: each.problem for each in report.trimmed}
    assert "put the file back" in problems["p0"]
    assert problems["p1"] == ""
    assert here(files) == [True, False]
    files[0].write_bytes(whole)
    assert take(things, short).ok
    assert here(files) == [False, False]
    sound(things, short)


@pytest.mark.slow
def test_a_collection_is_made_anew_from_its_staged_files(things: Things) -> None:
    load(things, "first")
    load(things, "second", replace=True)
    before = contents(things.settings)
    rebuild_collection(things.settings, 1, progress=Progress())
    assert contents(things.settings) == before
    sound(things, things.settings)
