"""Cached definitions: a hit makes no request, and none is older than it may be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from millrace.base.errors import CollectionNotFound, LogUnavailable
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.definition_cache import MAX_AGE, DefinitionCache
from millrace.message.schema import CollectionSchema, FieldSpec
from tests.waiting import until

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


class Catalog:
    """Collections by name, whose requests are counted and may be held up."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.asked: list[str] = []
        self.now = 0.0
        self.before_answer: Callable[[], object] = lambda: None
        self.failure: Exception | None = None

    def fetch(self, name: str) -> CollectionInfo:
        self.asked.append(name)
        found = self.ids.get(name)
        self.before_answer()
        if self.failure is not None:
            raise self.failure
        if found is None:
            raise CollectionNotFound(name)
        return CollectionInfo(found, name, "active", (f"p0_{found}v0",), (SCHEMA,), {"_default": 1}, 2)

    def cache(self, **options: int) -> DefinitionCache:
        return DefinitionCache(self.fetch, clock=lambda: self.now, **options)


@pytest.fixture
def catalog() -> Catalog:
    made = Catalog()
    made.ids = {f"c{number}": number for number in range(1, 9)}
    return made


def test_a_name_is_asked_for_once_and_found_in_microseconds(catalog: Catalog) -> None:
    cache = catalog.cache()
    assert cache.cached("c1") is None
    assert cache.get("c1").id == 1
    took = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            assert cache.get("c1").id == 1
        took.append(time.perf_counter() - began)
    assert min(took) < 0.05, "a hit takes more than 50 us"
    assert catalog.asked == ["c1"]


def test_no_definition_is_older_than_it_may_be(catalog: Catalog) -> None:
    cache = catalog.cache()
    cache.get("c1")
    catalog.ids["c1"] = 11
    catalog.now = MAX_AGE + 0.001
    assert cache.cached("c1") is None
    assert cache.get("c1").id == 11


def test_the_age_of_a_definition_counts_from_its_request(catalog: Catalog) -> None:
    cache = catalog.cache()

    def wait() -> None:
        catalog.now += 0.4 * MAX_AGE

    catalog.before_answer = wait
    cache.get("c1")
    catalog.now = 0.49 * MAX_AGE  # from half of the age on, it is asked for anew in the background
    assert cache.cached("c1") is not None
    catalog.now = 1.01 * MAX_AGE
    assert cache.cached("c1") is None


def test_a_name_in_use_is_asked_for_in_the_background(catalog: Catalog) -> None:
    cache, answered = catalog.cache(), threading.Event()
    cache.get("c1")
    catalog.ids["c1"] = 11
    catalog.before_answer = lambda: answered.wait(10)
    catalog.now = 0.6 * MAX_AGE
    assert cache.get("c1").id == 1, "nobody waits for the request"
    answered.set()
    until(lambda: cache.get("c1").id == 11)
    assert catalog.asked == ["c1", "c1"]
    catalog.now = 1.5 * MAX_AGE
    assert cache.cached("c1") is not None, "its age counts from the second request"


def test_a_name_that_cannot_be_asked_for_serves_as_long_as_it_may(catalog: Catalog) -> None:
    cache = catalog.cache()
    cache.get("c1")
    catalog.failure = LogUnavailable("not now")
    catalog.now = 0.6 * MAX_AGE
    assert cache.get("c1").id == 1
    until(lambda: len(catalog.asked) == 2)
    assert cache.get("c1").id == 1
    catalog.now = 1.1 * MAX_AGE
    with pytest.raises(LogUnavailable):
        cache.get("c1")
    catalog.failure = None
    assert cache.get("c1").id == 1


def test_what_a_database_changes_itself_counts_at_once(catalog: Catalog) -> None:
    cache = catalog.cache()
    cache.get("c1")
    with suppress(LogUnavailable), cache.changing("c1"):
        catalog.ids["c1"] = 11
        raise LogUnavailable("whether it was changed is unknown")
    assert cache.get("c1").id == 11
    del catalog.ids["c1"]
    with cache.changing("c1"):
        pass
    with pytest.raises(CollectionNotFound):
        cache.get("c1")


def test_an_answer_from_before_a_change_is_not_cached(catalog: Catalog) -> None:
    cache, arrived, answered = catalog.cache(), threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        answered.wait(10)

    catalog.before_answer = hold
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(cache.get, "c1")
        arrived.wait(10)
        with cache.changing("c1"):
            catalog.ids["c1"] = 11
        catalog.before_answer = lambda: None
        after = cache.get("c1")
        answered.set()
        assert (before.result().id, after.id) == (1, 11)
    assert cache.get("c1").id == 11


def test_callers_that_wait_for_a_name_share_a_request_and_its_failure(catalog: Catalog) -> None:
    cache, waiting, answered = catalog.cache(), threading.Barrier(9), threading.Event()
    catalog.before_answer = lambda: answered.wait(10)

    def ask() -> int:
        waiting.wait(10)
        return cache.get("c1").id

    for failure in (LogUnavailable("not now"), None):
        catalog.asked, catalog.failure = [], failure
        answered.clear()
        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask) for _ in range(8)]
            waiting.wait(10)
            until(lambda: catalog.asked)
            until(lambda: len(cache._lookups["c1"].answer._condition._waiters) == 7)  # type: ignore[attr-defined]
            answered.set()
            errors = [each.exception(10) for each in asking]
        assert catalog.asked == ["c1"]
        assert [type(each) for each in errors] == [type(failure)] * 8
        assert len({id(each) for each in errors}) == (8 if failure else 1)


def test_a_request_that_hangs_is_not_shared_for_longer_than_a_definition_may_be_old(catalog: Catalog) -> None:
    cache, arrived, answered = catalog.cache(), threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        answered.wait(10)

    catalog.before_answer = hold
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(cache.get, "c1")
        arrived.wait(10)
        catalog.before_answer = lambda: None
        catalog.ids["c1"] = 11
        catalog.now = MAX_AGE + 0.001
        assert cache.get("c1").id == 11
        answered.set()
        assert hanging.result().id == 1
    assert cache.get("c1").id == 11


def test_a_name_that_was_dropped_is_not_cached_and_an_interrupted_request_is_repeated(catalog: Catalog) -> None:
    cache = catalog.cache()
    cache.get("c1")
    del catalog.ids["c1"]
    with pytest.raises(CollectionNotFound):
        cache.renew("c1")
    assert cache.cached("c1") is None
    arrived, answered = threading.Event(), threading.Event()

    def interrupted() -> None:
        arrived.set()
        answered.wait(10)
        catalog.before_answer = lambda: None
        raise KeyboardInterrupt

    catalog.before_answer = interrupted
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "c2")
        arrived.wait(10)
        second = pool.submit(cache.get, "c2")
        answered.set()
        assert isinstance(first.exception(10), KeyboardInterrupt)
        assert second.result(10).id == 2


def test_the_least_recently_used_name_is_forgotten(catalog: Catalog) -> None:
    cache = catalog.cache(max_names=3)
    for number in (1, 2, 3, 1, 4):
        cache.get(f"c{number}")
    assert [cache.cached(f"c{number}") is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(cache._cached) == 3
