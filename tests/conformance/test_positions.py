"""What consumers' positions promise (millrace.client.consume.positions), run against the file of one node and against
meta stores; and that a cluster's meta store takes over, once and whole, what the file had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    GroupBusy,
    InvalidSettings,
    MetaAmbiguous,
    MetaUnavailable,
    PositionsBusy,
)
from millrace.base.file_lock import exclusive_lock
from millrace.base.settings import Settings
from millrace.client.consume import positions as module
from millrace.client.consume.positions import FilePositions, PositionStore, migrate_positions
from millrace.coord.consumer_positions import (
    MetaStorePositions,
    group_positions_in,
    import_positions,
    open_positions,
    read_group_positions,
)
from millrace.meta.memory import MemoryStore
from millrace.meta.store import MetaStore, Mutation, RevisionEquals
from millrace.node.append.consumer_groups import ConsumerGroups
from millrace.operations.backup.files import BackupFiles
from millrace.operations.backup.log_copy import copy_consumers
from tests.meta.stores import STORES, Hand

NAMES = ("mail", "a/b ü~@%", "x" * 150)
"""Groups: names are the caller's."""
Open = Callable[[], PositionStore]


@pytest.fixture(params=["file", *STORES])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the positions, as another process would."""
    if request.param == "file":
        made: list[PositionStore] = []

        def file() -> PositionStore:
            made.append(FilePositions(tmp_path))
            return made[-1]

        yield file
    else:
        rig = STORES[request.param](tmp_path, 10_000)
        made = []

        def meta() -> PositionStore:
            made.append(MetaStorePositions(Unclosed(rig.another()), seconds=5.0))
            return made[-1]

        yield meta
    for each in made:
        each.close()
    if request.param != "file":
        rig.close()


class Unclosed:
    """A store that others have as well, and of which calls fail when they are told to."""

    def __init__(self, store: MetaStore) -> None:
        self.store = store
        self.fails: list[str] = []
        """What becomes of the next commits.

        "", "before" and "nobody knows" (nothing is done), "after" (done, and nobody is told).
        """

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        how = self.fails.pop(0) if self.fails else ""
        if how == "before":
            raise MetaUnavailable("not there")
        if how == "nobody knows":
            raise MetaAmbiguous("no answer, and nothing was done")
        found = self.store.commit(then, when=when)
        if how == "after":
            raise MetaAmbiguous("no answer")
        return found

    def close(self) -> None: ...


def test_a_group_stands_where_it_was_moved_to_whoever_asks(opened: Open) -> None:
    one, other = opened(), opened()
    for number, name in enumerate(NAMES):
        assert one.get(name, "p0") is None
        one.lock(name, "p0")
        one.lock(name, "p1")
        one.move(name, {"p0": number, "p1": 1 << 62})
        one.move(name, {"p0": number + 1})
        assert (other.get(name, "p0"), other.get(name, "p1"), other.get(name, "p2")) == (number + 1, 1 << 62, None)
    assert other.groups() == {name: {"p0": number + 1, "p1": 1 << 62} for number, name in enumerate(NAMES)}
    assert list(other.groups()) == sorted(NAMES)


def test_a_place_is_one_ones_until_it_is_given_back(opened: Open) -> None:
    one, other = opened(), opened()
    one.lock("mail", "p0")
    with pytest.raises(GroupBusy, match="another consumer of group 'mail' reads p0"):
        other.lock("mail", "p0")
    other.lock("mail", "p1")
    other.lock("post", "p0")
    one.unlock("mail", "p0")
    other.lock("mail", "p0")
    with pytest.raises(GroupBusy):
        one.lock("mail", "p0")
    other.close()
    one.lock("mail", "p0")


def test_a_group_is_dropped_with_its_positions_while_nobody_has_a_place(opened: Open) -> None:
    one, other = opened(), opened()
    for name in ("mail", "mail2"):
        one.lock(name, "p0")
        one.move(name, {"p0": 5})
    with pytest.raises(GroupBusy):
        other.drop("mail", ["p0", "p1"])
    assert other.get("mail", "p0") == 5
    one.unlock("mail", "p0")
    for _ in range(2):
        other.drop("mail", ["p0", "p1"])
    assert one.groups() == {"mail2": {"p0": 5}}
    one.lock("mail", "p0")
    assert one.get("mail", "p0") is None
    one.move("mail", {"p0": 1})
    assert other.get("mail", "p0") == 1


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def memory(clock: Hand) -> Unclosed:
    return Unclosed(MemoryStore(clock))


@pytest.fixture
def meta(memory: Unclosed) -> Iterator[Callable[[], MetaStorePositions]]:
    made: list[MetaStorePositions] = []

    def another() -> MetaStorePositions:
        made.append(MetaStorePositions(memory, seconds=60.0))  # no thread renews within a test: time is the test's
        return made[-1]

    yield another
    for each in made:
        each.close()


def test_behind_a_kill_a_place_is_free_when_its_lease_is_over_and_at_once_for_the_same_holder(
    meta: Callable[[], MetaStorePositions], clock: Hand
) -> None:
    killed, after = meta(), meta()
    killed.lock("mail", "p0", holder="a")
    killed.lock("mail", "p1", holder="b")
    after.lock("mail", "p0", holder="a")  # the server was started anew, and its consumer calls
    clock.now += 59.0
    with pytest.raises(GroupBusy, match="or did until a moment ago"):
        after.lock("mail", "p1", holder="c")
    clock.now += 2.0
    after.lock("mail", "p1", holder="c")


def test_who_lost_a_place_and_finds_it_free_goes_on_and_else_moves_nothing(
    meta: Callable[[], MetaStorePositions], clock: Hand
) -> None:
    sleeper, other = meta(), meta()
    sleeper.lock("mail", "p0")
    sleeper.move("mail", {"p0": 5})
    clock.now += 61.0
    sleeper.move("mail", {"p0": 6})
    clock.now += 61.0
    other.lock("mail", "p0")
    with pytest.raises(GroupBusy):
        sleeper.move("mail", {"p0": 9})
    other.move("mail", {"p0": 7})
    other.unlock("mail", "p0")
    with pytest.raises(GroupBusy, match=r"another consumer moved group .* on p0"):
        sleeper.move("mail", {"p0": 9})
    assert other.get("mail", "p0") == 7


def test_a_move_whose_answer_is_lost_is_made_again_and_a_late_one_takes_nothing_back(
    meta: Callable[[], MetaStorePositions], memory: Unclosed
) -> None:
    one = meta()
    one.lock("mail", "p0")
    late: list[Callable[[], int | None]] = []
    commit = memory.commit

    def on_its_way(then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        if not late:
            late.append(lambda: memory.store.commit(then, when=when))
            raise MetaAmbiguous("no answer")
        return commit(then, when=when)

    memory.commit = on_its_way  # type: ignore[method-assign]
    one.move("mail", {"p0": 5})
    one.move("mail", {"p0": 6})
    assert late[0]() is None
    memory.fails = ["before", "after"]
    one.move("mail", {"p0": 7})
    assert one.get("mail", "p0") == 7
    one.move("mail", {"p0": 8})
    assert one.groups() == {"mail": {"p0": 8}}


@pytest.mark.parametrize("how", ["nobody knows", "after"])
def test_a_place_whose_answer_is_lost_is_looked_for_before_it_counts_as_taken(
    meta: Callable[[], MetaStorePositions], memory: Unclosed, how: str
) -> None:
    one, other = meta(), meta()
    memory.fails = [how]
    one.lock("mail", "p0")
    with pytest.raises(GroupBusy):
        other.lock("mail", "p0")
    one.move("mail", {"p0": 5})
    one.unlock("mail", "p0")
    other.lock("mail", "p0")
    assert other.get("mail", "p0") == 5


def test_a_lock_of_an_earlier_build_is_respected_and_its_file_goes(tmp_path: Path) -> None:
    earlier, here = tmp_path / "group-a%2Fb-p0.lock", FilePositions(tmp_path)
    with exclusive_lock(earlier, deadline=Deadline.after(0)):
        with pytest.raises(GroupBusy):
            here.lock("a/b", "p0")
        here.lock("a/b", "p1")
    here.lock("a/b", "p0")
    assert not earlier.exists()
    here.close()


def written(folder: Path, groups: dict[str, dict[str, int]]) -> None:
    file = FilePositions(folder)
    for group, ticks in groups.items():
        file.move(group, ticks)
    file.close()


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("at", range(5))
def test_a_meta_store_takes_over_what_the_file_had_once_wherever_it_breaks_off(
    tmp_path: Path, memory: Unclosed, at: int, how: str
) -> None:
    had = {
        f"g{number}": {f"p{place}": number for place in range(40)} for number in range(10)
    }  # four commits' worth, behind the claim
    written(tmp_path, had)
    stale = MetaStorePositions(memory, seconds=60.0)  # of a deployment before a restore: ahead of the log
    stale.move("g0", {"p0": 99})
    stale.move("gone", {"p0": 99})
    stale.close()
    memory.fails = [""] * at + [how]
    with pytest.raises((MetaUnavailable, MetaAmbiguous)):
        migrate_positions(tmp_path, partial(import_positions, memory))  # type: ignore[arg-type]
    memory.fails = []
    file = FilePositions(tmp_path)  # the file is the truth still: who goes back to it loses nothing
    assert file.groups() == had
    file.move("g1", {"p0": 50})
    file.close()
    had["g1"]["p0"] = 50
    for _ in range(2):
        migrate_positions(tmp_path, partial(import_positions, memory))  # type: ignore[arg-type]
        assert group_positions_in(memory) == had  # type: ignore[arg-type]
        mover = MetaStorePositions(memory, seconds=60.0)  # and behind it nothing is taken a second time
        mover.move("g2", {"p3": 77})
        mover.close()
        had["g2"]["p3"] = 77
    with pytest.raises(InvalidSettings, match="MILLRACE_META_STORE"):
        FilePositions(tmp_path)


@pytest.mark.parametrize("lost", ["absent", "empty"])
def test_a_data_folder_without_positions_wipes_none_of_the_meta_store(
    tmp_path: Path, memory: Unclosed, lost: str
) -> None:
    had = {"mail": {"p0": 5, "p1": 7}}
    first, second = tmp_path / "first", tmp_path / "second"
    written(first, had)
    if lost == "empty":
        written(second, {})
    migrate_positions(first, partial(import_positions, memory))  # type: ignore[arg-type]
    migrate_positions(second, partial(import_positions, memory))  # type: ignore[arg-type]
    assert group_positions_in(memory) == had  # type: ignore[arg-type]
    (first / module.FILE).unlink()  # lost
    migrate_positions(first, partial(import_positions, memory))  # type: ignore[arg-type]
    assert group_positions_in(memory) == had  # type: ignore[arg-type]
    with pytest.raises(InvalidSettings, match="MILLRACE_META_STORE"):
        FilePositions(first)


def test_positions_that_a_store_has_without_a_file_outlive_an_empty_data_folder(
    tmp_path: Path, memory: Unclosed
) -> None:
    there = MetaStorePositions(
        memory, seconds=60.0
    )  # servers of an earlier build: the store does not say of which file they are
    there.move("mail", {"p0": 5})
    there.close()
    for folder in (tmp_path / "one", tmp_path / "other"):
        migrate_positions(folder, partial(import_positions, memory))  # type: ignore[arg-type]
        assert group_positions_in(memory) == {"mail": {"p0": 5}}  # type: ignore[arg-type]


def test_a_store_that_is_in_use_takes_no_other_files_positions(tmp_path: Path, memory: Unclosed) -> None:
    one, other, empty = tmp_path / "one", tmp_path / "other", tmp_path / "empty"
    written(one, {"mail": {"p0": 5}})
    written(other, {"post": {"p0": 9}})
    memory.fails = ["", "before"]  # behind the claim
    with pytest.raises(MetaUnavailable):
        migrate_positions(one, partial(import_positions, memory))  # type: ignore[arg-type]
    for folder in (other, empty):
        with pytest.raises(MetaUnavailable, match="has not finished"):
            migrate_positions(folder, partial(import_positions, memory))  # type: ignore[arg-type]
    migrate_positions(one, partial(import_positions, memory))  # type: ignore[arg-type]
    migrate_positions(empty, partial(import_positions, memory))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(InvalidSettings, match="another data folder"):
            migrate_positions(other, partial(import_positions, memory))  # type: ignore[arg-type]
    file = FilePositions(other)
    assert file.groups() == {"post": {"p0": 9}}, "what was refused is as it was"
    file.close()
    assert group_positions_in(memory) == {"mail": {"p0": 5}}  # type: ignore[arg-type]
    (other / module.FILE).unlink()  # what the error says to do
    migrate_positions(other, partial(import_positions, memory))  # type: ignore[arg-type]
    assert group_positions_in(memory) == {"mail": {"p0": 5}}  # type: ignore[arg-type]


def test_what_moved_in_the_store_behind_a_take_over_whose_answer_was_lost_stays_there(
    tmp_path: Path, memory: Unclosed
) -> None:
    written(tmp_path, {"mail": {"p0": 5, "p1": 5}})
    memory.fails = ["", "after"]
    with pytest.raises(MetaAmbiguous):
        migrate_positions(tmp_path, partial(import_positions, memory))  # type: ignore[arg-type]
    there = MetaStorePositions(memory, seconds=60.0)  # another server goes on
    there.move("mail", {"p0": 9})
    there.move("new", {"p0": 1})
    there.close()
    migrate_positions(tmp_path, partial(import_positions, memory))  # type: ignore[arg-type]
    assert group_positions_in(memory) == {"mail": {"p0": 9, "p1": 5}, "new": {"p0": 1}}  # type: ignore[arg-type]


def test_a_consumer_at_work_on_the_file_keeps_it_from_being_taken_over(tmp_path: Path, memory: Unclosed) -> None:
    written(tmp_path, {"mail": {"p0": 5}})
    at_work = FilePositions(tmp_path)
    at_work.lock("mail", "p0")
    with pytest.raises(GroupBusy):
        migrate_positions(tmp_path, partial(import_positions, memory))  # type: ignore[arg-type]
    at_work.unlock("mail", "p0")
    at_work.lock("new", "p0")  # and one that has moved nothing so far hears of it when it does
    migrate_positions(tmp_path, partial(import_positions, memory))  # type: ignore[arg-type]
    with pytest.raises(InvalidSettings):
        at_work.move("new", {"p0": 1})
    at_work.close()


def test_the_settings_say_where_positions_lie_and_looking_takes_nothing_over(tmp_path: Path) -> None:
    one_node = Settings(data_dir=tmp_path)
    cluster = Settings(data_dir=tmp_path, meta_store=f"sqlite:///{tmp_path}/meta.db")
    assert read_group_positions(one_node) == read_group_positions(cluster) == {}
    assert not (tmp_path / "coord").exists()
    written(tmp_path / "coord", {"mail": {"p0": 5}})
    assert read_group_positions(cluster) == {"mail": {"p0": 5}}
    here = open_positions(one_node)
    assert isinstance(here, FilePositions)
    here.close()
    there = open_positions(cluster)
    there.lock("mail", "p0")
    there.move("mail", {"p0": 6})
    assert read_group_positions(cluster) == {"mail": {"p0": 6}}
    there.close()
    second = replace(cluster, data_dir=tmp_path / "second")
    written(second.data_dir / "coord", {})
    assert read_group_positions(second) == {"mail": {"p0": 6}}, "an empty file says nothing"
    open_positions(second).close()
    assert read_group_positions(cluster) == {"mail": {"p0": 6}}
    with pytest.raises(InvalidSettings):
        read_group_positions(one_node)


def test_a_file_that_another_process_holds_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.05)
    one, other = FilePositions(tmp_path), FilePositions(tmp_path)
    with one._writing():
        for call in (lambda: other.move("mail", {"p0": 1}), lambda: other.drop("mail", ["p0"])):
            with pytest.raises(PositionsBusy, match="another process holds"):
                call()
    other.move("mail", {"p0": 1})
    other.close()
    one.close()


def test_a_consumer_goes_on_at_another_server_of_the_same_meta_store(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, meta_store=f"sqlite:///{tmp_path}/meta.db")
    servers = [ConsumerGroups(tmp_path, lambda: ["p0"], positions=lambda: open_positions(settings)) for _ in range(2)]

    def asks(at: int, holder: str, **what: object) -> dict[str, object]:
        return servers[at].handle({"group": "mail", "holder": holder, **what})

    asks(0, "a", take="p0")
    asks(0, "a", move={"p0": [None, 5]})
    with pytest.raises(GroupBusy):
        asks(1, "b", take="p0")
    asks(1, "a", move={"p0": [5, 6]})  # the first server cannot be reached any more
    asks(1, "a", leave=["p0"])
    assert asks(1, "b", take="p0")["tick"] == 6
    asks(1, "b", move={"p0": [6, 9]})
    with pytest.raises(GroupBusy):
        asks(0, "a", move={"p0": [6, 8]})
    for each in servers:
        each.close()
    assert read_group_positions(settings) == {"mail": {"p0": 9}}


def test_a_backup_has_the_positions_as_a_file_wherever_they_lie(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", meta_store=f"sqlite:///{tmp_path}/meta.db")
    there = open_positions(settings)
    there.move("mail", {"p0": 6})
    there.close()
    copy_consumers(settings, BackupFiles(tmp_path / "backup"))
    restored = FilePositions(tmp_path / "backup" / "data" / "coord")
    assert restored.groups() == {"mail": {"p0": 6}}
    restored.close()
