"""The catalog in the cluster's meta store.

What one machine was told is done, every machine has, whatever fails in between.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings, MetaAmbiguous, MetaUnavailable, UnsupportedVersion
from millrace.coord.broadcast.sqlite_ledger import SqliteLedger
from millrace.coord.catalog import shared as shared_catalog
from millrace.coord.catalog.database import CoordinatorDb
from millrace.coord.catalog.shared import SharedCatalog
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.store_factory import CATALOG_GUARD_KEY, CATALOG_PREFIX
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.meta.memory import MemoryStore
from millrace.meta.store import EventBatch, Listing, Put
from tests.coord.catalog.filled import fill_catalog
from tests.coord.catalog_rig import add_collection, effects_on, finish
from tests.coord.faulty_store import Fault, FaultyStore, Late, done_unheard, down, lost

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")
TABLES = (
    "pchannel",
    "collection",
    "producer",
    "broadcast",
    "target",
    "begun",
    "trouble",
    "request",
    "answered",
    "restored",
    "alias",
)


@pytest.fixture
def meta() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def machine(folder: Path, meta: MemoryStore, name: str) -> CatalogStore:
    """A machine's file of the catalog."""
    return CatalogStore(folder / name / "coord.db", shared=SharedCatalog(meta))


def rows(path: Path) -> dict[str, list[Any]]:
    """All that a file says, without which copy it is."""
    with sqlite3.connect(path) as db:
        return {table: sorted(db.execute(f"select * from {table}").fetchall()) for table in TABLES}


def work(store: CatalogStore) -> None:
    """Something of everything that lies in the file."""
    store.set_id_floor(0)
    store.next_term("dml_0")
    store.mark_term_opened("dml_0", 1)
    store.next_epoch(7, request=f"r{store.next_collection_id()}")
    finish(store, add_collection(store, f"c{store.next_collection_id()}", SCHEMA, vchannels=3))
    store.allocate_partition_id(1)
    store.set_alias("newest", store.next_collection_id() - 1, new=store.find_alias("newest") is None)
    open_still = add_collection(store, f"c{store.next_collection_id()}", SCHEMA)
    store.broadcasts.note_reason(open_still.id, "dml_0 is away")
    given_up = add_collection(store, f"c{store.next_collection_id()}", SCHEMA)
    store.broadcasts.abandon(given_up.id, "refused", lambda task: None)


def test_every_table_of_the_file_is_shared(tmp_path: Path) -> None:
    with CoordinatorDb(tmp_path / "coord.db") as database:
        found = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    assert found - {"shared", "shared_commit", "sqlite_sequence", "vchannel_count"} == set(TABLES)


def test_what_one_machine_did_every_other_one_has(tmp_path: Path, meta: FaultyStore, opened: ExitStack) -> None:
    first = opened.enter_context(machine(tmp_path, meta, "a"))
    second = opened.enter_context(machine(tmp_path, meta, "b"))
    work(first)
    with second.transaction():
        assert [each.name for each in second.collections()] == ["c1", "c2", "c3"]
    assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db")
    assert second.next_epoch(7) == 2
    assert second.next_term("dml_0") == 2
    assert [task.id for task in second.broadcasts.open_tasks()] == [task.id for task in first.broadcasts.open_tasks()]
    finish(second, second.broadcasts.open_tasks()[0])
    assert first.next_epoch(7) == 3, "a file that is behind is made new before it is written"
    assert first.collection("c2").state == "active"
    assert rows(tmp_path / "a/coord.db") != rows(tmp_path / "b/coord.db")
    with second.transaction():
        pass
    assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db")


class Counting(FaultyStore):
    """Counts the documents that its readers get."""

    def __init__(self) -> None:
        super().__init__()
        self.documents = self.listings = 0

    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        found = super().list(prefix, revision=revision)
        self.listings += 1
        return found

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        found = super().changes(prefix, after=after)
        self.documents += len(found.events)
        return found


