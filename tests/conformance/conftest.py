"""Fixtures: a deployment of each backend, which a test can restart, and a log in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.log.protocol import Log, LogService
from tests.conformance.backends import BACKENDS, PARAMETERS, Promises, promises_of


class Deployment:
    """A service that can be restarted over the same data."""

    def __init__(self, backend: str, directory: Path) -> None:
        self._backend = backend
        self._directory = directory
        self.promises: Promises = promises_of(backend)
        self.service: LogService = BACKENDS[backend](directory)

    def another(self) -> LogService:
        """A second service over the same data, as another process would open it; the caller closes it."""
        return BACKENDS[self._backend](self._directory)

    def restart(self) -> LogService:
        self.service.close()
        self.service = BACKENDS[self._backend](self._directory)
        return self.service


@pytest.fixture(params=PARAMETERS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def deployment(backend: str, tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(backend, tmp_path / "log")
    yield deployment
    deployment.service.close()


@pytest.fixture
def log(deployment: Deployment) -> Log:
    deployment.service.create("dml_0")
    return deployment.service.open("dml_0")
