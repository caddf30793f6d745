"""Where a stream's checkpoint may lie: in the data folder, or in a bucket, with its state in a meta store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from tests.s3_server import bucket


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings of a machine with a bucket and a meta store."""
    with bucket(monkeypatch) as uri:
        meta = f"sqlite:///{tmp_path / 'meta.db'}"
        yield Settings(data_dir=tmp_path / "one", tables=f"{uri}/tables", meta_store=meta, session_seconds=1.0)


@pytest.fixture(params=["folder", "bucket"])
def places(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    return settings if request.param == "folder" else request.getfixturevalue("shared")
