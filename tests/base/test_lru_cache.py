"""The cache keeps what was used last, within its limit."""

from __future__ import annotations

from millrace.base.lru_cache import LruCache


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(each) for each in "abc"] == [1, None, 3]


def test_costs_bound_it_and_the_newest_value_stays_whatever_it_costs() -> None:
    cache: LruCache[str, bytes] = LruCache(10, cost=lambda key, value: len(value))
    cache.put("a", bytes(4))
    cache.put("b", bytes(4))
    cache.put("a", bytes(6))
    assert cache.get("a") is not None
    assert cache.get("b") is not None
    cache.put("c", bytes(100))
    assert [cache.get(each) is None for each in "abc"] == [True, True, False]
    cache.clear()
    assert cache.get("c") is None
    cache.put("d", bytes(10))
    cache.put("e", bytes(0))
    assert cache.get("d") is not None, "what was cleared costs nothing any more"
