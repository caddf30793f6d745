"""The API's tests are about answers and rights: what they keep lies in memory where the machine has such a folder, since each call syncs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings

MEMORY = "/dev/shm"


@pytest.fixture
def settings() -> Iterator[Settings]:
    """As everywhere, with an empty data folder."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        yield Settings(data_dir=Path(folder) / "data", spark_cores=2)
