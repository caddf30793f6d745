"""One deployment for the clients' tests.

A log server of its own, and its tables brought up to date when a test asks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import TickNotReached
from millrace.base.file_lock import ProcessRegistration
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.discovery import read_record
from millrace.runtime.heartbeat import STREAMING_NODE

ITEMS = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("name", "string", False),
        FieldSpec("price", "float64", True),
        FieldSpec("sold", "bool", True),
    ),
    "id",
)


NOWHERE = Path("/nowhere/that/a/client/elsewhere/may/look")


def own_name(request: pytest.FixtureRequest) -> str:
    """A name for a collection of this test alone, with its parameters."""
    return "".join(each if each.isalnum() else "_" for each in request.node.name)


@pytest.fixture(scope="package")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    yield from opened_shop(tmp_path_factory.mktemp("clients"))


def opened_shop(folder: Path) -> Iterator[Database]:
    """A deployment below `folder`, until the next step."""
    settings = Settings(
        data_dir=folder / "data", cache_dir=folder / "cache", append_retry_delay=0.05, append_deadline=10.0
    )
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(2)
        yield made
        made.connection.service.shutdown()


@pytest.fixture(params=["here", "elsewhere"])
def reader(shop: Database, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Who reads: a client of the data folder, and one that knows the server's address alone."""
    if request.param == "here":
        yield shop
        return
    record = read_record(shop.settings.log_path)
    assert record is not None
    with connect(record.address, token=record.token, settings=replace(shop.settings, data_dir=NOWHERE)) as made:
        yield made


@pytest.fixture
def items(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    """A collection of two VChannels, one on each PChannel."""
    return shop.catalog.create_collection(own_name(request), ITEMS, vchannels=2)


@contextmanager
def streaming_node(settings: Settings) -> Iterator[None]:
    """A heartbeat of this process, as a driver's that runs the streaming node: reads wait for the tables."""
    registered = ProcessRegistration(settings.run_path)
    beat = settings.run_path / "pretended.heartbeat.json"
    beat.write_text(json.dumps({"pid": os.getpid(), "at": time.time(), "queries": {STREAMING_NODE: {}}}))
    try:
        yield
    finally:
        beat.unlink()
        del registered


def item_rows(*keys: int, name: str = "new", price: float = 1.0) -> pa.Table:
    return pa.table({"id": list(keys), "name": [name] * len(keys), "price": [price] * len(keys)})


@pytest.fixture
def stored(shop: Database) -> Callable[..., dict[int, str]]:
    """Names by id that a collection has, at a tick or now."""

    def read(collection: CollectionInfo, *, at: int | None = None) -> dict[int, str]:
        for last in (False, False, True):
            ingest_to_end(shop.settings, shop.log)
            try:
                with streaming_node(shop.settings):  # what the log alone has is not read: others read the tables too
                    table = shop.collection(collection.name).read(at=at, deadline=1.0)
                break
            except TickNotReached:  # a timer of the chain (an idle segment's) fired meanwhile
                if last:
                    raise
        found = dict(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))
        assert len(found) == table.num_rows, "a key is there twice"
        return found

    return read
