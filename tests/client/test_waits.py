"""A read that has nothing to wait for answers at once; one that waits in vain says what it waited for."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from millrace.base.errors import ChannelParked, CollectionNotFound, TickNotReached
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_client import AppendClient
from millrace.client.database import Database
from millrace.log.protocol import LogService
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.tail import TailBatch
from millrace.tables.read import freshness
from millrace.tables.read.freshness import confirm_ticks
from tests.client.conftest import item_rows, streaming_node

LONG = 30.0
"""Seconds: a read that waits for it does not end within its test."""


def test_a_read_before_the_collection_or_after_the_logs_clock_is_refused_at_once(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    shop.new_producer().insert(items, item_rows(1))
    ingest_to_end(shop.settings, shop.log)
    began = time.monotonic()
    with pytest.raises(CollectionNotFound):
        reader.collection(items.name).read(at=0, deadline=LONG)
    for ahead in (timedelta(hours=1), timedelta(days=90)):
        with pytest.raises(TickNotReached, match="ahead of the log's clock"):
            reader.collection(items.name).read(at=datetime.now(UTC) + ahead, deadline=LONG)
    assert time.monotonic() - began < LONG


@pytest.mark.slow
def test_a_read_waits_for_a_moment_that_comes_within_its_deadline(shop: Database, items: CollectionInfo) -> None:
    shop.new_producer().insert(items, item_rows(1))
    ingest_to_end(shop.settings, shop.log)
    assert shop.collection(items.name).read(at=datetime.now(UTC) + timedelta(seconds=0.7), deadline=30.0).num_rows == 1


def test_a_read_takes_from_the_append_host_what_the_streaming_node_has_not_brought_into_the_tables(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    target = reader.collection(items.name)
    shop.new_producer().insert(items, item_rows(*range(10), name="old"))
    with streaming_node(shop.settings):  # which does nothing
        assert target.read(deadline=0.1).num_rows == 10
        ingest_to_end(shop.settings, shop.log)
        flush_to_end(shop.settings)
        then = shop.current_tick(items.pchannels)
        shop.new_producer().upsert(items, item_rows(*range(5, 20), name="new"))
        shop.new_producer().delete(items, [0])
        assert target.count(deadline=0.1) == 19
        assert target.read(where="name = 'new'", deadline=0.1).num_rows == 15
        assert target.read(at=then, deadline=0.1).num_rows == 10


def test_a_read_of_the_past_appends_nothing(
    shop: Database, items: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.new_producer().insert(items, item_rows(*range(10)))
    ingest_to_end(shop.settings, shop.log)
    then = shop.current_tick(items.pchannels)
    shop.new_producer().insert(items, item_rows(*range(10, 60)))
    ingest_to_end(shop.settings, shop.log)

    def tick(client: AppendClient, pchannel: str, *, persist: bool = True) -> int:
        raise AssertionError(f"a tick was made on {pchannel}")

    monkeypatch.setattr(AppendClient, "tick", tick)
    assert shop.collection(items.name).read(at=then).num_rows == 10


def test_a_read_that_the_streaming_node_holds_up_names_it_and_the_pchannels(
    shop: Database, items: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append host's buffer does not have enough."""
    monkeypatch.setattr(freshness, "DECIDED_BYTES", 0)
    shop.new_producer().insert(items, item_rows(*range(20)))
    words = r"rows on dml_0, dml_1 that the wal table lacks: is the streaming node run"
    with streaming_node(shop.settings), pytest.raises(TickNotReached, match=words):
        shop.collection(items.name).read(deadline=0.2)


def test_a_read_of_a_pchannel_that_cannot_be_asked_says_why(tmp_path: Path) -> None:
    class Parked:
        service: LogService

        def tick(self, pchannel: str, *, persist: bool = True) -> int:
            raise ChannelParked(f"{pchannel} is parked at entry 0:7")

        def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 0) -> TailBatch:
            raise AssertionError("nothing is asked of it")

    found = confirm_ticks(Settings(data_dir=tmp_path), ["dml_0"], Parked(), at=None, seconds=0.1)
    assert found.ticks == {}
    assert "cannot get the tick of dml_0 (CHANNEL_PARKED: dml_0 is parked at entry 0:7)" in found.missing
