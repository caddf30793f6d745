"""The fenced commit over a store that fails in every way.

Each part is in the table once or not at all, and no file of it is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.base.errors import CommitFenced, DeadlineExceeded, InvalidArgument, MillraceError
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced, set_properties
from millrace.storage.file_sink import FileSink
from millrace.storage.table import TableHandle, create_table, table_at
from tests.failpoints import at_failpoints
from tests.storage.faulty import Attempt, Fault, FaultyObjects, FaultyStore, handle_on

SCHEMA = pa.schema([("row", pa.int64()), ("app", pa.string())])
APPS = ("a", "b")

OTHERS = st.lists(st.sampled_from(["a", "b", "neither", "rewrite"]), max_size=2)
ATTEMPTS = st.lists(
    st.tuples(OTHERS, st.sampled_from(get_args(Fault)), OTHERS, st.sampled_from(["works", "fails", "forgotten"])),
    max_size=5,
)


class World:
    """A table in which the rows of an app id are as many as its version says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "table"
        create_table(self.folder, SCHEMA, partition_by=[])
        self._rows = 0

    def part(self, app: str, base: int, *, removes: tuple[str, ...] = ()) -> CommitPart:
        """One more row of `app`, planned from the version `base`."""
        self._rows += 1
        sink = FileSink.at(self.folder, SCHEMA, ("row",))
        sink.write(pa.table({"row": [self._rows], "app": [app]}, SCHEMA), {})
        return CommitPart(sink.finish(), removes, {} if app == "neither" else {app: AppTransaction(base, base + 1)})

    def another(self, what: str) -> None:
        """Another writer, without trouble of its own."""
        table = table_at(self.folder)
        if what == "rewrite":
            live = list(table.live_files())
            sink = FileSink.at(self.folder, SCHEMA, ("row",))
            sink.write(table.dataset().to_table().cast(SCHEMA), {})
            commit_fenced(table, [CommitPart(sink.finish(), live)], data_change=False).raise_if_fenced()
        else:
            commit_fenced(table, [self.part(what, table.app_version(what))]).raise_if_fenced()

    def check(self) -> dict[int, str]:
        """The rows of the table; each app id has as many as its version says, and each live file is there."""
        table = table_at(self.folder)
        rows = table.dataset().to_table()
        numbers = rows["row"].to_pylist()
        assert len(set(numbers)) == len(numbers), "a row is doubled"
        apps = rows["app"].to_pylist()
        assert {app: apps.count(app) for app in APPS} == {app: table.app_version(app) for app in APPS}
        return dict(zip(numbers, apps, strict=True))


def number(part: CommitPart) -> int:
    return int(part.adds[0].stats.partition('"row": ')[2].partition("}")[0])


@pytest.mark.parametrize("kind", [FaultyStore, FaultyObjects])
@given(script=ATTEMPTS, stale=st.booleans())
@example(script=[([], "lost answer", ["a"], "works")], stale=False)
@example(script=[([], "lost answer", ["a"], "forgotten")], stale=False)
@example(script=[([], "lost answer", ["rewrite"], "forgotten")], stale=False)
@example(script=[([], "fails", ["b"], "forgotten")], stale=False)
@example(script=[([], "lands late", ["b"], "works")], stale=False)
@example(script=[([], "lands at the end", [], "works"), ([], "lands late", ["a"], "fails")], stale=True)
@example(script=[(["a"], "none", [], "works")], stale=False)
@settings(max_examples=60, deadline=None)
def test_whatever_befalls_a_commit_each_part_is_in_the_table_once_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
    kind: type[FaultyStore],
    script: list[tuple[list[str], Fault, list[str], str]],
    stale: bool,
) -> None:
    world = World(tmp_path_factory.mktemp("world"))
    world.another("a")

    def others(names: list[str]) -> None:
        for name in names:
            world.another(name)

    store = kind(
        world.folder,
        [
            Attempt(lambda before=before: others(before), fault, lambda behind=behind: others(behind), reading)
            for before, fault, behind, reading in script
        ],
    )
    table = handle_on(store)
    if stale:
        world.another("b")
    bases = {app: table_at(world.folder).app_version(app) for app in APPS}
    parts = [world.part(app, base) for app, base in bases.items()] + [world.part("neither", 0)]
    try:
        fenced = dict(commit_fenced(table, parts).fenced)
    except MillraceError:
        fenced = None
    store.settle()
    found = world.check()
    for place, part in enumerate(parts):
        there = (world.folder / part.adds[0].path).exists()
        if fenced is None or (place in fenced and fenced[place].may_be_committed):
            assert there, "the files of a commit that may stand stay"
        elif place in fenced:
            assert number(part) not in found
            assert not there, "a fenced part leaves no file"
        else:
            assert number(part) in found


