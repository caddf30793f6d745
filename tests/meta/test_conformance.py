"""What a meta store promises (millrace.meta.store), run against each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.errors import InvalidArgument, LeaseNotFound, RevisionCompacted
from millrace.meta.store import MAX_CHANGES, MAX_KEY, MAX_VALUE, Delete, Entry, Event, MetaStore, Put, RevisionEquals
from tests.meta.stores import STORES, Rig


@pytest.fixture(params=STORES)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = STORES[request.param](tmp_path, 50)
    yield rig
    rig.close()


@pytest.fixture
def store(rig: Rig) -> MetaStore:
    return rig.store


def put(store: MetaStore, key: str, value: bytes = b"", **more: int) -> int:
    revision = store.commit([Put(key, value, **more)])
    assert revision is not None
    return revision


def keys(store: MetaStore, prefix: str = "", revision: int | None = None) -> list[str]:
    return [entry.key for entry in store.list(prefix, revision=revision).entries]


def test_an_entry_knows_when_it_was_made_and_when_it_was_written_last(store: MetaStore) -> None:
    assert store.get("a") is None
    first = put(store, "a", b"1")
    second = put(store, "a", b"2")
    assert (second, store.get("a")) == (first + 1, Entry("a", b"2", created=first, modified=second))
    store.commit([Delete("a")])
    third = put(store, "a", b"3")
    assert store.get("a") == Entry("a", b"3", created=third, modified=third)


def test_a_commit_is_all_or_nothing_and_takes_one_revision(store: MetaStore) -> None:
    before = put(store, "seen", b"x")
    revision = store.commit(
        [Put("a", b"1"), Put("b", b"2"), Delete("seen")], when=[RevisionEquals("seen", before), RevisionEquals("a", 0)]
    )
    assert revision == before + 1
    assert [(entry.key, entry.modified) for entry in store.list("").entries] == [("a", revision), ("b", revision)]
    for condition in (RevisionEquals("a", before), RevisionEquals("a", 0), RevisionEquals("nowhere", revision)):
        assert store.commit([Put("a", b"9"), Delete("b")], when=[RevisionEquals("b", revision), condition]) is None
    assert store.list("").revision == revision
    assert keys(store) == ["a", "b"]


def test_a_key_that_came_back_is_not_the_one_that_was_read(store: MetaStore) -> None:
    first = put(store, "a", b"1")
    store.commit([Delete("a")])
    put(store, "a", b"1")
    assert store.commit([Put("a", b"2")], when=[RevisionEquals("a", first)]) is None


def test_of_writers_that_read_the_same_one_gets_through(rig: Rig) -> None:
    rounds, names = 20, range(4)
    stores = [rig.another() for _ in names]
    put(rig.store, "count", b"0")
    failures: list[BaseException] = []

    def count(store: MetaStore) -> None:
        try:
            for _ in range(rounds):
                while True:
                    entry = store.get("count")
                    assert entry is not None
                    more = str(int(entry.value) + 1).encode()
                    if store.commit([Put("count", more)], when=[RevisionEquals("count", entry.modified)]) is not None:
                        break
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=count, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    entry = rig.store.get("count")
    assert not failures
    assert entry is not None
    assert int(entry.value) == rounds * len(names)


def test_a_prefix_is_listed_in_order_as_of_now_or_of_a_revision(store: MetaStore) -> None:
    begin = store.list("").revision
    for key in ("nodes/b", "nodes/a", "nodes", "nodesx", "other", "Nodes/c"):
        put(store, key, key.encode())
    then = store.list("").revision
    store.commit([Put("nodes/c", b""), Delete("nodes/b"), Put("nodes/a", b"new")])
    assert keys(store, "nodes/") == ["nodes/a", "nodes/c"]
    old = store.list("nodes/", revision=then)
    assert (old.revision, [(entry.key, entry.value) for entry in old.entries]) == (
        then,
        [("nodes/a", b"nodes/a"), ("nodes/b", b"nodes/b")],
    )
    assert keys(store, "", revision=then) == ["Nodes/c", "nodes", "nodes/a", "nodes/b", "nodesx", "other"]
    assert keys(store, "", revision=begin) == []
    with pytest.raises(InvalidArgument, match="does not exist"):
        store.list("", revision=then + 2)


def test_changes_go_on_where_the_last_ones_ended(store: MetaStore) -> None:
    begin = store.list("").revision
    assert store.changes("", after=begin).events == ()
    first = put(store, "a/1", b"1")
    put(store, "b", b"elsewhere")
    second = store.commit([Put("a/2", b"2"), Delete("a/1")])
    store.commit([Delete("a/1")])  # of what is not there: no event
    seen = store.changes("a/", after=begin)
    found = [(event.revision, event.key, event.entry and event.entry.value) for event in seen.events]
    assert found[0] == (first, "a/1", b"1")
    assert sorted(found[1:], key=str) == [(second, "a/1", None), (second, "a/2", b"2")]
    assert seen.revision == store.list("").revision
    assert store.changes("a/", after=seen.revision).events == ()
    third = put(store, "a/3", b"3")
    assert store.changes("a/", after=seen.revision).events == (Event(third, "a/3", store.get("a/3")),)
    with pytest.raises(InvalidArgument, match="does not exist"):
        store.changes("", after=third + 1)


def test_what_is_listed_at_a_revision_and_changed_since_is_what_is_there_now(store: MetaStore) -> None:
    begin = store.list("").revision
    for number in range(30):
        store.commit([Put(f"k{number % 7}", str(number).encode()), Delete(f"k{(number + number % 3 + 1) % 7}")])
    now = store.list("")
    for revision in range(begin, now.revision + 1):
        there = {entry.key: entry for entry in store.list("", revision=revision).entries}
        for event in store.changes("", after=revision).events:
            if event.entry is None:
                del there[event.key]
            else:
                there[event.key] = event.entry
        assert [there[key] for key in sorted(there)] == list(now.entries)


def test_a_compacted_revision_is_an_error_that_names_the_earliest(store: MetaStore) -> None:
    four = [put(store, f"k{number % 3}", str(number).encode()) for number in range(6)][3]
    store.commit([Delete("k0")])
    at_four = store.list("", revision=four)
    store.compact(four)
    store.compact(four - 2)
    for call in (lambda: store.list("", revision=four - 1), lambda: store.changes("", after=four - 1)):
        with pytest.raises(RevisionCompacted) as caught:
            call()
        assert caught.value.earliest == four
    assert store.list("", revision=four) == at_four
    assert [event.key for event in store.changes("", after=four).events] == ["k1", "k2", "k0"]


def test_a_revision_whose_deletes_were_compacted_away_is_no_gap(store: MetaStore) -> None:
    """A follower that stands right before the earliest revision would miss what was deleted in it."""
    before = put(store, "a")
    earliest = store.commit([Delete("a"), Put("b", b"")])
    assert earliest is not None
    put(store, "c")
    store.compact(earliest)
    with pytest.raises(RevisionCompacted):
        store.changes("", after=before)


@pytest.mark.quick_cases(2)
def test_history_that_nobody_compacts_is_bounded(store: MetaStore) -> None:
    begin = store.list("").revision
    for number in range(400):
        put(store, f"k{number % 5}")
    with pytest.raises(RevisionCompacted) as caught:
        store.changes("", after=begin)
    earliest = caught.value.earliest - begin
    assert 400 - 2 * 50 - 256 <= earliest <= 400 - 50
    assert len(store.changes("", after=caught.value.earliest).events) == 400 - earliest


def test_a_lease_takes_its_keys_with_it_in_one_revision(rig: Rig) -> None:
    store = rig.store
    lease = store.grant(rig.lease_seconds)
    put(store, "node/1", b"", lease=lease)
    put(store, "node/2", b"", lease=lease)
    put(store, "stays")
    rig.pass_time(0.6 * rig.lease_seconds)
    assert keys(store) == ["node/1", "node/2", "stays"]
    before = store.list("").revision
    rig.lapse(lambda: store.get("node/1") is None)
    assert keys(store) == ["stays"]
    events = store.changes("", after=before).events
    assert [(event.revision, event.key, event.entry) for event in events] == [
        (before + 1, "node/1", None),
        (before + 1, "node/2", None),
    ]
    with pytest.raises(LeaseNotFound):
        store.renew(lease)
    with pytest.raises(LeaseNotFound):
        put(store, "node/1", b"", lease=lease)
    assert keys(store) == ["stays"]


@pytest.mark.quick_cases(2)
def test_a_lease_lives_as_long_as_it_is_renewed(rig: Rig) -> None:
    renewed, left = (rig.store.grant(rig.lease_seconds) for _ in range(2))
    put(rig.store, "renewed", lease=renewed)
    put(rig.store, "left", lease=left)
    for _ in range(3):
        rig.pass_time(0.5 * rig.lease_seconds)
        rig.another().renew(renewed)
    assert keys(rig.store) == ["renewed"]


def test_a_revoked_lease_is_over_at_once_and_a_key_that_left_it_stays(store: MetaStore) -> None:
    lease = store.grant(5.0)
    put(store, "a", lease=lease)
    put(store, "b", lease=lease)
    put(store, "b")
    store.revoke(lease)
    store.revoke(lease)
    assert keys(store) == ["b"]
    assert store.grant(5.0) != lease


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 86_401.0])
def test_a_lease_of_no_sense_is_refused(store: MetaStore, seconds: float) -> None:
    with pytest.raises(InvalidArgument):
        store.grant(seconds)


@pytest.mark.parametrize(
    "then, when",
    [
        ([], []),
        ([Put("", b"")], []),
        ([Put("k" * (MAX_KEY + 1), b"")], []),
        ([Put("a b", b"")], []),
        ([Put("ä", b"")], []),
        ([Put("a%", b"")], []),
        ([Put("a", b""), Delete("a")], []),
        ([Put("a", bytes(MAX_VALUE + 1))], []),
        ([Put(f"k{number}", bytes(MAX_VALUE)) for number in range(3)], []),
        ([Put(f"k{number}", b"") for number in range(MAX_CHANGES + 1)], []),
        ([Put("a", b"")], [RevisionEquals("", 0)]),
    ],
    ids=lambda case: repr(case)[:20],
)
def test_a_commit_of_no_sense_is_refused_before_anything_is_done(
    store: MetaStore, then: list[Put | Delete], when: list[RevisionEquals]
) -> None:
    begin = store.list("").revision
    with pytest.raises(InvalidArgument):
        store.commit(then, when=when)
    assert store.list("").revision == begin


def test_the_largest_commit_is_taken(store: MetaStore) -> None:
    then = [Put(f"{number:04}".ljust(MAX_KEY, "x"), b"") for number in range(MAX_CHANGES - 1)]
    store.commit([*then, Put("large", bytes(MAX_VALUE))])
    entry = store.get("large")
    assert entry is not None
    assert entry.value == bytes(MAX_VALUE)
    assert len(store.list("").entries) == MAX_CHANGES
