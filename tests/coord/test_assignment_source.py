"""Many who ask one process for assignments.

One look at the store for those that ask together, and each hears what it has not.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.base.errors import MetaUnavailable
from millrace.coord.assignment_source import CoalescedAssignmentSource, MetaStoreAssignmentSource
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.session import APPEND
from millrace.meta.memory import MemoryStore
from millrace.meta.store import EventBatch, Put
from millrace.rpc.assignments import AssignmentUpdate
from tests.waiting import until


class Counted(MemoryStore):
    """A store whose looks behind a revision take until `open`, and are counted."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.looks = 0
        self.open = threading.Event()
        self.open.set()

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        self.looks += 1
        found = super().changes(prefix, after=after)
        assert self.open.wait(30.0)
        return found


def move(store: MemoryStore, pchannel: str, to: str) -> int:
    key = ChannelRecord(pchannel, APPEND).key
    found = store.get(key)
    record = ChannelRecord(pchannel, APPEND) if found is None else ChannelRecord.decode(found.value, found.modified)
    revision = store.commit(
        [Put(key, record.begin_assignment(f"{to}@1", f"grpc://{to}", "").complete_assignment().encode())]
    )
    assert revision is not None
    return revision


def told(update: AssignmentUpdate) -> dict[str, str]:
    return {each.pchannel: each.address for each in update.assignments}


@pytest.fixture
def store() -> Counted:
    return Counted()


@pytest.fixture
def shared(store: Counted) -> CoalescedAssignmentSource:
    return CoalescedAssignmentSource(lambda: MetaStoreAssignmentSource(store))


def test_of_many_that_ask_at_once_one_looks_and_each_is_told_what_stood_when_it_asked(
    store: Counted, shared: CoalescedAssignmentSource
) -> None:
    begin = move(store, "p0", "n1")
    assert told(shared.since(-1)) == {"p0": "grpc://n1"}
    store.looks = 0
    store.open.clear()
    with ThreadPoolExecutor(40) as pool:
        early = pool.submit(shared.since, begin)
        until(lambda: store.looks == 1, "one looks")
        move(store, "p0", "n2")
        late = [pool.submit(shared.since, begin) for _ in range(30)]
        store.open.set()
        assert told(early.result(30.0)) == {}
        assert [told(each.result(30.0)) for each in late] == [{"p0": "grpc://n2"}] * 30
    # Whoever came to the queue behind the second look began a third one: how many threads did is the machine's.
    assert 2 <= store.looks <= 10, "not one for each"


def test_each_hears_what_is_behind_its_version_and_everything_where_that_cannot_be_said(
    store: Counted, shared: CoalescedAssignmentSource
) -> None:
    move(store, "p0", "n1")
    first = shared.all()
    assert (first.whole, told(first)) == (True, {"p0": "grpc://n1"})
    move(store, "p1", "n1")
    second = shared.since(first.version)
    move(store, "p0", "n2")
    third = shared.since(second.version)
    assert [(each.whole, told(each)) for each in (second, third)] == [
        (False, {"p1": "grpc://n1"}),
        (False, {"p0": "grpc://n2"}),
    ]
    assert told(shared.since(first.version)) == {"p0": "grpc://n2", "p1": "grpc://n1"}
    assert told(shared.since(third.version)) == {}
    store.compact(move(store, "p1", "n3"))
    anew = shared.since(third.version)
    assert (anew.whole, told(anew)) == (True, {"p0": "grpc://n2", "p1": "grpc://n3"})


def test_a_look_that_fails_is_its_callers_alone_and_while_nobody_serves_nothing_is_remembered(store: Counted) -> None:
    sources: list[MetaStoreAssignmentSource | Exception | None] = [
        MetaStoreAssignmentSource(store),
        MetaUnavailable("away"),
        MetaStoreAssignmentSource(store),
        None,
        MetaStoreAssignmentSource(store),
    ]

    def look() -> MetaStoreAssignmentSource | None:
        source = sources.pop(0)
        if isinstance(source, Exception):
            raise source
        return source

    shared = CoalescedAssignmentSource(look)
    version = move(store, "p0", "n1")
    shared.all()
    with pytest.raises(MetaUnavailable):
        shared.since(version)
    assert told(shared.since(version)) == {}
    assert shared.since(version) == AssignmentUpdate(0, True, ())
    back = shared.since(-1)
    assert (back.whole, told(back)) == (True, {"p0": "grpc://n1"})
