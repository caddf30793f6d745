"""Another name of a collection: it serves wherever the name does, and always means one collection or the other."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from millrace.access.grants import Caller, Grant, Principal, Role
from millrace.base.errors import (
    AliasExists,
    AliasNotFound,
    CollectionExists,
    CollectionHasAliases,
    CollectionNotFound,
    InvalidArgument,
    MillraceError,
    PermissionDenied,
    UnsupportedVersion,
)
from millrace.base.settings import Settings
from millrace.catalog.calls import RemoteCatalog, dispatch
from millrace.catalog.sqlite_file import catalog_path, read_aliases, read_collection
from millrace.coord.catalog import shared as shared_catalog
from millrace.coord.catalog import store as catalog_store
from millrace.coord.catalog.database import CoordinatorDb
from millrace.coord.catalog.shared import SharedCatalog
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.coordinator import Coordinator
from millrace.coord.store_factory import CATALOG_GUARD_KEY
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from tests.coord.ddl.rig import SCHEMA, ChainLog
from tests.coord.faulty_store import FaultyStore

ADMIN = Caller(Principal.admin("ops"))


@pytest.fixture
def catalog(settings: Settings) -> Iterator[Coordinator]:
    log = ChainLog()
    with Coordinator(settings, log=log, append=log) as made:  # type: ignore[arg-type]
        made.ensure_pchannels(1)
        for name in ("v1", "v2"):
            made.create_collection(name, SCHEMA)
        yield made


class Connection:
    """A client's connection that counts its calls."""

    def __init__(self, catalog: Coordinator, caller: Caller = ADMIN) -> None:
        self.catalog_, self.caller, self.calls = catalog, caller, list[str]()

    def catalog(self, call: str, arguments: object, *, repeat: bool) -> dict[str, object]:
        self.calls.append(call)
        return dispatch(self.catalog_, call, json.loads(json.dumps(arguments)), self.caller)


def test_an_alias_serves_for_reads_and_ddl_and_moves_at_once(catalog: Coordinator, settings: Settings) -> None:
    catalog.create_alias("now", "v1")
    catalog.create_alias("now", "v1")  # there already: no error
    assert catalog.collection("now").name == "v1"
    assert catalog.create_partition("now", "eu") == catalog.collection("v1").partitions["eu"]
    assert catalog.alter("now", [AddField(FieldSpec("age", "int32", True))]) == 2
    assert catalog.flush("now") == {"dml_0_1v0": 0}
    catalog.alter_alias("now", "v2")
    assert catalog.collection("now").name == "v2"
    assert catalog.collection("now").schema_version == 1, "the change went to the other collection"
    found = read_collection(settings.data_dir, "now")
    assert found is not None
    assert found.name == "v2"
    assert read_aliases(settings.data_dir) == {"now": 2}
    assert catalog.aliases() == {"now": "v2"}
    assert catalog.aliases("v1") == {}
    catalog.drop_alias("now")
    with pytest.raises(CollectionNotFound):
        catalog.collection("now")


def test_an_alias_and_a_collection_share_no_name(catalog: Coordinator) -> None:
    with pytest.raises(AliasExists, match="name of a collection"):
        catalog.create_alias("v2", "v1")
    catalog.create_alias("now", "v1")
    with pytest.raises(AliasExists, match="use alter_alias"):
        catalog.create_alias("now", "v2")
    with pytest.raises(CollectionExists):
        catalog.create_collection("now", SCHEMA)
    assert catalog.create_collection("now", SCHEMA, exist_ok=True).name == "v1"
    for wrong in ("", "a b", "/", "x" * 256):
        with pytest.raises(InvalidArgument):
            catalog.create_alias(wrong, "v1")
    for call in (catalog.drop_alias, lambda name: catalog.alter_alias(name, "v1")):
        with pytest.raises(AliasNotFound):
            call("nothing")
    with pytest.raises(CollectionNotFound):
        catalog.create_alias("other", "nothing")


def test_a_collection_with_aliases_is_not_dropped_and_no_collection_is_dropped_by_alias(catalog: Coordinator) -> None:
    catalog.create_alias("now", "v1")
    with pytest.raises(CollectionHasAliases, match="now"):
        catalog.drop_collection("v1")
    assert catalog.collection("v1").state == "active"
    with pytest.raises(InvalidArgument, match="v1"):
        catalog.drop_collection("now")
    catalog.alter_alias("now", "v2")
    catalog.drop_collection("v1")
    with pytest.raises(CollectionNotFound):
        catalog.alter_alias("now", "v1")
    assert catalog.collection("now").name == "v2"


