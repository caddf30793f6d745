"""What the tests of checkpoints and trims begin with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from tests.operations.log_maker import Things


@pytest.fixture
def things(tmp_path: Path) -> Iterator[Things]:
    """A small deployment on a log that is at hand."""
    made = Things(tmp_path)
    yield made
    made.close()


@pytest.fixture
def short(things: Things) -> Settings:
    """A retention that everything has outlived."""
    return replace(things.settings, wal_retention=0.001)
