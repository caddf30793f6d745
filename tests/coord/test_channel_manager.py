"""The leader's copy of the records: what it holds for true is what stands, whichever write or look fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.coord.channels.manager import ChannelManager
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.leadership import Leadership
from millrace.meta.memory import MemoryStore
from millrace.meta.store import MAX_CHANGES, Put
from tests.coord.faulty_store import Fault, FaultyStore, done_unheard, down, lost


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def manager(store: FaultyStore) -> ChannelManager:
    leadership = Leadership(store, SystemClock(), "c1", seconds=60.0)
    leadership.step()
    found = ChannelManager(leadership, leadership.epoch)
    found.add([f"dml_{number}" for number in range(3)], ["ingest"])
    return found


def stands(store: FaultyStore, record: ChannelRecord) -> ChannelRecord:
    entry = MemoryStore.get(store, record.key)
    assert entry is not None
    return ChannelRecord.decode(entry.value, entry.modified)


@pytest.mark.parametrize(
    "change", [ChannelManager.change, lambda manager, record: manager.change_all([record])], ids=["one", "many"]
)
@pytest.mark.parametrize(
    "script",
    [
        [done_unheard, down],  # the look fails: it is seen in the next round
        [done_unheard, down, None, down],  # and the look of that round, too, when its write was refused
        [done_unheard, down, down],  # or that round's write
        [lost, down, done_unheard, down],
    ],
)
def test_a_copy_comes_to_what_stands_when_the_store_answers_again(
    store: FaultyStore, manager: ChannelManager, script: list[Fault | None], change: Callable[..., Any]
) -> None:
    record = manager.records["channels/dml_1@ingest"]
    store.script = list(script)
    wanted = record.begin_assignment("n1@1", "n1", "place")
    with pytest.raises(MetaUnavailable):
        change(manager, wanted)
    for _ in script:
        try:
            manager.rewrite_unsure()
        except (MetaUnavailable, MetaAmbiguous):
            continue
    manager.rewrite_unsure()
    assert manager.records[record.key] == stands(store, record)
    before = store.commits
    manager.rewrite_unsure()
    assert store.commits == before, "what is certain is written once more"


def test_many_records_are_one_commit_and_one_that_had_changed_stops_no_other(
    store: FaultyStore, manager: ChannelManager
) -> None:
    before = store.commits
    manager.add((f"more_{number}" for number in range(MAX_CHANGES - 1)), ["ingest"])
    assert store.commits == before + 1
    other = manager.records["channels/dml_0@ingest"].begin_assignment("n9@9", "n9", "drain")
    MemoryStore.commit(store, [Put(other.key, other.encode())])
    manager.change_all([record.begin_assignment("n1@1", "n1", "place") for record in list(manager.records.values())])
    sessions = {key: record.owner and record.owner.session for key, record in manager.records.items()}
    assert sessions.pop(other.key) == "n9@9"
    assert set(sessions.values()) == {"n1@1"}
    assert all(stands(store, record) == record for record in manager.records.values())
