"""How many examples the laws take, and how many ticks of an example they look at.

A share of the profile's, so that `make test-all` looks further with the same tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, example, settings

_QUICK = os.environ.get("TEST_PROFILE") == "quick"

_Test = TypeVar("_Test", bound=Callable[..., object])


def examples(count: int) -> settings:
    """`count` examples where the profile says 100, in proportion elsewhere.

    A log takes a while to draw; that is no defect.
    """
    scaled = max(min(10, count), count * settings.default.max_examples // 100) if settings.default else count
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=scaled, deadline=None, suppress_health_check=slow)


def spread(step: int, ticks: list[int], *, first: int) -> list[int]:
    """Every `step`-th of `ticks` from the place `first` on, and the last one; `make test` takes half as many."""
    return sorted({*ticks[first :: 2 * step if _QUICK else step], *ticks[-1:]})


def nightly_example(*arguments: Any) -> Callable[[_Test], _Test]:
    """An `@example` that `make test` leaves out, since another one of the test passes the same places."""
    return (lambda test: test) if _QUICK else example(*arguments)
