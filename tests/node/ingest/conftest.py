"""A deployment with two PChannels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.base.settings import Settings
from tests.node.ingest.deployment import Deployment


@pytest.fixture
def deployment(settings: Settings) -> Iterator[Deployment]:
    """With its log's server, which ends behind the test."""
    found = Deployment(settings)
    yield found
    found.service.shutdown()
    found.service.close()
