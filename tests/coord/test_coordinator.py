"""DDL reaches all VChannels or none is left half done; the coordinator's memory survives any death of its process."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
import time

import pytest

from millrace.base.errors import AppendRejected, CollectionExists, CollectionNotFound
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path
from millrace.coord.broadcast.retrier import BroadcastRetrier
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.coordinator import Coordinator
from millrace.message import builders
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.wire.encode import encode_entry
from millrace.wal.chain import CHAIN_VERSION
from tests.coord.ddl.rig import SCHEMA, ChainLog, Killed


def reopened(settings: Settings, log: ChainLog) -> Coordinator:
    return Coordinator(settings, log=log, append=log)  # type: ignore[arg-type]


def test_a_new_deployment_has_its_pchannels_each_with_an_open_term(coordinator: Coordinator, log: ChainLog) -> None:
    coordinator.ensure_pchannels(3)
    assert [(each.name, each.term, each.opened) for each in coordinator.pchannels()] == [
        (f"dml_{number}", 1, True) for number in range(3)
    ]
    assert {state.term for state in log.states.values()} == {1}
    before = log.appends
    coordinator.ensure_pchannels(3)
    assert log.appends == before


def test_a_collection_is_on_all_its_vchannels_when_it_is_usable(coordinator: Coordinator, log: ChainLog) -> None:
    coordinator.ensure_pchannels(2)
    made = coordinator.create_collection("users", SCHEMA, vchannels=3, partitions=["eu", "us"])
    assert made.state == "active"
    assert made.vchannels == ("dml_0_1v0", "dml_1_1v1", "dml_0_1v2")
    held = {name for state in log.states.values() for name in state.vchannels}
    assert held == set(made.vchannels)
    with pytest.raises(CollectionExists):
        coordinator.create_collection("users", SCHEMA)


def test_a_link_leads_from_each_collections_name_to_its_tables(
    coordinator: Coordinator, settings: Settings, log: ChainLog
) -> None:
    coordinator.ensure_pchannels(2)
    folder = settings.data_dir / "tables/by-name"

    def links() -> dict[str, str]:
        return {each.name: os.readlink(each) for each in folder.iterdir()}

    first = coordinator.create_collection("users", SCHEMA)
    coordinator.create_collection("orders", SCHEMA)
    assert links() == {"users": f"../{first.id}", "orders": f"../{first.id + 1}"}
    coordinator.drop_collection("users")
    assert links() == {"orders": f"../{first.id + 1}"}
    again = coordinator.create_collection("users", SCHEMA)
    assert links()["users"] == f"../{again.id}" != f"../{first.id}"
    made = links()
    shutil.rmtree(folder)  # as an earlier build left it
    with reopened(settings, log) as later:
        later.ensure_pchannels(2)
    assert links() == made


def test_ddl_changes_the_catalog_and_every_channel_alike(coordinator: Coordinator, log: ChainLog) -> None:
    coordinator.ensure_pchannels(2)
    coordinator.create_collection("users", SCHEMA, vchannels=2, partitions=["eu"])
    number = coordinator.create_partition("users", "us")
    version = coordinator.alter("users", [AddField(FieldSpec("age", "int32", True))])
    coordinator.drop_partition("users", "eu")
    known = coordinator.collection("users")
    assert (known.partitions, known.schema_version, version) == ({"us": number}, 2, 2)
    for state in log.states.values():
        for channel in state.vchannels.values():
            assert channel.partitions == {number: "us"}
            assert channel.schemas == known.schemas
    coordinator.drop_collection("users")
    assert not any(state.vchannels for state in log.states.values())
    with pytest.raises(CollectionNotFound):
        coordinator.collection("users")
    again = coordinator.create_collection("users", SCHEMA)
    assert again.id == known.id + 1, "an id is never given twice"


@pytest.mark.parametrize("kind", ["create", "add_field", "create_partition", "drop"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", range(3))
def test_a_coordinator_that_dies_in_a_broadcast_leaves_nothing_half_done(
    settings: Settings, log: ChainLog, kind: str, moment: str, step: int
) -> None:
    first = reopened(settings, log)
    first.ensure_pchannels(2)
    if kind != "create":
        first.create_collection("users", SCHEMA, vchannels=3)
    setattr(log, f"die_{moment}", log.appends + step)
    calls = {
        "create": lambda each: each.create_collection("users", SCHEMA, vchannels=3),
        "add_field": lambda each: each.alter("users", [AddField(FieldSpec("age", "int32", True))]),
        "create_partition": lambda each: each.create_partition("users", "us"),
        "drop": lambda each: each.drop_collection("users"),
    }
    with pytest.raises(Killed):
        calls[kind](first)
    first.close()
    log.die_before = log.die_after = None
    second = reopened(settings, log)
    second.ensure_pchannels(2)
    channels = [channel for state in log.states.values() for channel in state.vchannels.values()]
    if kind == "drop":
        assert channels == []
        assert second.collections() == []
    else:
        known = second.collection("users")
        assert known.state == "active"
        assert {channel.name for channel in channels} == set(known.vchannels)
        assert {channel.schemas for channel in channels} == {known.schemas}
        assert all(set(channel.partitions.values()) == set(known.partitions) for channel in channels)
        assert known.schema_version == (2 if kind == "add_field" else 1)
    assert second.resume() == 0
    second.close()


def test_what_a_dead_coordinator_left_is_completed_by_one_that_goes_on(settings: Settings, log: ChainLog) -> None:
    with reopened(settings, log) as living, BroadcastRetrier(living, pause=0.05) as completing:
        living.ensure_pchannels(2)
        completing.start()
        with reopened(settings, log) as mortal:
            log.die_after = log.appends
            with pytest.raises(Killed):
                mortal.create_collection("users", SCHEMA, vchannels=3)
        end = time.monotonic() + 20
        while not (there := living.collections()) or there[0].state != "active":
            assert time.monotonic() < end
            threading.Event().wait(0.02)
        assert living.differences() == []


def test_the_metrics_count_what_is_open_and_its_age(settings: Settings, log: ChainLog) -> None:
    metrics = Metrics()
    with reopened(settings, log) as living:
        living.ensure_pchannels(2)
        completing = BroadcastRetrier(living)
        completing.export(metrics)
        assert b"millrace_coord_broadcasts_open 0.0" in metrics.render()
        assert b"millrace_coord_broadcast_oldest_seconds 0.0" in metrics.render()
        with reopened(settings, log) as mortal:
            log.die_after = log.appends
            with pytest.raises(Killed):
                mortal.create_collection("users", SCHEMA, vchannels=3)
        assert b"millrace_coord_broadcasts_open 1.0" in metrics.render()
        log.die_after = None
        completing.run_once()
        assert b"millrace_coord_broadcasts_open 0.0" in metrics.render()


def test_what_was_kept_a_moment_ago_is_left_to_who_kept_it(settings: Settings, log: ChainLog) -> None:
    with reopened(settings, log) as mortal:
        mortal.ensure_pchannels(1)
        log.die_before = log.appends
        with pytest.raises(Killed):
            mortal.create_collection("users", SCHEMA)
    log.die_before = None
    with reopened(settings, log) as living:
        assert living.resume(min_age=3600.0) == 0
        with CatalogStore(catalog_path(settings.data_dir)) as store:
            store._db.execute("update begun set at = at + 7200")  # the clock was set back since
        assert living.resume(min_age=3600.0) == 1


def test_a_collection_that_one_channel_refuses_is_taken_back_everywhere(settings: Settings, log: ChainLog) -> None:
    coordinator = reopened(settings, log)
    coordinator.ensure_pchannels(2)
    for name, full in log.states.items():
        log.states[name] = dataclasses.replace(full, config=dataclasses.replace(full.config, max_vchannels=1))
    coordinator.create_collection("first", SCHEMA, vchannels=2)
    with pytest.raises(AppendRejected, match="Use fewer VChannels"):
        coordinator.create_collection("second", SCHEMA, vchannels=2)
    # Another coordinator takes the last place between this one's look and its message.
    roomy = log.definitions
    log.definitions = lambda pchannel, number: dataclasses.replace(roomy(pchannel, number), vchannel_count=0)  # type: ignore[method-assign]
    appends = log.appends
    with pytest.raises(AppendRejected, match="no more VChannels"):
        coordinator.create_collection("second", SCHEMA, vchannels=2)
    assert log.appends > appends
    assert [each.name for each in coordinator.collections()] == ["first"]
    assert all(len(state.vchannels) == 1 for state in log.states.values())
    coordinator.close()


def test_a_term_that_the_log_knows_better_is_counted_past(coordinator: Coordinator, log: ChainLog) -> None:
    coordinator.ensure_pchannels(1)
    for _ in range(3):
        coordinator.open_term("dml_0")
    assert log.states["dml_0"].term == coordinator.term("dml_0") == 4


def test_ddl_waits_for_a_term_that_its_owner_has_taken_and_not_opened_yet(
    coordinator: Coordinator, settings: Settings, log: ChainLog
) -> None:
    """A node that takes a PChannel over does so in two steps, on another machine."""
    coordinator.ensure_pchannels(1)
    with CatalogStore(catalog_path(settings.data_dir)) as store:
        term = store.next_term("dml_0")
    first, opening = log.append_one, []

    def append_one(pchannel: str, entry: bytes, *, principal: str = "") -> int:
        if not opening and log.appends > 2:
            opening.append(
                first(
                    pchannel, encode_entry([builders.term_opening(term=term, chain_version=CHAIN_VERSION, config={})])
                )
            )
        return first(pchannel, entry, principal=principal)

    log.append_one = append_one  # type: ignore[method-assign]
    assert coordinator.create_collection("users", SCHEMA).state == "active"
    assert opening, "it was refused, and sent again"
