"""A coordinator over a log that judges at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.coord.coordinator import Coordinator
from tests.coord.ddl.rig import ChainLog


@pytest.fixture
def log() -> ChainLog:
    return ChainLog()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, cache_dir=tmp_path / "cache")


@pytest.fixture
def coordinator(settings: Settings, log: ChainLog) -> Iterator[Coordinator]:
    """A coordinator of an empty deployment without PChannels."""
    with Coordinator(settings, log=log, append=log) as made:  # type: ignore[arg-type]
        yield made
