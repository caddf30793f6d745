"""The immutable map: it equals a dict after any changes, older copies never change, and a change copies one path."""

from __future__ import annotations

import pickle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.wal.shared_map import FAN_OUT, SharedMap, _Node

CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.integers(0, 9)), max_size=300)
BULK = st.sampled_from([0, 1, FAN_OUT, 3 * FAN_OUT, FAN_OUT**2 + 5])


class _Sum:
    """Counts entries and finds the least value; the context is added to it."""

    def __init__(self) -> None:
        self.asked = 0

    def of(self, key: int, value: int, context: Any) -> tuple[int, int]:
        self.asked += 1
        return 1, value + context[0]

    def same(self, old: int, new: int) -> bool:
        return old is new

    def join(self, summaries: list[tuple[int, int]]) -> tuple[int, int]:
        return sum(each[0] for each in summaries), min((each[1] for each in summaries), default=99)


def changed(shared: SharedMap[int, int], plain: dict[int, int], change: tuple[bool, int, int]) -> SharedMap[int, int]:
    """Apply one change to both."""
    removes, key, value = change
    if removes:
        if plain.pop(key, None) is None:
            return shared
        return shared.without(key)
    plain[key] = value
    return shared.set(key, value)


@settings(max_examples=150, deadline=None)
@given(BULK, CHANGES)
def test_it_equals_a_dict_and_older_copies_never_change(bulk: int, changes: list[tuple[bool, int, int]]) -> None:
    plain = {3 * key: key % 7 for key in range(bulk)}
    shared = SharedMap(plain)
    measure, context = _Sum(), [1000]
    held = [(shared, dict(plain))]
    for change in changes:
        shared = changed(shared, plain, change)
        if change[2] > 6:
            assert shared.summary(measure, context) == measure.join([measure.of(0, v, context) for v in plain.values()])
            held.append((shared, dict(plain)))
    assert shared == plain
    for older, expected in held:
        assert list(older.items()) == sorted(expected.items())
        assert (list(older), list(older.values()), len(older)) == (
            sorted(expected),
            [expected[key] for key in sorted(expected)],
            len(expected),
        )
        assert all(older[key] == value and key in older for key, value in expected.items())
        assert older.get(-1) is None
        assert list(older.between(20, 90)) == [(key, expected[key]) for key in sorted(expected) if 20 <= key < 90]
        assert older.get(10**9, "absent") == "absent"
        assert older.summary(measure, context) == measure.join([measure.of(0, v, context) for v in expected.values()])
        low = {key for key, value in expected.items() if value + 1000 <= 1002}
        found = [key for key, _ in older.where(measure, context, lambda each: each[1] <= 1002)]
        assert found == sorted(low)


@settings(max_examples=100, deadline=None)
@given(BULK, CHANGES, CHANGES)
def test_the_changed_keys_are_those_that_differ(
    bulk: int, before: list[tuple[bool, int, int]], after: list[tuple[bool, int, int]]
) -> None:
    plain: dict[int, Any] = {3 * key: [key] for key in range(bulk)}
    shared: SharedMap[int, Any] = SharedMap(plain)
    for removes, key, value in before:
        shared = changed(shared, plain, (removes, key, [value]))  # type: ignore[arg-type]
    old, older = shared, dict(plain)
    for removes, key, value in after:
        shared = changed(shared, plain, (removes, key, [value]))  # type: ignore[arg-type]
    expected = sorted(key for key in {*plain, *older} if plain.get(key) is not older.get(key))
    assert shared.changed_keys(old) == expected
    assert old.changed_keys(shared) == expected
    assert shared.changed_keys(shared) == []


def nodes(shared: SharedMap[Any, Any]) -> dict[int, _Node]:
    found: dict[int, _Node] = {}
    pending = [shared._root]
    while pending:
        node = pending.pop()
        found[id(node)] = node
        pending.extend(node.items if node.bounds is not None else ())
    return found


def test_a_change_copies_one_path_and_asks_for_its_own_summary_only() -> None:
    shared = SharedMap({key: key for key in range(10_000)})
    measure, context = _Sum(), [0]
    assert shared.summary(measure, context) == (10_000, 0)
    measure.asked = 0
    after = shared.set(5_000, 4)
    new = nodes(after).keys() - nodes(shared).keys()
    assert len(new) == 4
    assert sum(len(nodes(after)[each].items) for each in new) <= 4 * FAN_OUT
    assert after.summary(measure, context) == (10_000, 0)
    # Of the old and the new value, to see that they differ, and then of the leaf.
    assert measure.asked <= FAN_OUT + 2
    measure.asked = 0
    assert after.changed_keys(shared) == [5_000]
    assert after.summary(measure, context) == (10_000, 0)
    assert measure.asked == 0


def test_a_change_that_leaves_a_summary_alone_asks_for_two() -> None:
    shared = SharedMap({key: [key] for key in range(10_000)})

    class First(_Sum):
        def of(self, key: int, value: Any, context: Any) -> tuple[int, int]:
            return super().of(key, value[0], context)

    measure, context = First(), [0]
    shared.summary(measure, context)
    measure.asked = 0
    assert shared.set(5_000, [5_000, "more"]).summary(measure, context) == (10_000, 0)
    assert measure.asked == 2


def test_a_map_that_shrinks_gives_up_its_nodes() -> None:
    shared = SharedMap({key: key for key in range(10_000)})
    for key in range(10_000):
        if key % 100:
            shared = shared.without(key)
    assert list(shared) == list(range(0, 10_000, 100))
    assert len(nodes(shared)) <= 60


def test_it_can_be_sent_to_another_process() -> None:
    shared = SharedMap({key: str(key) for key in range(500)})
    assert pickle.loads(pickle.dumps(shared)) == shared
