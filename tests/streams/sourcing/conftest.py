"""One deployment for the tests of event stores, and stores in collections of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import millrace.testing
from millrace.streams.sourcing.store import EventStore
from tests.streams.sourcing.flying import AIRCRAFT, Aircraft

Open = Callable[..., EventStore[Aircraft]]


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[millrace.testing.Deployment]:
    folder = tmp_path_factory.mktemp("sourcing") / "data"
    with millrace.testing.deployment(folder, append_retry_delay=0.01) as made:
        yield made


@pytest.fixture
def opened(deployment: millrace.testing.Deployment, request: pytest.FixtureRequest) -> Open:
    """Opens an event store in the test's own collection, with new ones for each call."""
    name = "".join(each if each.isalnum() else "_" for each in request.node.name)

    def make(**options: Any) -> EventStore[Aircraft]:
        return EventStore.open(deployment, name, options.pop("aggregate", AIRCRAFT), **options)

    return make
