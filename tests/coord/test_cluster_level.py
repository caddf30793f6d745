"""The level of a cluster: off until every living node knows it, and raised by a person alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import FeatureNotActive, UnsupportedVersion, UpgradeRefused
from millrace.base.settings import Settings
from millrace.base.settings.place import TablesPlace, read_place
from millrace.coord.clock import SystemClock
from millrace.coord.cluster_level import (
    LEVEL_KEY,
    NEWEST,
    chain_version_of,
    cluster_level,
    finish_upgrade,
    require_level,
    upgrade_status,
)
from millrace.coord.machine.settings import SettingsCopy
from millrace.coord.machine.tables_place import change_place
from millrace.coord.session import LEVELS_PREFIX, NODE_PREFIX, NodeInfo, Session
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import MetaStore, Put


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", meta_store=f"sqlite:///{tmp_path}/meta.db")


@pytest.fixture
def store(settings: Settings) -> Iterator[MetaStore]:
    with open_cluster_store(settings, SystemClock()) as opened:
        yield opened


def earlier(store: MetaStore, name: str) -> None:
    """A node of a build from before levels registers."""
    store.commit([Put(f"{NODE_PREFIX}{name}@1", NodeInfo(name, "localhost:1").encode())])


def joined(store: MetaStore, name: str) -> Session:
    session = Session(store, SystemClock(), NodeInfo(name, "localhost:2"), on_end=lambda: None)
    session.step()
    assert session.name
    return session


def test_a_cluster_without_earlier_nodes_has_the_newest_level(settings: Settings, store: MetaStore) -> None:
    session = joined(store, "n1")
    assert cluster_level(store) == NEWEST
    assert chain_version_of(settings) == 5
    require_level(settings, NEWEST, "moves")
    session.close()
    assert not store.list(LEVELS_PREFIX).entries, "it goes with the session"


def test_an_earlier_node_holds_the_level_until_a_person_finishes(settings: Settings, store: MetaStore) -> None:
    earlier(store, "old")
    session = joined(store, "new")
    assert cluster_level(store) == 1
    assert chain_version_of(settings) == 4
    with pytest.raises(FeatureNotActive, match="moves need level 2"):
        require_level(settings, 2, "moves")
    with pytest.raises(UpgradeRefused, match="the nodes old run"):
        finish_upgrade(store)
    assert upgrade_status(store).lagging == ["old"]
    store.commit([Put(f"{LEVELS_PREFIX}old@1", b'{"level": 2, "release": "2"}')])
    assert cluster_level(store) == 1, "nothing rises by itself"
    assert finish_upgrade(store).level == NEWEST
    assert chain_version_of(settings) == 5
    session.close()


def test_a_level_that_this_build_does_not_know_names_the_release(settings: Settings, store: MetaStore) -> None:
    store.commit([Put(LEVEL_KEY, json.dumps({"form": 1, "level": NEWEST + 1, "release": "9.1"}).encode())])
    with pytest.raises(UnsupportedVersion, match=r"run Millrace 9\.1"):
        cluster_level(store)
    with pytest.raises(UnsupportedVersion):
        chain_version_of(settings)


def test_every_machine_learns_where_the_tables_are(settings: Settings, store: MetaStore, tmp_path: Path) -> None:
    other = replace(settings, data_dir=tmp_path / "other")
    SettingsCopy(other, store).run_once()
    assert read_place(other.data_dir) is None
    change_place(settings, lambda place: replace(place, target="s3://box/new"))
    SettingsCopy(other, store).run_once()
    assert read_place(other.data_dir) == TablesPlace("", target="s3://box/new") == read_place(settings.data_dir)
    change_place(other, lambda place: TablesPlace("s3://box/new", ("",)))
    SettingsCopy(settings, store).run_once()
    assert read_place(settings.data_dir) == TablesPlace("s3://box/new", ("",))


def test_a_place_of_a_newer_build_names_the_release(tmp_path: Path) -> None:
    newer = json.loads(TablesPlace("s3://box/new").encode()) | {"form": 99, "release": "9.1"}
    with pytest.raises(UnsupportedVersion, match=r"run Millrace 9\.1"):
        TablesPlace.decode(json.dumps(newer).encode())