def test_a_repeated_request_has_the_first_ones_effect(catalog: Coordinator) -> None:
    catalog.create_alias("now", "v1", request="a")
    catalog.alter_alias("now", "v2", request="b")
    catalog.create_alias("now", "v1", request="a")  # its answer was lost, and others went on
    assert catalog.aliases() == {"now": "v2"}
    made = dispatch(catalog, "create_partition", {"name": "now", "partition": "eu", "request": "p"}, ADMIN)
    catalog.alter_alias("now", "v1", request="c")
    again = dispatch(catalog, "create_partition", {"name": "now", "partition": "eu", "request": "p"}, ADMIN)
    assert made == again
    assert made["collection"] == "v2", "not that of the alias by now"
    catalog.drop_alias("now", request="d")
    catalog.drop_alias("now", request="d")
    with pytest.raises(AliasNotFound):
        catalog.drop_alias("now", request="e")


def test_a_client_forgets_a_definition_under_each_of_its_names(catalog: Coordinator) -> None:
    connection = Connection(catalog)
    remote = RemoteCatalog(connection)
    remote.create_alias("now", "v1")
    remote.create_alias("too", "v1")
    for changed in ("now", "v1", "too"):
        for name in ("now", "too", "v1"):
            remote.definitions.get(name)
        remote.create_partition(changed, f"by_{changed}")
        for name in ("now", "too", "v1"):
            assert f"by_{changed}" in remote.definitions.get(name).partitions, (changed, name)
    remote.definitions.forget("now")
    remote.definitions.get("v1")
    remote.create_partition("now", "unseen")  # an alias that is not cached
    assert "unseen" in remote.definitions.get("v1").partitions
    remote.definitions.get("now")
    remote.alter_alias("now", "v2")
    assert remote.definitions.get("now").name == "v2"
    before = len(connection.calls)
    assert remote.definitions.get("now").name == "v2"
    assert len(connection.calls) == before, "a hit makes no call"


def test_an_alias_has_no_grants_of_its_own(catalog: Coordinator) -> None:
    catalog.create_alias("now", "v1")

    def caller(*patterns: str) -> Caller:
        return Caller(Principal("p", (Grant(Role.OPERATE, patterns),)))

    for call, arguments in (
        ("collection", {"name": "now"}),
        ("create_partition", {"name": "now", "partition": "eu"}),
        ("drop_alias", {"alias": "now"}),
        ("alter_alias", {"alias": "now", "collection": "v2"}),
        ("create_collection", {"name": "now", "schema": SCHEMA.to_json(), "vchannels": 1, "partitions": ["p"]}),
    ):
        with pytest.raises(PermissionDenied):
            dispatch(catalog, call, arguments, caller("collection:now", "collection:v2"))
    assert dispatch(catalog, "collection", {"name": "now"}, caller("collection:v1"))["name"] == "v1"
    with pytest.raises(PermissionDenied):
        dispatch(catalog, "create_alias", {"alias": "other", "collection": "v1"}, caller("collection:v1"))
    with pytest.raises(PermissionDenied):
        dispatch(catalog, "alter_alias", {"alias": "now", "collection": "v2"}, caller("collection:v1"))
    dispatch(catalog, "alter_alias", {"alias": "now", "collection": "v2"}, caller("collection:v*"))
    assert dispatch(catalog, "aliases", {}, caller("collection:v1")) == {"aliases": {}}
    assert dispatch(catalog, "aliases", {}, caller("collection:v2")) == {"aliases": {"now": "v2"}}


def test_readers_of_an_alias_that_moves_always_find_one_of_its_collections(settings: Settings) -> None:
    log = ChainLog()
    with Coordinator(settings, log=log, append=log) as catalog:  # type: ignore[arg-type]
        catalog.ensure_pchannels(1)
        for name in ("v1", "v2"):
            catalog.create_collection(name, SCHEMA)
        catalog.create_alias("now", "v1")
        found: list[object] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                each = read_collection(settings.data_dir, "now")
                found.append(each and each.name)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for turn in range(100):
            catalog.alter_alias("now", ("v2", "v1")[turn % 2])
        stop.set()
        for reader in readers:
            reader.join()
    assert set(found) <= {"v1", "v2"}
    assert found


def test_aliases_cost_nothing_per_call(catalog: Coordinator, settings: Settings) -> None:
    def steps(name: str) -> int:
        """The steps of SQLite's machine that a lookup takes, in hundreds."""
        with CatalogStore(catalog_path(settings.data_dir)) as store:
            counted = 0

            def count() -> None:
                nonlocal counted
                counted += 1

            store._db.with_connection(lambda db: db.set_progress_handler(count, 10))
            store.collection(name)
            store.set_alias("one", 1, new=False)
            store.require_no_alias(store.collection_by_id(2))
            return counted

    catalog.create_alias("one", "v1")
    before = steps("one")
    for number in range(1_000):
        catalog.create_alias(f"a{number}", "v1")
    assert steps("one") <= before + 2
    with pytest.raises(CollectionHasAliases, match="and 991 more"):
        catalog.drop_collection("v1")


def test_there_are_not_more_aliases_than_a_deployment_may_have(
    catalog: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_store, "MAX_ALIASES", 2)
    catalog.create_alias("one", "v1")
    catalog.create_alias("two", "v1")
    catalog.create_alias("two", "v1")
    catalog.alter_alias("two", "v2")
    with pytest.raises(InvalidArgument, match="at most 2"):
        catalog.create_alias("three", "v1")


