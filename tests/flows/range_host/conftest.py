"""A deployment beside a pipeline's brokers, for sinks that are collections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import millrace.testing
from millrace.base.settings import Settings
from millrace.testing import Deployment


@pytest.fixture
def deployed() -> Iterator[Callable[[Settings], Deployment]]:
    """Start a deployment in the data folder of settings; it ends with the test."""
    with ExitStack() as all_of_them:
        yield lambda settings: all_of_them.enter_context(millrace.testing.deployment(settings.data_dir))
