"""Mirrors of logs: they show what the store has, from a cache that may be lost, torn or another table's."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.storage import log_mirror
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.delta_log import LOG_FOLDER, commit_file, trim_log
from millrace.storage.file_sink import FileSink
from millrace.storage.log_mirror import LogMirror, ObjectCache, announce, announced, note_heard, shrink
from millrace.storage.table import LogMaintenance, TableHandle, create_table, table_at
from tests.storage.faulty import FaultyObjects, handle_on

SCHEMA = pa.schema([("row", pa.int64())])
NEVER = LogMaintenance(checkpoint_commits=1000)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(log_mirror, "_made", {})
    monkeypatch.setenv("MILLRACE_CACHE", str(folder))
    return folder / "objects"


def objects(folder: Path) -> FaultyObjects:
    if not folder.exists():
        create_table(folder, SCHEMA, partition_by=[])
    return FaultyObjects(folder, [])


def commit(table: TableHandle, *, maintenance: LogMaintenance = NEVER) -> None:
    base = table.app_version("a")
    sink = FileSink.at(table.uri, SCHEMA, ())
    sink.write(pa.table({"row": [base]}, SCHEMA), {})
    part = CommitPart(tuple(sink.finish()), app_transactions={"a": AppTransaction(base, base + 1)})
    commit_fenced(table, [part], maintenance=maintenance)


def seen(table: TableHandle) -> tuple[int, set[str], int]:
    return table.version, set(table.live_files()), table.app_version("a")


STEPS = st.lists(
    st.sampled_from(["commit", "commit", "commit", "another", "checkpoint", "trim", "look", "lose"]), max_size=25
)


@given(steps=STEPS, pinned=st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_a_mirror_shows_what_the_store_has(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], pinned: int
) -> None:
    folder = tmp_path_factory.mktemp("world") / "t"
    store = objects(folder)
    table, follower = handle_on(store), handle_on(store)
    for step in steps:
        if step == "commit":
            commit(table)
        elif step == "another":
            commit(table_at(folder))  # by the log on the disk, of another process
        elif step == "checkpoint":
            table.write_checkpoint()
        elif step == "trim":
            trim_log(store.inner, keep=0)
        elif step == "lose":
            for each in (log_mirror.cache_folder() / "logs").glob("*/*"):
                each.write_bytes(each.read_bytes()[:-1])  # torn by a power loss
        else:
            follower.refresh()
            assert seen(follower) == seen(table_at(folder))
    table.refresh()
    fresh = handle_on(store)
    assert seen(table) == seen(fresh) == seen(table_at(folder))
    first = min(int(name[:20]) for name in store.list(LOG_FOLDER) if name[:20].isdecimal())
    version = max(first, min(pinned, fresh.version))
    if any(name.startswith(f"{version:020d}.c") for name in store.list(LOG_FOLDER)) or first == 0:
        mirror = LogMirror(store)
        old = TableHandle(store, mirror.load(version), mirror=mirror)
        assert seen(old) == seen(table_at(folder, version=version))


def test_a_handle_whose_version_was_trimmed_goes_to_the_newest(tmp_path: Path) -> None:
    store = objects(tmp_path / "t")
    old, table = handle_on(store), handle_on(store)
    old._mirror._newest_at = None  # type: ignore[union-attr] # it was the newest long ago
    for _ in range(5):
        commit(table)
    table.write_checkpoint()
    trim_log(store.inner, keep=0)
    old.refresh()
    assert seen(old) == seen(table)


def test_a_table_that_was_made_anew_gets_nothing_of_the_one_before(tmp_path: Path) -> None:
    store = objects(tmp_path / "t")
    table = handle_on(store)
    for _ in range(3):
        commit(table)
    table.write_checkpoint()
    for name in store.list(LOG_FOLDER):
        store.delete([f"{LOG_FOLDER}/{name}"])
    create_table(tmp_path / "t", pa.schema([("another", pa.int64())]), partition_by=[])
    assert seen(handle_on(store)) == (0, set(), 0)
    assert handle_on(store).columns == ["another"]


def test_the_cache_is_bounded_and_loses_what_was_used_longest_ago(tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / "logs" / str(number % 2) / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    shrink(tmp_path / "logs", 1000)
    assert len(list(tmp_path.glob("logs/*/*"))) == 10
    shrink(tmp_path / "logs", 500)
    assert sorted(int(path.name) for path in tmp_path.glob("logs/*/*")) == [7, 8, 9]


def test_what_a_process_adds_shrinks_the_cache_now_and_then(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_mirror, "CACHE_BYTES", 20_000)
    monkeypatch.setattr(log_mirror, "CHECK_EVERY", 10)
    kept = ObjectCache("s3://box/t")
    for number in range(100):
        kept.add(f"{number:020d}.json", "tag", bytes(1000))
    assert sum(path.stat().st_size for path in cache.glob("logs/*/*")) <= 20_000 + 10 * 1000


def test_a_poller_asks_the_store_only_for_what_was_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = objects(tmp_path / "t")
    poller, table = handle_on(store), handle_on(store)
    now = [log_mirror.boot_seconds()]
    monkeypatch.setattr(log_mirror, "boot_seconds", lambda: now[0])
    asked: list[str] = []
    read = store.read_tagged
    monkeypatch.setattr(store, "read_tagged", lambda name: asked.append(name) or read(name))  # type: ignore[func-returns-value]
    poller.poll()
    asked.clear()
    for _ in range(100):
        poller.poll()
    assert asked == [], "nothing was announced"
    commit(table)
    asked.clear()
    announce(store.uri)
    poller.poll()
    assert poller.version == table.version
    assert asked == [commit_file(1), commit_file(2)]
    asked.clear()
    for _ in range(24 * 3600):
        now[0] += 1
        poller.poll()
    assert len(asked) <= 24 * 3600 / log_mirror.IDLE_SECONDS + 100, "commits of other machines are looked for"
    assert announced(store.uri)


def test_commits_of_another_machine_are_found_within_the_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = objects(tmp_path / "t")
    poller = handle_on(store)
    now = [log_mirror.boot_seconds()]
    monkeypatch.setattr(log_mirror, "boot_seconds", lambda: now[0])
    commit(table_at(tmp_path / "t"))  # announces nothing here
    now[0] += log_mirror.IDLE_SECONDS
    poller.poll()
    assert poller.version == 1


class Clock:
    """A machine's clock, and what its pollers ask of the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = log_mirror.boot_seconds()
        monkeypatch.setattr(log_mirror, "boot_seconds", lambda: self.now)

    def count(self, store: FaultyObjects, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        asked: list[str] = []
        for name in ("read_tagged", "size", "list_log"):
            call = getattr(store, name)
            monkeypatch.setattr(store, name, lambda part, call=call: asked.append(part) or call(part))
        return asked


def test_the_pollers_of_a_machine_cost_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = objects(tmp_path / "t"), Clock(monkeypatch)
    pollers = [handle_on(store) for _ in range(20)]
    for _ in range(900):  # their pauses grow at first
        clock.now += 1
        for each in pollers:
            each.poll()
    asked, seconds = clock.count(store, monkeypatch), 4 * 3600
    for _ in range(seconds // 10):
        clock.now += 10
        for each in pollers:
            each.poll()
    looks = seconds / log_mirror.IDLE_SECONDS
    assert looks / 2 < len(asked) <= looks + seconds / log_mirror.SEEN_SECONDS + 20


def test_a_machine_that_hears_the_others_looks_less_until_its_carrier_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = objects(tmp_path / "root" / "collections" / "7"), Clock(monkeypatch)
    poller = handle_on(store)
    clock.now += 10_000
    poller.poll()
    asked = clock.count(store, monkeypatch)

    def looks(seconds: int, *, carried: bool) -> int:
        asked.clear()
        for number in range(seconds):
            clock.now += 1
            if carried and number % 5 == 0:
                note_heard(store.uri.removesuffix("/collections/7"))
            poller.poll()
        return len([each for each in asked if each.endswith(".json")])

    hour, note = 3600, log_mirror.SEEN_SECONDS
    assert looks(hour, carried=True) <= hour / log_mirror.HEARD_SECONDS + hour / note + 2
    assert looks(hour, carried=False) >= hour / log_mirror.IDLE_SECONDS - 5, "the carrier ended"
    note_heard(f"{tmp_path}/another/root")
    assert looks(600, carried=False) >= 600 / log_mirror.IDLE_SECONDS - 1, "that is another deployment's"


def test_a_look_of_an_earlier_boot_or_of_another_machine_does_not_count(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = objects(tmp_path / "t"), Clock(monkeypatch)
    poller, other = handle_on(store), handle_on(store)
    clock.now += 10_000
    poller.poll()
    commit(table_at(tmp_path / "t"))  # announces nothing here
    clock.now += log_mirror.IDLE_SECONDS - 1
    (note,) = (cache / "looks").iterdir()
    version, _, boot = note.read_text().split()
    note.write_text(f"{version} {clock.now} {boot}")
    clock.now += 1
    poller.poll()
    assert poller.version == 0, "another process says that it has just looked"
    note.write_text(f"{version} {clock.now} another-boot")
    clock.now += log_mirror.IDLE_SECONDS
    note.write_text(f"{version} {clock.now} another-boot")
    other.poll()
    assert other.version == 1


def test_notes_of_looks_are_bounded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_mirror, "NEWS_FILES", 50)
    monkeypatch.setattr(log_mirror, "CHECK_EVERY", 10)
    store, clock = objects(tmp_path / "t"), Clock(monkeypatch)
    poller = handle_on(store)
    for number in range(200):
        clock.now += log_mirror.IDLE_SECONDS
        announce(f"s3://box/tables/{number}")
        with monkeypatch.context() as patch:
            patch.setattr(FaultyObjects, "uri", f"s3://box/tables/{number}")
            poller.refresh()
    assert 10 < len(list((cache / "looks").iterdir())) <= 50 + 10


@example([("poll", 0), ("commit", 0), ("open", 1), *[("pass", 39), ("poll", 1)] * 3, ("poll", 0)])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["commit", "open", "poll", "poll", "pass", "pass"]), st.integers(0, 39)), max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_each_poller_of_a_machine_finds_a_commit_of_another_within_the_idle_time(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_CACHE", str(folder / "cache"))
        store, clock = objects(folder / "t"), Clock(patch)
        pollers = [handle_on(store) for _ in range(3)]
        clock.now += 10_000
        committed = [clock.now]  # when each version was
        for step, number in steps:
            clock.now += 0.5
            which = number % len(pollers)
            if step == "commit":
                commit(table_at(folder / "t"))  # announces nothing here
                committed.append(clock.now)
            elif step == "open":
                pollers[which] = handle_on(store)
            elif step == "pass":
                clock.now += number
            else:
                pollers[which].poll()
                due = sum(at <= clock.now - log_mirror.IDLE_SECONDS for at in committed) - 1
                assert pollers[which].version >= due


def test_a_log_with_a_gap_is_refused(tmp_path: Path) -> None:
    store = objects(tmp_path / "t")
    table = handle_on(store)
    for _ in range(3):
        commit(table)
    store.delete([commit_file(2)])
    with pytest.raises(DeltaError, match="gaps"):
        LogMirror(store).load()
