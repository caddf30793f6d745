"""Resource keys: who waits for whom."""

from __future__ import annotations

from millrace.coord.broadcast.keys import CLUSTER, COLLECTION, SHARED_CLUSTER, ResourceKey, complete, conflict

A, B = ResourceKey(COLLECTION, "a"), ResourceKey(COLLECTION, "b")
A_SHARED = ResourceKey(COLLECTION, "a", shared=True)
ALL = ResourceKey(CLUSTER)


def test_what_is_exclusive_conflicts_with_all_of_the_same_resource() -> None:
    assert conflict([A], [A])
    assert conflict([A], [A_SHARED])
    assert conflict([A_SHARED], [A])
    assert not conflict([A_SHARED], [A_SHARED])
    assert not conflict([A], [B])


def test_the_whole_cluster_conflicts_with_everything() -> None:
    assert complete([A]) == (SHARED_CLUSTER, A)
    assert conflict(complete([ALL]), complete([A_SHARED]))
    assert not conflict(complete([A]), complete([B]))


def test_a_resource_that_is_asked_for_twice_is_taken_once_and_for_itself() -> None:
    assert complete([A_SHARED, A, ALL, B]) == complete([B, ALL, A])
    assert complete([A, A_SHARED]) == (SHARED_CLUSTER, A)
