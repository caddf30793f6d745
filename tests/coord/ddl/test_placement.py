"""A new collection goes where the fewest VChannels are; its own VChannels keep apart while there is room for that."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace.base.errors import AppendRejected
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.coordinator import Coordinator
from millrace.coord.ddl.placement import place_vchannels
from millrace.message.ids import pchannel_of
from millrace.wal.definitions import PChannelDefinitions
from tests.coord.ddl.rig import SCHEMA, ChainLog, Killed

COUNTS = st.dictionaries(st.integers(0, 40).map(lambda number: f"dml_{number}"), st.integers(0, 9), min_size=1)


def opened(folder: Path, log: ChainLog) -> Coordinator:
    return Coordinator(Settings(data_dir=folder, cache_dir=folder), log=log, append=log)  # type: ignore[arg-type]


def limit(log: ChainLog, pchannel: str, most: int) -> None:
    state = log.states[pchannel]
    log.states[pchannel] = dataclasses.replace(state, config=dataclasses.replace(state.config, max_vchannels=most))


def counts(log: ChainLog) -> dict[str, int]:
    return {name: len(state.vchannels) for name, state in log.states.items()}


@given(COUNTS, st.integers(1, 60))
def test_each_vchannel_takes_the_emptiest_pchannel_and_none_twice_while_others_are_free(
    taken: dict[str, int], count: int
) -> None:
    chosen = place_vchannels(count, taken)
    assert chosen == place_vchannels(count, dict(reversed(taken.items()))), "the same catalog, the same places"
    own = Counter(chosen)
    assert len(chosen) == count
    assert max(own.values()) - min(own[name] for name in taken) <= 1
    fewest = sorted(taken.values())[: min(count, len(taken))]
    assert [taken[name] for name in chosen[: len(taken)]] == fewest, "the emptiest ones, the emptiest first"


@given(COUNTS, st.integers(1, 60), st.data())
def test_no_pchannel_gets_more_than_it_takes(taken: dict[str, int], count: int, data: st.DataObject) -> None:
    free = data.draw(st.dictionaries(st.sampled_from(sorted(taken)), st.integers(0, 3)))
    own = Counter(place_vchannels(count, taken, free=free))
    assert all(own[name] <= free[name] for name in free)
    room = sum(free.get(name, count) for name in taken)
    assert own.total() == min(count, room)


def test_collections_of_one_vchannel_alternate_and_a_dropped_one_frees_its_place(
    coordinator: Coordinator, log: ChainLog
) -> None:
    coordinator.ensure_pchannels(3)
    made = [coordinator.create_collection(f"c{number}", SCHEMA).vchannels[0] for number in range(4)]
    assert [pchannel_of(each) for each in made] == ["dml_0", "dml_1", "dml_2", "dml_0"]
    coordinator.drop_collection("c1")
    assert coordinator.create_collection("c4", SCHEMA).pchannels == ["dml_1"]
    assert counts(log) == {"dml_0": 2, "dml_1": 1, "dml_2": 1}


def test_all_places_are_taken_before_the_limit_is_named_with_what_to_do(
    coordinator: Coordinator, log: ChainLog
) -> None:
    coordinator.ensure_pchannels(2)
    limit(log, "dml_0", 2)
    limit(log, "dml_1", 3)
    for number in range(5):
        coordinator.create_collection(f"c{number}", SCHEMA)
    assert counts(log) == {"dml_0": 2, "dml_1": 3}
    appends = log.appends
    with pytest.raises(AppendRejected, match=r"have room for 0: .*log pchannels --count.*max_vchannels.*drop") as full:
        coordinator.create_collection("more", SCHEMA)
    assert (full.value.reason, log.appends) == ("LIMIT_EXCEEDED", appends)
    coordinator.drop_collection("c0")
    assert coordinator.create_collection("more", SCHEMA).pchannels == ["dml_0"]
    coordinator.ensure_pchannels(3)
    assert coordinator.create_collection("one", SCHEMA).pchannels == ["dml_2"], "added while the coordinator runs"
    assert coordinator.collection("c4").pchannels == ["dml_1"], "what is there stays"


def test_one_pchannel_is_asked_for_each_new_vchannel_however_many_there_are(
    coordinator: Coordinator, log: ChainLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.ensure_pchannels(16)
    asked: list[tuple[str, int | None]] = []
    ask = log.definitions

    def counted(pchannel: str, number: int | None) -> PChannelDefinitions:
        asked.append((pchannel, number))
        return ask(pchannel, number)

    monkeypatch.setattr(log, "definitions", counted)
    coordinator.create_collection("c", SCHEMA, vchannels=2)
    assert [name for name, _ in asked] == ["dml_0", "dml_1"]
    assert None not in [number for _, number in asked], "nobody lists the collections of a PChannel for that"


def test_collections_that_several_coordinators_create_at_once_stay_spread(tmp_path: Path, log: ChainLog) -> None:
    append, lock = log.append_one, threading.Lock()

    def one_by_one(pchannel: str, entry: bytes, *, principal: str = "") -> int:
        with lock:
            return append(pchannel, entry, principal=principal)

    log.append_one = one_by_one  # type: ignore[method-assign]
    with opened(tmp_path, log) as first:
        first.ensure_pchannels(5)

    def create(worker: int) -> None:
        with opened(tmp_path, log) as mine:
            for number in range(10):
                mine.create_collection(f"c{worker}_{number}", SCHEMA)

    workers = [threading.Thread(target=create, args=(worker,)) for worker in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert set(counts(log).values()) == {8}


def test_the_counts_follow_whatever_writes_the_file_and_are_counted_in_an_older_one(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator.ensure_pchannels(2)
    for number in range(3):
        coordinator.create_collection(f"c{number}", SCHEMA, vchannels=2)
    coordinator.drop_collection("c1")
    with CatalogStore(catalog_path(tmp_path)) as store:
        assert store.vchannel_counts() == {"dml_0": 2, "dml_1": 2}
        back = dataclasses.replace(store.collection_by_id(2), state="active")
        assert store.restore_collection(back)
        assert store.vchannel_counts() == {"dml_0": 3, "dml_1": 3}
    with sqlite3.connect(catalog_path(tmp_path)) as db:  # as an earlier build left it
        for name in ("added", "gone", "dropped", "restored"):
            db.execute(f"drop trigger collection_{name}")
        db.execute("drop table vchannel_count")
    db.close()
    with CatalogStore(catalog_path(tmp_path)) as store:
        assert store.vchannel_counts() == {"dml_0": 3, "dml_1": 3}


class Placement(RuleBasedStateMachine):
    """Creates, drops, crashes and added PChannels, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.log = ChainLog()
        self.coordinator = opened(Path(self.folder.name), self.log)
        self.coordinator.ensure_pchannels(2)
        self.created = 0

    def teardown(self) -> None:
        self.coordinator.close()
        self.folder.cleanup()

    @rule(vchannels=st.integers(1, 7))
    def create(self, vchannels: int) -> None:
        self.created += 1
        before = counts(self.log)
        made = self.coordinator.create_collection(f"c{self.created}", SCHEMA, vchannels=vchannels)
        own = Counter(map(pchannel_of, made.vchannels))
        assert max(own.values()) - min(own[name] for name in before) <= 1
        if vchannels < len(before):
            passed = min(before[name] for name in before if not own[name])
            assert all(before[name] <= passed for name in own), "an emptier PChannel was passed over"

    @rule(vchannels=st.integers(1, 3), step=st.integers(0, 2))
    def create_and_die(self, vchannels: int, step: int) -> None:
        self.created += 1
        self.log.die_after = self.log.appends + step
        try:
            self.coordinator.create_collection(f"c{self.created}", SCHEMA, vchannels=vchannels)
        except Killed:
            pass
        self.log.die_after = None
        self.coordinator.close()
        self.coordinator = opened(Path(self.folder.name), self.log)
        self.coordinator.resume()

    @precondition(lambda self: self.coordinator.collections())
    @rule(place=st.integers(0, 99))
    def drop(self, place: int) -> None:
        there = self.coordinator.collections()
        self.coordinator.drop_collection(there[place % len(there)].name)

    @precondition(lambda self: len(self.log.states) < 6)
    @rule()
    def add_pchannel(self) -> None:
        self.coordinator.ensure_pchannels(len(self.log.states) + 1)

    @invariant()
    def the_catalog_counts_what_the_chain_has(self) -> None:
        with CatalogStore(catalog_path(Path(self.folder.name))) as store:
            assert store.vchannel_counts() == counts(self.log)


TestPlacement = Placement.TestCase
TestPlacement.settings = hypothesis.settings(max_examples=15, stateful_step_count=20, deadline=None)