@pytest.mark.parametrize("others", [10, 600])
def test_a_change_by_another_machine_costs_what_it_changed(tmp_path: Path, others: int, opened: ExitStack) -> None:
    meta = Counting()
    with CatalogStore(tmp_path / "a/coord.db"):
        fill_catalog(tmp_path / "a/coord.db", others, SCHEMA, pchannels=2)
    first = opened.enter_context(machine(tmp_path, meta, "a"))
    second = opened.enter_context(machine(tmp_path, meta, "b"))
    before = meta.listings
    for number in range(3):
        finish(first, add_collection(first, f"new{number}", SCHEMA))
        meta.documents = 0
        with second.transaction():
            assert second.collection(f"new{number}").state == "active"
        assert meta.documents < 20
    assert meta.listings == before, "nobody reads the whole catalog for that"
    assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db")
    finish(first, add_collection(first, "newest", SCHEMA))
    meta.compact(meta.revision)
    with second.transaction():
        assert second.collection("newest").state == "active"
    assert meta.listings == before + 1, "what the store no longer knows is read as a whole"
    assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db")


def test_a_store_that_was_put_back_and_went_on_is_read_as_a_whole(tmp_path: Path, opened: ExitStack) -> None:
    meta = FaultyStore()
    first = opened.enter_context(machine(tmp_path, meta, "a"))
    work(first)
    kept = deepcopy((meta._keys, meta._entries, meta._events, meta._revision))
    second = opened.enter_context(machine(tmp_path, meta, "b"))
    second.next_epoch(1)
    with first.transaction():
        pass  # both have what the store is about to lose
    meta._keys, meta._entries, meta._events, meta._revision = kept
    third = opened.enter_context(machine(tmp_path, meta, "c"))
    third.next_epoch(2)
    third.next_epoch(3)
    with first.transaction():
        pass
    assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "c/coord.db")


def test_the_file_of_a_deployment_is_taken_over_whole(tmp_path: Path, meta: FaultyStore) -> None:
    with CatalogStore(tmp_path / "a/coord.db") as before:
        for _ in range(3):
            work(before)
        for number in range(400):
            before.next_epoch(number * 7919 - 1000)
    kept = rows(tmp_path / "a/coord.db")
    with machine(tmp_path, meta, "a"), machine(tmp_path, meta, "b"):
        assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db") == kept


@pytest.mark.parametrize("fault", [down, done_unheard, lost])
def test_a_taking_over_that_dies_anywhere_is_done_by_the_next(
    tmp_path: Path, meta: FaultyStore, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_catalog, "MAX_CHANGES_PER_COMMIT", 4)
    with CatalogStore(tmp_path / "a/coord.db") as before:
        work(before)
    kept = rows(tmp_path / "a/coord.db")
    for calls in range(7):
        meta.script = [None] * calls + [fault, down, down]  # nothing works from there on
        machine(tmp_path, meta, "a").close()
        assert rows(tmp_path / "a/coord.db") == kept, "the copy can be read meanwhile"
    meta.script = []
    meta.commit([Put(f"{CATALOG_PREFIX}collection/99", b"of one that died")]) if meta.get(
        CATALOG_GUARD_KEY
    ) is None else None
    with machine(tmp_path, meta, "a"), machine(tmp_path, meta, "b"):
        assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db") == kept


def test_what_could_not_be_done_in_the_store_is_not_in_the_file(tmp_path: Path, meta: FaultyStore) -> None:
    with machine(tmp_path, meta, "a") as store:
        assert store.next_epoch(7) == 1
        for script in ([down], [None, down]):  # the look, or the commit
            meta.script = list(script)
            with pytest.raises(MetaUnavailable):
                store.next_epoch(7)
        meta.script = [None, lost, down]  # nor what became of it
        with pytest.raises(MetaAmbiguous):
            store.next_epoch(7)
        assert store.next_epoch(7) == 2


def test_a_store_that_is_away_for_a_moment_is_waited_for(tmp_path: Path, meta: FaultyStore) -> None:
    with CatalogStore(tmp_path / "coord.db", shared=SharedCatalog(meta, retry_seconds=60.0)) as store:
        meta.script = [down, down, None, down]
        assert store.next_epoch(7) == 1


