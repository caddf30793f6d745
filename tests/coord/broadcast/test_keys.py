"""Resource keys: who waits for whom."""

from __future__ import annotations

from millrace.coord.broadcast.task import (
    CLUSTER,
    COLLECTION,
    SHARED_CLUSTER,
    ResourceKey,
    keys_conflict,
    normalize_keys,
)

A, B = ResourceKey(COLLECTION, "a"), ResourceKey(COLLECTION, "b")
A_SHARED = ResourceKey(COLLECTION, "a", shared=True)
ALL = ResourceKey(CLUSTER)


def test_what_is_exclusive_conflicts_with_all_of_the_same_resource() -> None:
    assert keys_conflict([A], [A])
    assert keys_conflict([A], [A_SHARED])
    assert keys_conflict([A_SHARED], [A])
    assert not keys_conflict([A_SHARED], [A_SHARED])
    assert not keys_conflict([A], [B])


def test_the_whole_cluster_conflicts_with_everything() -> None:
    assert normalize_keys([A]) == (SHARED_CLUSTER, A)
    assert keys_conflict(normalize_keys([ALL]), normalize_keys([A_SHARED]))
    assert not keys_conflict(normalize_keys([A]), normalize_keys([B]))


def test_a_resource_that_is_asked_for_twice_is_taken_once_and_for_itself() -> None:
    assert normalize_keys([A_SHARED, A, ALL, B]) == normalize_keys([B, ALL, A])
    assert normalize_keys([A, A_SHARED]) == (SHARED_CLUSTER, A)
