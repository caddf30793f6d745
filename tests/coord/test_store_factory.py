"""What stands on the settings of a cluster, and what is not done beside its nodes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidSettings, LeaseNotFound, LogBusy
from millrace.base.settings import Settings
from millrace.coord.catalog.shared import open_shared_catalog
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.clock import SystemClock
from millrace.coord.session import INGEST, NODE_PREFIX, ROLES, NodeInfo
from millrace.coord.store_factory import (
    SWITCH_KEY,
    exclude_append_nodes,
    open_cluster_store,
    require_no_switch,
    require_unused_store,
)
from millrace.meta.sql import SqlStore
from millrace.meta.store import Delete, MetaStore, Put


def come(store: MetaStore, session: str, *roles: str) -> None:
    store.commit([Put(NODE_PREFIX + session, NodeInfo(session.partition("@")[0], "grpc://h:1", roles).encode())])


def test_the_log_is_switched_when_no_node_takes_appends(settings: Settings) -> None:
    with exclude_append_nodes(settings):
        assert not (settings.data_dir / "coord").exists(), "looking makes no cluster"
    with open_cluster_store(settings, SystemClock()) as store:
        come(store, "n1@1", INGEST)
        with exclude_append_nodes(settings):
            pass  # what only ingests follows the log wherever it goes on
        come(store, "n2@2", *ROLES)
        with pytest.raises(LogBusy, match="nodes n2 take appends: drain and stop"), exclude_append_nodes(settings):
            pass
        assert store.get(SWITCH_KEY) is None, "a switch that was refused holds up nobody"
        store.commit([Delete(f"{NODE_PREFIX}n2@2")])
        with exclude_append_nodes(settings):
            pass


def test_a_node_that_comes_in_the_midst_of_a_switch_opens_nothing_until_its_end(settings: Settings) -> None:
    with open_cluster_store(settings, SystemClock()) as store:
        with exclude_append_nodes(settings):
            come(store, "n2@2", *ROLES)
            with pytest.raises(LogBusy, match="switched"):
                require_no_switch(store)
            with pytest.raises(LogBusy, match="another process is switching"), exclude_append_nodes(settings):
                pass
        require_no_switch(store)


def test_the_mark_of_a_switch_is_renewed_and_once_lost_the_switch_does_no_more(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[int] = []
    renew, lost = SqlStore.renew, threading.Event()

    def counted(store: SqlStore, lease: int) -> None:
        if lost.is_set():
            raise LeaseNotFound("the store lost it")
        renew(store, lease)
        renewals.append(lease)

    monkeypatch.setattr(SqlStore, "renew", counted)
    brief = replace(settings, session_seconds=2.0)
    with open_cluster_store(brief, SystemClock()) as store:
        store.get(SWITCH_KEY)  # a cluster's store is there
        with exclude_append_nodes(brief) as check:
            assert poll_until(lambda: len(renewals) > 1, Deadline.after(20.0), interval=0.02), (
                "else a long switch loses its mark"
            )
            check()
            lost.set()
            assert poll_until(lambda: store.get(SWITCH_KEY) is None, Deadline.after(20.0), interval=0.02)
            for _ in range(2):
                with pytest.raises(LogBusy, match="was lost"):
                    check()
            lost.clear()
            assert store.get(SWITCH_KEY) is None, (
                "a mark that was lost is not taken again: a node may have come between"
            )
            with pytest.raises(LogBusy, match="was lost"):
                check()


def test_a_backup_is_not_restored_beside_the_nodes_of_its_meta_store(settings: Settings) -> None:
    elsewhere = replace(settings, meta_store=f"sqlite:///{settings.data_dir}/../meta.db")
    require_unused_store(settings)
    require_unused_store(elsewhere)
    with open_cluster_store(elsewhere, SystemClock()) as store:
        come(store, "n1@1", INGEST)
        with pytest.raises(LogBusy, match="n1 of the meta store"):
            require_unused_store(elsewhere)


def test_a_backup_is_not_restored_where_the_meta_store_has_a_catalog(settings: Settings) -> None:
    elsewhere = replace(settings, meta_store=f"sqlite:///{settings.data_dir}/../catalog.db")
    CatalogStore(settings.data_dir / "coord/coord.db", shared=open_shared_catalog(elsewhere)).close()
    require_unused_store(settings)
    with pytest.raises(InvalidSettings, match="has the catalog of a deployment"):
        require_unused_store(elsewhere)