def test_an_answer_that_is_lost_is_looked_for(tmp_path: Path, meta: FaultyStore) -> None:
    with machine(tmp_path, meta, "a") as store:
        meta.script = [None, done_unheard]
        assert store.next_epoch(7) == 1, "it stands"
        meta.script = [None, lost]
        assert store.next_epoch(7) == 2, "nothing was done, and it is done again"
        late = Late()
        meta.script = [None, late]
        assert store.next_epoch(7) == 3
        late.come()
        assert store.next_epoch(7) == 4, "what was not done is not done later"


def test_who_waits_for_the_store_repeats_nothing_that_may_be_done(tmp_path: Path, meta: FaultyStore) -> None:
    with CatalogStore(tmp_path / "a" / "coord.db", shared=SharedCatalog(meta, retry_seconds=5.0)) as store:
        meta.script = [None, done_unheard]
        assert store.next_epoch(7) == 1, (
            "it stands: made again it would find itself in its way, and say that nothing was done"
        )
        meta.script = [None, down, done_unheard]
        assert store.next_epoch(7) == 2
    with machine(tmp_path, meta, "b") as other:
        assert other.next_epoch(7) == 3


def test_who_dies_between_store_and_file_leaves_a_copy_that_is_made_new(
    tmp_path: Path, meta: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def dies(place: str) -> None:
        assert place == "catalog.shared"
        raise Killed

    with CatalogStore(tmp_path / "a/coord.db") as before:
        task = add_collection(before, "c1", SCHEMA)
    with monkeypatch.context() as patch:
        patch.setattr(shared_catalog, "hit", dies)
        with pytest.raises(Killed):
            machine(tmp_path, meta, "a")
    with machine(tmp_path, meta, "a") as store, monkeypatch.context() as patch:
        patch.setattr(shared_catalog, "hit", dies)
        with pytest.raises(Killed):
            finish(store, task)
        with pytest.raises(Killed):
            store.next_epoch(7)
    with machine(tmp_path, meta, "a") as store:
        assert store.next_epoch(7) == 2, "the first was kept where it counts"
        finish(store, task)
        assert store.collection("c1").state == "active"


def test_a_file_that_was_lost_is_there_again(tmp_path: Path, meta: FaultyStore) -> None:
    with machine(tmp_path, meta, "a") as store:
        work(store)
    kept = rows(tmp_path / "a/coord.db")
    (tmp_path / "a/coord.db").unlink()
    with machine(tmp_path, meta, "a"):
        assert rows(tmp_path / "a/coord.db") == kept


def test_a_store_that_lost_the_catalog_has_it_again_from_the_copy(tmp_path: Path, meta: FaultyStore) -> None:
    with machine(tmp_path, meta, "a") as store:
        work(store)
    kept = rows(tmp_path / "a/coord.db")
    empty = FaultyStore()
    empty.script = [None, None, None, done_unheard, down]  # two looks, the documents, the guard, what became of it
    machine(tmp_path, empty, "a").close()
    with machine(tmp_path, empty, "a"), machine(tmp_path, empty, "b"):
        assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db") == kept
    with pytest.raises(InvalidSettings, match="another deployment"):
        machine(tmp_path, meta, "a")  # what came behind it is not in the store that was away


def test_a_store_with_another_deployments_catalog_is_refused_and_nothing_is_changed(
    tmp_path: Path, meta: FaultyStore
) -> None:
    other = FaultyStore()
    with machine(tmp_path, meta, "a") as first, machine(tmp_path, other, "b") as second:
        work(first)
        work(second)
    with CatalogStore(tmp_path / "c/coord.db") as alone:
        work(alone)
    there = meta.list(CATALOG_PREFIX)
    for name in "bc":
        kept = rows(tmp_path / name / "coord.db")
        with pytest.raises(InvalidSettings, match="another deployment"):
            machine(tmp_path, meta, name)
        assert rows(tmp_path / name / "coord.db") == kept
    assert meta.list(CATALOG_PREFIX) == there


def test_a_copy_is_refused_to_who_knows_no_store(tmp_path: Path, meta: FaultyStore) -> None:
    meta.script = [down]
    with machine(tmp_path, meta, "a") as store:
        store.require_not_shared()  # it never was one
        store.next_epoch(7)
        with pytest.raises(InvalidSettings, match="MILLRACE_META_STORE"):
            store.require_not_shared()
    with pytest.raises(InvalidSettings), CatalogStore(tmp_path / "a/coord.db") as alone:
        alone.require_not_shared()


def test_a_catalog_of_a_newer_build_is_refused(tmp_path: Path, meta: FaultyStore) -> None:
    meta.commit([Put(CATALOG_GUARD_KEY, b'{"form": 3, "catalog": "x", "commit": "y"}')])
    with pytest.raises(UnsupportedVersion):
        machine(tmp_path, meta, "a")


def test_many_broadcasts_are_forgotten_at_once(tmp_path: Path, meta: FaultyStore) -> None:
    with CoordinatorDb(tmp_path / "a/coord.db", shared=SharedCatalog(meta)) as database:
        many = CatalogStore.__new__(CatalogStore)
        many._on(database)
        for number in range(1, 160):
            finish(many, add_collection(many, f"c{number}", SCHEMA))
        few = SqliteLedger(database, max_closed=2)
        task = few.add(_draft_of(many, "c160"), effects_on(many).check)
        few.acknowledge(task.id, dict.fromkeys(task.targets, 1))
        few.finish(task.id, effects_on(many).on_acknowledged)
    with machine(tmp_path, meta, "b") as other:
        assert len(other.broadcasts.list_recent(limit=1000)) == 2
        assert len(other.collections()) == 160
    assert rows(tmp_path / "a/coord.db") == rows(tmp_path / "b/coord.db")


def _draft_of(store: CatalogStore, name: str) -> Any:
    from millrace.catalog.collection import CollectionInfo
    from millrace.coord.ddl.callbacks import ddl_draft

    number = store.next_collection_id()
    return ddl_draft(
        "create_collection",
        CollectionInfo(number, name, "creating", (f"dml_0_{number}v0",), (SCHEMA,), {"p": 1}, 2),
        {},
    )


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from(["epoch", "term", "create", "finish", "abandon"]),
            st.lists(st.sampled_from([None, down, done_unheard, lost, "late"]), max_size=5),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_machines_agree_whichever_calls_fail(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    """Two machines on one store that fails.

    What was said to be done is done once, what was said not to be done is not, no epoch or term is given twice, and at
    the end both files say the same.
    """
    folder, meta, late = tmp_path_factory.mktemp("machines"), FaultyStore(), Late()
    given: dict[str, list[int]] = {"epoch": [], "term": []}
    sure: set[str] = set()
    never: set[str] = set()
    with machine(folder, meta, "a") as a, machine(folder, meta, "b") as b:
        for place, (name, act, script, comes) in enumerate(steps):
            store = {"a": a, "b": b}[name]
            meta.script = [late if each == "late" else each for each in script]
            try:
                if act in given:
                    given[act].append(store.next_epoch(7) if act == "epoch" else store.next_term("dml_0"))
                elif act == "create":
                    add_collection(store, f"n{place}", SCHEMA)
                    sure.add(f"n{place}")
                elif tasks := store.broadcasts.open_tasks():
                    if act == "finish":
                        finish(store, tasks[0])
                    else:
                        store.broadcasts.abandon(tasks[0].id, "refused", lambda task: None)
            except MetaUnavailable:
                never.add(f"n{place}")
            except MetaAmbiguous:
                pass
            meta.script = []
            if comes:
                late.come()
        late.come()
        for store in (a, b):
            with store.transaction():
                pass
        names = {each.name for each in a.collections(dropped=True)}
        assert sure <= names
        assert not never & names
        assert all(len(set(each)) == len(each) and each == sorted(each) for each in given.values())
        assert a.next_epoch(7) > max(given["epoch"], default=0)
        with b.transaction():
            pass
        assert rows(folder / "a/coord.db") == rows(folder / "b/coord.db")