def test_a_part_whose_app_id_moved_stays_out_and_the_others_go_in(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.another("a")
    outcome = commit_fenced(table_at(world.folder), [world.part("a", 0), world.part("b", 0)])
    assert {place: (fence.conflicts, fence.may_be_committed) for place, fence in outcome.fenced.items()} == {
        0: (("a",), False)
    }
    assert sorted(world.check().values()) == ["a", "b"]
    with pytest.raises(CommitFenced, match="a moved"):
        outcome.raise_if_fenced()


def test_a_part_that_takes_away_what_is_gone_stays_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.another("a")
    (gone,) = table_at(world.folder).live_files()
    world.another("rewrite")
    outcome = commit_fenced(table_at(world.folder), [world.part("b", 0, removes=(gone,))])
    assert outcome.fenced[0].conflicts == (gone,)
    world.check()


def test_nobody_is_fenced_by_an_old_handle(tmp_path: Path) -> None:
    world = World(tmp_path)
    old = table_at(world.folder)
    world.another("a")
    outcome = commit_fenced(old, [world.part("a", 1)])
    assert (outcome.fenced, outcome.conflicts) == ({}, 0)


def test_a_handle_that_is_the_newest_looks_for_nothing_newer_before_it_commits(tmp_path: Path) -> None:
    world = World(tmp_path)
    old = table_at(world.folder)
    world.another("a")
    outcome = commit_fenced(old, [world.part("b", 0)])
    assert (outcome.fenced, outcome.conflicts) == ({}, 1), "the version's name was taken: nothing else says so"


def test_two_parts_may_move_an_app_id_alike_and_not_otherwise(tmp_path: Path) -> None:
    world = World(tmp_path)
    table = table_at(world.folder)
    assert not commit_fenced(
        table, [CommitPart(app_transactions={"a": AppTransaction(0, 1)}), world.part("a", 0)]
    ).fenced
    with pytest.raises(InvalidArgument):
        commit_fenced(table, [world.part("a", 1), CommitPart(app_transactions={"a": AppTransaction(0, 1)})])


def test_a_store_that_never_answers_costs_the_deadline_and_the_files_stay(tmp_path: Path) -> None:
    world = World(tmp_path)
    store = FaultyStore(world.folder, [Attempt(fault="times out") for _ in range(10)])
    part = world.part("a", 0)
    with pytest.raises(DeadlineExceeded):
        commit_fenced(TableHandle(store, store.delta()), [part], deadline=0.0)
    assert (store.attempts, (world.folder / part.adds[0].path).exists()) == (1, True)


def test_others_who_are_always_first_cost_the_deadline(tmp_path: Path) -> None:
    world = World(tmp_path)
    store = FaultyStore(world.folder, [Attempt(before=lambda: world.another("b")) for _ in range(3)])
    with pytest.raises(DeadlineExceeded):
        commit_fenced(TableHandle(store, store.delta()), [world.part("a", 0)], deadline=0.0)
    assert sorted(world.check().values()) == ["b"]


@pytest.mark.parametrize("kind", [FaultyStore, FaultyObjects])
def test_a_property_whose_commit_failed_is_set_by_the_next_attempt(tmp_path: Path, kind: type[FaultyStore]) -> None:
    world = World(tmp_path)
    faults = [Attempt(fault="fails"), Attempt(before=lambda: world.another("a"))] if kind is FaultyObjects else []
    table = handle_on(kind(world.folder, faults))
    assert set_properties(table, lambda properties: {} if "millrace.n" in properties else {"millrace.n": "1"})
    assert table_at(world.folder).configuration["millrace.n"] == "1"
    assert table.version == table_at(world.folder).version


def test_a_property_is_set_from_what_stands_there(tmp_path: Path) -> None:
    world = World(tmp_path)
    between = ["7"]

    def act(place: str) -> None:
        if between:
            value = between.pop()
            set_properties(table_at(world.folder), lambda properties: {"millrace.n": value})

    def higher(properties: object) -> dict[str, str]:
        have = int(dict(properties).get("millrace.n") or 0)  # type: ignore[call-overload]
        return {"millrace.n": "5"} if have < 5 else {}

    with at_failpoints(act):
        assert set_properties(table_at(world.folder), higher) is False
    assert table_at(world.folder).configuration["millrace.n"] == "7"
