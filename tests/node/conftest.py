"""A small deployment with a log of several files, for what looks after the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.schema import CollectionSchema, FieldSpec

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")


@pytest.fixture
def filled(tmp_path: Path) -> Settings:
    """A deployment with 20 rows of 200 KB in collection `c` on `dml_0`, in its log alone, whose server has ended."""
    made = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", log_file_bytes=1 << 20)
    with connect(settings=made) as client:
        client.catalog.ensure_pchannels(1)
        client.catalog.create_collection("c", SCHEMA)
        for key in range(20):
            client.new_producer().insert(client.definition("c"), pa.table({"id": [key], "body": [b"x" * 200_000]}))
        client.connection.service.shutdown()
    return made


@pytest.fixture
def engine(filled: Settings) -> Iterator[RocksMQ]:
    """The embedded log of `filled`, in this process."""
    with RocksMQ(filled.log_path) as service:
        yield service
