"""A log service of every backend of the conformance suite, for streams to be on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.log.protocol import LogService
from tests.conformance.backends import BACKENDS


def _marked(backend: str) -> object:
    """Everything runs on every backend in `make test-all`; in `make test` brokers have test_every_backend.py alone."""
    return backend if backend.startswith("rocksmq") else pytest.param(backend, marks=pytest.mark.slow)


@pytest.fixture(params=sorted(BACKENDS))
def any_service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogService]:
    with BACKENDS[request.param](tmp_path / "log") as service:
        yield service


@pytest.fixture(params=[_marked(backend) for backend in sorted(BACKENDS)])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogService]:
    with BACKENDS[request.param](tmp_path / "log") as service:
        yield service


@pytest.fixture
def channels(service: LogService) -> Callable[[int], list[str]]:
    """Makes so many channels, by names that sort in their order."""

    def make(count: int) -> list[str]:
        names = [f"c{number}" for number in range(count)]
        for name in names:
            service.create(name)
        return names

    return make
