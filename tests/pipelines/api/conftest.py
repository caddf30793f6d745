"""The API's tests are about answers and rights: what they keep lies in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.base.settings import Settings
from tests.in_memory import folder_in_memory


@pytest.fixture
def settings() -> Iterator[Settings]:
    """As everywhere, with an empty data folder."""
    with folder_in_memory() as folder:
        yield Settings(data_dir=folder / "data", spark_cores=2)