def test_a_file_of_an_earlier_build_has_no_aliases_and_gets_them(catalog: Coordinator, settings: Settings) -> None:
    catalog.close()
    with sqlite3.connect(catalog_path(settings.data_dir)) as db:
        db.execute("drop table alias")
    assert read_aliases(settings.data_dir) == {}
    assert read_collection(settings.data_dir, "now") is None
    assert read_collection(settings.data_dir, "v1") is not None
    read_only = CatalogStore.open_read_only(settings.data_dir)
    assert read_only is not None
    with read_only:
        assert read_only.aliases() == {}
    with CatalogStore(catalog_path(settings.data_dir)) as store:
        store.set_alias("now", 1, new=True)
    assert read_aliases(settings.data_dir) == {"now": 1}


def test_builds_without_aliases_refuse_a_shared_catalog_while_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = FaultyStore()

    def open_as_an_earlier_build() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(shared_catalog, "DOCUMENT_VERSION", 1)
            CoordinatorDb(tmp_path / "earlier.db", shared=SharedCatalog(meta)).close()

    with Coordinator(
        Settings(data_dir=tmp_path),
        log=(log := ChainLog()),
        append=log,
        shared=SharedCatalog(meta),  # type: ignore[arg-type]
    ) as catalog:
        catalog.ensure_pchannels(1)
        catalog.create_collection("v1", SCHEMA)
        open_as_an_earlier_build()
        catalog.create_alias("now", "v1")
        guard = meta.get(CATALOG_GUARD_KEY)
        assert guard is not None
        assert json.loads(guard.value)["form"] == 2
        with pytest.raises(UnsupportedVersion):
            open_as_an_earlier_build()
        catalog.drop_alias("now")
        open_as_an_earlier_build()


class Machines(RuleBasedStateMachine):
    """Aliases and collections, changed by two machines of a cluster in any order: each sees what the model says."""

    def __init__(self) -> None:
        super().__init__()
        meta, log = FaultyStore(), ChainLog()
        self.folder = Path(mkdtemp(dir=self.tmp))
        self.machines = [
            Coordinator(
                Settings(data_dir=self.folder / str(number), cache_dir=self.folder / "cache"),
                log=log,  # type: ignore[arg-type]
                append=log,  # type: ignore[arg-type]
                shared=SharedCatalog(meta),
            )
            for number in range(2)
        ]
        self.machines[0].ensure_pchannels(1)
        self.collections: set[str] = set()
        self.aliases: dict[str, str] = {}

    tmp = ""
    NAMES = st.sampled_from(["a", "b", "c"])
    WHO = st.integers(0, 1)

    def teardown(self) -> None:
        for each in self.machines:
            each.close()

    def expect(self, call: object, ok: bool) -> None:
        try:
            call()  # type: ignore[operator]
        except MillraceError:
            assert not ok
        else:
            assert ok

    @rule(who=WHO, name=NAMES)
    def create(self, who: int, name: str) -> None:
        ok = name not in self.collections and name not in self.aliases
        self.expect(lambda: self.machines[who].create_collection(name, SCHEMA), ok)
        self.collections |= {name} if ok else set()

    @rule(who=WHO, name=NAMES)
    def drop(self, who: int, name: str) -> None:
        ok = name in self.collections and name not in self.aliases.values()
        self.expect(lambda: self.machines[who].drop_collection(name), ok)
        self.collections -= {name} if ok else set()

    @precondition(lambda self: self.collections)
    @rule(who=WHO, alias=NAMES, name=NAMES, new=st.booleans())
    def point(self, who: int, alias: str, name: str, new: bool) -> None:
        target = self.aliases.get(name, name)
        there = self.aliases.get(alias)
        free = alias not in self.collections and there in (None, target)
        ok = target in self.collections and (free if new else there is not None)
        machine = self.machines[who]
        self.expect(lambda: (machine.create_alias if new else machine.alter_alias)(alias, name), ok)
        if ok:
            self.aliases[alias] = target

    @rule(who=WHO, alias=NAMES)
    def drop_alias(self, who: int, alias: str) -> None:
        self.expect(lambda: self.machines[who].drop_alias(alias), alias in self.aliases)
        self.aliases.pop(alias, None)

    @invariant()
    def each_machine_that_looks_anew_knows_all(self) -> None:
        assert not self.collections & self.aliases.keys()
        for machine in self.machines:
            with machine._store.transaction():
                pass
            assert machine.aliases() == self.aliases
            for name in ("a", "b", "c"):
                means = self.aliases.get(name, name if name in self.collections else None)
                if means is None:
                    with pytest.raises(CollectionNotFound):
                        machine.collection(name)
                else:
                    assert machine.collection(name).name == means


def test_machines_agree_on_aliases_and_collections(tmp_path: Path) -> None:
    Machines.tmp = str(tmp_path)
    run_state_machine_as_test(Machines, settings=hypothesis(max_examples=15, stateful_step_count=15, deadline=None))
