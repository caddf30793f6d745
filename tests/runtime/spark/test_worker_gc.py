"""Spark's workers collect behind each task.

What stood when the first one was done is left out, what comes later is not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from millrace.runtime.spark.worker_gc import freeze_modules


class Ring:
    """Something that only a collection can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The test's own process collects as before, behind it."""
    freeze_modules.cache_clear()
    yield
    gc.unfreeze()
    freeze_modules.cache_clear()


def test_what_stands_is_kept_out_once_for_each_source_and_rubbish_is_not_kept() -> None:
    before = weakref.ref(Ring())
    freeze_modules("first")
    assert before() is None, "it is collected before what is left is kept"
    kept = gc.get_freeze_count()
    assert kept > 10_000, "the modules of this process"
    # Other threads of a test run let some of what is kept go meanwhile: far fewer than these.
    more = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
    freeze_modules("first")
    assert gc.get_freeze_count() < kept + len(more) // 2
    freeze_modules("second")
    assert gc.get_freeze_count() > kept + len(more) // 2


def test_what_comes_later_is_still_collected() -> None:
    freeze_modules("first")
    later = weakref.ref(Ring())
    gc.collect()
    assert later() is None
