"""What a machine copies from the meta store: the catalog, the changed settings and the tokens of the others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from millrace.access.grants import EVERYTHING, Grant, Role
from millrace.access.token_file import TokenFile
from millrace.base.errors import InvalidArgument, InvalidSettings, LogBusy
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path, collection_names
from millrace.coord.catalog.shared import SharedCatalog, open_shared_catalog
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.machine.copies import CatalogCopy, following
from millrace.coord.machine.tokens import SharedTokens, open_tokens
from millrace.coord.store_factory import CATALOG_GUARD_KEY
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.meta.memory import MemoryStore
from tests.coord.catalog_rig import add_collection, finish
from tests.waiting import until

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")
EVERY = [Grant(Role.READ, (EVERYTHING,))]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def machine(folder: Path, name: str) -> Settings:
    """A machine of a deployment whose meta store is at one place."""
    data = folder / name
    data.mkdir(mode=0o700)
    return Settings(data_dir=data, meta_store=f"sqlite:///{folder / 'meta.db'}")


def catalog(settings: Settings, opened: ExitStack) -> CatalogStore:
    return opened.enter_context(CatalogStore(catalog_path(settings.data_dir), shared=open_shared_catalog(settings)))


def test_a_machine_learns_what_others_create_change_and_grant(tmp_path: Path, opened: ExitStack) -> None:
    here, there = machine(tmp_path, "here"), machine(tmp_path, "there")
    writing = catalog(there, opened)
    writing.next_term("dml_0")
    finish(writing, add_collection(writing, "before", SCHEMA))
    opened.enter_context(following(here))
    assert collection_names(here.data_dir) == ["before"], "at once, when it starts"
    finish(writing, add_collection(writing, "after", SCHEMA))
    with open_tokens(there) as tokens:
        token, _ = tokens.add("shop", EVERY)
    until(lambda: collection_names(here.data_dir) == ["after", "before"], "the collection is known here")
    until(lambda: TokenFile(here.data_dir).authenticate(token) is not None, "the token is accepted here")
    with open_tokens(here) as tokens:
        tokens.revoke("shop")
    with open_tokens(there) as tokens:
        assert tokens.tokens() == []
    assert TokenFile(there.data_dir).authenticate(token) is None


def test_a_collection_that_another_machine_just_created_is_found_at_once(tmp_path: Path, opened: ExitStack) -> None:
    here, there = (catalog(machine(tmp_path, name), opened) for name in ("here", "there"))
    there.next_term("dml_0")
    finish(there, add_collection(there, "new", SCHEMA))
    assert here.collection("new") == there.collection("new")


def test_a_term_that_another_machine_just_opened_is_known_at_once(tmp_path: Path, opened: ExitStack) -> None:
    """A client stamps it on what was fenced; with an older one it would be fenced again."""
    here, there = (catalog(machine(tmp_path, name), opened) for name in ("here", "there"))
    there.next_term("dml_0")
    assert here.term("dml_0") == 1
    there.next_term("dml_0")
    assert here.term("dml_0") == 2


def test_a_copy_puts_no_catalog_into_a_store_that_has_none(tmp_path: Path) -> None:
    meta = MemoryStore(monotonic)
    with CatalogStore(tmp_path / "a" / "coord.db") as alone:
        alone.next_term("dml_0")
    with CatalogStore(tmp_path / "a" / "coord.db", shared=SharedCatalog(meta, follow_only=True)) as copy:
        copy.refresh()
        assert meta.get(CATALOG_GUARD_KEY) is None
        assert [each.name for each in copy.pchannels()] == ["dml_0"]
    with CatalogStore(tmp_path / "a" / "coord.db", shared=SharedCatalog(meta)) as full:
        assert [each.name for each in full.pchannels()] == ["dml_0"]
        assert meta.get(CATALOG_GUARD_KEY) is not None


def test_a_machine_with_another_deployment_s_catalog_says_so_when_it_starts(tmp_path: Path, opened: ExitStack) -> None:
    here, there = machine(tmp_path, "here"), machine(tmp_path, "there")
    catalog(there, opened).next_term("dml_0")
    with CatalogStore(catalog_path(here.data_dir)) as other:
        other.next_term("dml_7")
    with pytest.raises(InvalidSettings, match="another deployment"):
        CatalogCopy(here)


def test_of_two_changes_of_the_tokens_at_once_one_is_refused_and_none_is_lost(tmp_path: Path) -> None:
    meta = MemoryStore(monotonic)
    here, there = (SharedTokens(Settings(data_dir=tmp_path / name), meta) for name in ("here", "there"))
    here.add("one", EVERY)

    class Late(SharedTokens):
        def _take(self) -> None:
            super()._take()
            there.add("two", EVERY)

    with pytest.raises(LogBusy, match="another machine"):
        Late(Settings(data_dir=tmp_path / "third"), meta).add("three", EVERY)
    with pytest.raises(InvalidArgument, match="already exists"):
        here.add("two", EVERY)
    here.add("three", EVERY)
    there.refresh()
    assert [each.principal.name for each in there.tokens()] == ["one", "two", "three"]
    assert there.path.read_bytes() == here.path.read_bytes()


def test_a_machine_s_damaged_token_file_is_replaced_by_the_deployment_s(tmp_path: Path) -> None:
    meta = MemoryStore(monotonic)
    here = SharedTokens(Settings(data_dir=tmp_path / "here"), meta)
    token, _ = here.add("one", EVERY)
    here.path.write_bytes(b"{}")
    SharedTokens(Settings(data_dir=tmp_path / "here"), meta).refresh()
    assert here.authenticate(token) is not None


def test_without_a_cluster_the_tokens_are_in_the_file_alone(tmp_path: Path) -> None:
    settings = replace(Settings(), data_dir=tmp_path / "data")
    with open_tokens(settings) as tokens:
        tokens.add("one", EVERY)
    assert not (settings.data_dir / "coord").exists()


def test_machines_that_change_the_catalog_at_once_each_get_what_they_asked_for(tmp_path: Path) -> None:
    meta = MemoryStore(monotonic)
    with ExitStack() as opened, ThreadPoolExecutor(4) as pool:
        stores = [
            opened.enter_context(CatalogStore(tmp_path / str(number) / "coord.db", shared=SharedCatalog(meta)))
            for number in range(4)
        ]
        epochs = [
            each for found in pool.map(lambda store: [store.next_epoch(7) for _ in range(25)], stores) for each in found
        ]
    assert sorted(epochs) == list(range(1, 101))
