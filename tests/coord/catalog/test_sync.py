"""The chain's state is the truth.

DDL that came without the coordinator is followed, or said; a bad message is no wall.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import (
    AppendRejected,
    CatalogDiverged,
    CollectionNotFound,
    EntryTooLarge,
    InvalidArgument,
    LogUnavailable,
)
from millrace.base.settings import Settings
from millrace.coord.broadcast.sqlite_ledger import MAX_ABANDONED
from millrace.coord.broadcast.task import TaskState
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.coordinator import Coordinator
from millrace.message import builders
from millrace.message.ids import COORDINATOR_ID
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from tests.coord.catalog_rig import add_collection, finish
from tests.coord.ddl.rig import SCHEMA, ChainLog
from tests.failpoints import at_failpoints

Q = FieldSpec("q", "string", True)
EMAIL = FieldSpec("email", "string", True)


@pytest.fixture
def coordinator(coordinator: Coordinator) -> Coordinator:
    coordinator.ensure_pchannels(2)
    coordinator.create_collection("c", SCHEMA, vchannels=2)
    return coordinator


def foreign_field(log: ChainLog, vchannel: str, *, field: FieldSpec = Q, version: int = 2) -> None:
    log.write(
        builders.schema_change([AddField(field)], vchannel=vchannel, collection_id=1, schema_version=version, term=1)
    )


def foreign_partition(log: ChainLog, vchannel: str, name: str, number: int) -> None:
    log.write(builders.create_partition(name, vchannel=vchannel, collection_id=1, partition_id=number, term=1))


def agree(coordinator: Coordinator, log: ChainLog) -> None:
    """Catalog and chain have the same."""
    assert coordinator.differences() == []
    for channel in log.channels():
        (known,) = (each for each in coordinator.collections() if each.id == channel.collection_id)
        assert channel.schemas == known.schemas
        assert {name: number for number, name in channel.partitions.items()} == known.partitions


# -- DDL of another client ---------------------------------------------------------------------------------------------


def test_a_field_that_another_client_added_is_there_before_the_next_one(
    coordinator: Coordinator, log: ChainLog
) -> None:
    for vchannel in coordinator.collection("c").vchannels:
        foreign_field(log, vchannel)
    (found,) = coordinator.differences()
    assert "(id, name)" in found.detail
    assert "(id, name, q)" in found.detail
    assert coordinator.alter("c", [AddField(EMAIL)]) == 3
    assert [each.name for each in coordinator.collection("c").schema.fields] == ["id", "name", "q", "email"]
    agree(coordinator, log)


def test_partitions_of_another_client_are_followed_and_their_ids_not_given_again(
    coordinator: Coordinator, log: ChainLog
) -> None:
    for vchannel in coordinator.collection("c").vchannels:
        foreign_partition(log, vchannel, "theirs", 9)
    coordinator.sync_catalog()
    assert coordinator.collection("c").partitions == {"_default": 1, "theirs": 9}
    assert coordinator.create_partition("c", "ours") == 10
    with pytest.raises(AppendRejected, match="already"):
        coordinator.create_partition("c", "theirs")
    agree(coordinator, log)


def test_a_collection_that_another_client_dropped_is_dropped(coordinator: Coordinator, log: ChainLog) -> None:
    for vchannel in coordinator.collection("c").vchannels:
        log.write(builders.drop_collection(vchannel=vchannel, collection_id=1, term=1))
    with pytest.raises(CollectionNotFound):
        coordinator.alter("c", [AddField(EMAIL)])
    assert coordinator.collections() == []
    agree(coordinator, log)


def test_what_came_to_one_vchannel_alone_is_said_and_the_same_ddl_completes_it(
    coordinator: Coordinator, log: ChainLog
) -> None:
    first, second = coordinator.collection("c").vchannels
    foreign_field(log, first)
    foreign_partition(log, second, "theirs", 9)
    (found,) = coordinator.differences()
    assert "is not the same on its VChannels" in found.detail
    before = log.appends
    with pytest.raises(CatalogDiverged, match=first):
        coordinator.alter("c", [AddField(EMAIL)])
    assert log.appends == before, "nothing was sent"
    assert coordinator.alter("c", [AddField(Q)]) == 2
    assert coordinator.create_partition("c", "theirs") == 9
    agree(coordinator, log)


def test_contradicting_fields_are_said_and_the_collection_stays_usable(coordinator: Coordinator, log: ChainLog) -> None:
    first, second = coordinator.collection("c").vchannels
    foreign_field(log, first)
    foreign_field(log, second, field=EMAIL)
    for field in (Q, EMAIL):
        with pytest.raises(CatalogDiverged):
            coordinator.alter("c", [AddField(field)])
    coordinator.flush("c")
    assert coordinator.resume() == 0
    coordinator.drop_collection("c")
    agree(coordinator, log)


def test_a_collection_that_another_client_made_is_said_and_its_id_is_no_success(
    coordinator: Coordinator, log: ChainLog
) -> None:
    theirs = "dml_0_2v0"
    log.write(
        builders.create_collection(
            "theirs", SCHEMA, vchannel=theirs, vchannels=[theirs], collection_id=2, partitions={"p": 1}, term=1
        )
    )
    (found,) = coordinator.differences()
    assert (found.id, found.name) == (2, "theirs")
    with pytest.raises(AppendRejected, match="another collection"):
        coordinator.create_collection("ours", SCHEMA, vchannels=2)
    assert [each.name for each in log.channels() if each.collection_id == 2] == [theirs], "theirs stands, ours is gone"
    assert coordinator.create_collection("ours", SCHEMA, vchannels=2).id == 3


def test_a_message_of_the_broadcast_s_kind_by_another_client_is_no_acknowledgement(
    settings: Settings, log: ChainLog, coordinator: Coordinator
) -> None:
    first, _ = coordinator.collection("c").vchannels

    def between(name: str) -> None:
        if name == "ddl.kept":
            foreign_field(log, first)

    with (
        Coordinator(settings, log=log, append=log) as late,  # type: ignore[arg-type]
        at_failpoints(between),
        pytest.raises(AppendRejected) as refused,
    ):
        late.alter("c", [AddField(EMAIL)])
    assert refused.value.reason == "SCHEMA_MISMATCH"
    assert coordinator.collection("c").schema_version == 1, "nobody has it: nothing is in the catalog"
    with CatalogStore(settings.data_dir / "coord" / "coord.db") as store:
        (trouble,) = store.broadcasts.list_unresolved()
    assert (trouble.collection, trouble.task.kind) == ("c", "schema_change")
    assert trouble.task.state is TaskState.ABANDONED
    assert "SCHEMA_MISMATCH" in trouble.task.reason


def test_a_coordinator_that_slept_does_not_do_again_what_was_undone(settings: Settings, log: ChainLog) -> None:
    with Coordinator(settings, log=log, append=log) as awake:  # type: ignore[arg-type]
        awake.ensure_pchannels(1)
        awake.create_collection("c", SCHEMA)

        def meanwhile(name: str) -> None:
            if name == "ddl.kept" and not done:
                done.append(awake.resume())
                awake.drop_partition("c", "p")

        done: list[int] = []
        with Coordinator(settings, log=log, append=log) as sleeper, at_failpoints(meanwhile):  # type: ignore[arg-type]
            assert sleeper.create_partition("c", "p") == 2
        assert done == [1]
        assert awake.collection("c").partitions == {"_default": 1}
        agree(awake, log)


def test_nobody_else_is_a_producer_by_the_coordinator_s_id(coordinator: Coordinator, log: ChainLog) -> None:
    channel = log.channels()[0]
    assert COORDINATOR_ID not in channel.producers, "a CreateCollection takes no place among the producers"
    coordinator.alter("c", [AddField(EMAIL)])
    epochs = {each.producers[COORDINATOR_ID].epoch for each in log.channels()}
    coordinator.create_partition("c", "p")
    assert max(each.producers[COORDINATOR_ID].epoch for each in log.channels()) > max(epochs)


# -- what cannot be built ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        *(
            pytest.param(lambda each, name=name: each.create_partition("c", name), id=f"partition {name!r:.12}")
            for name in ("", "x" * 256, "\ud800", 5, None, "a b", "../up", ".hidden", "e\u0301", "a\nb", "-x")
        ),
        *(
            pytest.param(lambda each, name=name: each.create_collection(name, SCHEMA), id=f"collection {name!r:.12}")
            for name in ("", "x" * 256, "\ud800", 5, None, ["c"], "a/b", "a b", "~")
        ),
        pytest.param(lambda each: each.alter("c", [AddField(FieldSpec("x", "string", False))]), id="no null"),
        pytest.param(lambda each: each.create_collection("d", SCHEMA, partitions=["p", ""]), id="its partition"),
        pytest.param(lambda each: each.create_collection("d", SCHEMA, partitions="p"), id="a string"),
    ],
)
def test_what_no_message_can_say_is_refused_before_anything_is_kept(
    coordinator: Coordinator, log: ChainLog, settings: Settings, call: Any
) -> None:
    before = log.appends
    with pytest.raises(InvalidArgument):
        call(coordinator)
    assert log.appends == before
    with CatalogStore(settings.data_dir / "coord" / "coord.db") as store:
        assert store.broadcasts.list_unresolved() == []
    coordinator.create_partition("c", "Zürich_2026-11.v2")
    agree(coordinator, log)


def test_ddl_that_no_entry_holds_is_refused_before_anything_is_kept(settings: Settings, log: ChainLog) -> None:
    fields = tuple(FieldSpec(f"{'x' * 100}{number}", "string", True) for number in range(900))
    wide = CollectionSchema((FieldSpec("id", "int64", False), *fields), "id")
    small = Settings(data_dir=settings.data_dir, cache_dir=settings.cache_dir, max_entry_bytes=64 << 10)
    with Coordinator(small, log=log, append=log) as coordinator:  # type: ignore[arg-type]
        coordinator.ensure_pchannels(1)
        before = log.appends
        with pytest.raises(EntryTooLarge):
            coordinator.create_collection("wide", wide)
        assert coordinator.resume() == 0
        assert log.appends == before
        assert coordinator.collections(dropped=True) == []


def test_a_collection_with_more_vchannels_than_there_is_room_is_refused_before_the_first_append(
    coordinator: Coordinator, log: ChainLog
) -> None:
    before = log.appends
    with pytest.raises(AppendRejected, match="3,000 VChannels, and the 2 PChannels have room for 2,046") as refused:
        coordinator.create_collection("d", SCHEMA, vchannels=3000)
    assert refused.value.reason == "LIMIT_EXCEEDED"
    with pytest.raises(AppendRejected, match="partitions"):
        coordinator.create_collection("d", SCHEMA, partitions=[f"p{number}" for number in range(4097)])
    assert log.appends == before
    assert [each.name for each in coordinator.collections(dropped=True)] == ["c"]


def test_names_from_before_the_rule_go_on(coordinator: Coordinator, log: ChainLog, settings: Settings) -> None:
    with sqlite3.connect(settings.data_dir / "coord" / "coord.db") as db:
        db.execute("update collection set name = 'old name/../x' where name = 'c'")
    db.close()
    for state in log.states.values():
        for channel in state.vchannels.values():
            state.put(channel._replace(collection_name="old name/../x"))
    coordinator.create_partition("old name/../x", "restored one", restored=True)
    coordinator.alter("old name/../x", [AddField(EMAIL)])
    agree(coordinator, log)
    coordinator.drop_collection("old name/../x")
    made = coordinator.create_collection("new", SCHEMA, partitions=["odd one"], restored=True)
    assert made.partitions == {"odd one": 1}


def keep_as_before(settings: Settings, kind: str, change: dict[str, Any], *, collection: str = "c") -> None:
    """A broadcast row as builds kept it that did not look first."""
    with sqlite3.connect(settings.data_dir / "coord" / "coord.db") as db:
        (number, vchannels) = db.execute(
            "select id, vchannels from collection where name = ?", (collection,)
        ).fetchone()
        row = db.execute(
            "insert into broadcast (collection_id, kind, change) values (?, ?, ?)", (number, kind, json.dumps(change))
        ).lastrowid
        for vchannel in json.loads(vchannels):
            db.execute(
                "insert into target (broadcast_id, vchannel, pchannel) values (?, ?, ?)",
                (row, vchannel, vchannel.rpartition("_")[0]),
            )
    db.close()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("create_partition", {"name": "", "id": 2}),
        ("create_partition", {"name": "x" * 256, "id": 2}),
        ("create_partition", {"name": "\ud800", "id": 2}),
        ("create_partition", {"name": 5, "id": 2}),
        ("create_partition", {}),
        (
            "schema_change",
            {"field": {"name": "x", "type": "string", "nullable": False}, "schema": SCHEMA.to_json(), "version": 2},
        ),
    ],
    ids=["empty", "long", "surrogate", "number", "nothing", "no null"],
)
def test_a_deployment_that_is_wedged_is_freed_by_the_next_start(
    coordinator: Coordinator, settings: Settings, log: ChainLog, kind: str, change: dict[str, Any]
) -> None:
    keep_as_before(settings, kind, change)
    with Coordinator(settings, log=log, append=log) as started:  # type: ignore[arg-type]
        started.ensure_pchannels(2)
        with CatalogStore(settings.data_dir / "coord" / "coord.db") as store:
            (trouble,) = store.broadcasts.list_unresolved()
        assert (trouble.collection, trouble.task.kind) == ("c", kind)
        assert trouble.task.state is TaskState.ABANDONED
        assert trouble.task.reason
        assert started.alter("c", [AddField(EMAIL)]) == 2
        assert started.create_partition("c", "p")
        agree(started, log)


def test_a_wedged_collection_is_freed_by_its_next_ddl_too(
    coordinator: Coordinator, settings: Settings, log: ChainLog
) -> None:
    keep_as_before(settings, "create_partition", {"name": "", "id": 2})
    assert coordinator.alter("c", [AddField(EMAIL)]) == 2
    agree(coordinator, log)


def test_a_collection_that_stays_creating_for_its_name_can_be_made_anew(
    coordinator: Coordinator, settings: Settings, log: ChainLog
) -> None:
    long = "x" * 256
    with sqlite3.connect(settings.data_dir / "coord" / "coord.db") as db:
        db.execute("update collection set next_partition = 2")
        db.execute(
            "insert into collection values (2, ?, 'creating', '[\"dml_0_2v0\"]', ?, '{\"_default\": 1}', 2)",
            (long, json.dumps([SCHEMA.to_json()])),
        )
    db.close()
    keep_as_before(settings, "create_collection", {}, collection=long)
    with pytest.raises(CollectionNotFound):
        coordinator.collection(long)
    assert [each.name for each in coordinator.collections()] == ["c"]
    assert coordinator.create_collection("y", SCHEMA).id == 3
    agree(coordinator, log)


def test_a_broadcast_that_has_to_wait_is_no_wall_for_other_collections(
    coordinator: Coordinator, settings: Settings, log: ChainLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.create_collection("other", SCHEMA)
    keep_as_before(settings, "create_partition", {"name": "p", "id": 2})
    append = log.append_one

    def away(pchannel: str, entry: bytes, *, principal: str = "") -> int:
        if pchannel == "dml_1":
            raise LogUnavailable("dml_1 is away")
        return append(pchannel, entry, principal=principal)

    monkeypatch.setattr(log, "append_one", away)
    assert coordinator.resume() == 1
    assert coordinator.alter("other", [AddField(EMAIL)]) == 2
    with CatalogStore(settings.data_dir / "coord" / "coord.db") as store:
        (trouble,) = store.broadcasts.list_unresolved()
    assert (trouble.task.open, trouble.task.reason) == (True, "LOG_UNAVAILABLE: dml_1 is away")
    with pytest.raises(LogUnavailable):
        coordinator.alter("c", [AddField(EMAIL)])
    monkeypatch.undo()
    assert coordinator.alter("c", [AddField(EMAIL)]) == 2
    assert coordinator.collection("c").partitions == {"_default": 1, "p": 2}
    with CatalogStore(settings.data_dir / "coord" / "coord.db") as store:
        assert store.broadcasts.list_unresolved() == []


def test_reasons_of_abandoned_broadcasts_are_kept_for_the_newest_alone(
    coordinator: Coordinator, settings: Settings
) -> None:
    for _ in range(MAX_ABANDONED + 5):
        keep_as_before(settings, "create_partition", {"name": "", "id": 2})
    coordinator.resume()
    with CatalogStore(settings.data_dir / "coord" / "coord.db") as store:
        assert len(store.broadcasts.list_unresolved()) == MAX_ABANDONED


# -- at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ddl_of_many_threads_at_once_is_in_catalog_and_chain_alike(settings: Settings, log: ChainLog) -> None:
    guard, append = threading.Lock(), log.append_one

    def one_by_one(pchannel: str, entry: bytes, *, principal: str = "") -> int:
        with guard:
            return append(pchannel, entry, principal=principal)

    log.append_one = one_by_one  # type: ignore[method-assign]
    with Coordinator(settings, log=log, append=log) as made:  # type: ignore[arg-type]
        made.ensure_pchannels(2)
        made.create_collection("c", SCHEMA, vchannels=2)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Coordinator(settings, log=log, append=log) as mine:  # type: ignore[arg-type]
                for turn in range(4):
                    mine.create_partition("c", f"p{number}_{turn}")
                    mine.alter("c", [AddField(FieldSpec(f"f{number}_{turn}", "string", True))])
                    with contextlib.suppress(AppendRejected):  # one of the four makes it
                        mine.create_partition("c", f"shared{turn}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failed
    with Coordinator(settings, log=log, append=log) as after:  # type: ignore[arg-type]
        found = after.collection("c")
        assert found.schema_version == 17
        assert len(found.partitions) == 1 + 16 + 4
        assert len(set(found.partitions.values())) == len(found.partitions)
        agree(after, log)


def test_an_entry_with_ddl_under_way_follows_nothing(tmp_path: Path) -> None:
    """Its broadcast makes the same change when it closes: followed before, a schema would have a version twice."""
    with CatalogStore(tmp_path / "coord.db") as store:
        made = add_collection(store, "c", SCHEMA)
        seen = store.collection("c")
        there = replace(seen, partitions={**seen.partitions, "q": 2})
        assert not store.is_settled(seen)
        assert not store.update_if_settled(seen, there)
        assert store.collection("c") == seen
        finish(store, made)
        seen = store.collection("c")
        assert store.is_settled(seen)
        assert store.update_if_settled(seen, replace(there, state=seen.state))
        assert store.collection("c").partitions == there.partitions
