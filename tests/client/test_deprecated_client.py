"""The Client of the last release: each of its calls warns at its place, and does what the Database's does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.catalog.collection import CollectionInfo
from millrace.client.client import Client
from millrace.client.database import Database
from millrace.rpc.discovery import read_record
from millrace.wal.scanner import All
from tests.client.conftest import item_rows

DEPRECATED = "Client goes with the next release"


def test_a_client_of_a_folder_has_its_calls_under_their_old_names(
    shop: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    with pytest.warns(DeprecationWarning, match=DEPRECATED) as seen:
        client = Client.connect(shop.settings, now=False)
    assert seen[0].filename == __file__
    with client:
        found = client.collection(items.name)
        assert found == client.current_definition(found) == items
        assert client.catalog.collection(items.name) == items
        assert client.producer().insert(found, item_rows(1, 2)).rows == 2
        assert stored(items) == {1: "new", 2: "new"}
        end = client.current_tick(items.pchannels)
        assert client.read(found).num_rows == client.count(items.name) == 2
        assert client.stream(found).read_all().num_rows == client.dataset(found).count_rows() == 2
        with client.consumer(found, policy=All(), until_tick=end) as consumer:
            assert sum(change.rows.num_rows for delivery in consumer for change in delivery.changes()) == 2
        with client.changes(found, until_tick=end) as stream:
            assert sum(batch.rows.num_rows for batch in stream) == 2


def test_a_client_of_a_server_and_that_of_a_database_warn_too(shop: Database) -> None:
    record = read_record(shop.settings.log_path)
    assert record is not None
    with pytest.warns(DeprecationWarning, match=DEPRECATED) as seen:
        client = Client.at(record.address, env={"MILLRACE_SERVER_TOKEN": record.token}, deadline=5.0)
    assert seen[0].filename == __file__
    with client:
        assert client.log.names() == shop.log.names()
    with pytest.warns(DeprecationWarning, match=DEPRECATED) as seen:
        assert shop.client.settings is shop.settings
    assert seen[0].filename == __file__


def test_the_connection_has_its_old_name(shop: Database) -> None:
    with pytest.warns(DeprecationWarning, match="use Database.connection") as seen:
        assert shop.append is shop.connection
    assert seen[0].filename == __file__


def test_the_client_of_a_hook_warns(shop: Database) -> None:
    from millrace_airflow.hooks import MillraceHook

    with pytest.warns(DeprecationWarning, match=DEPRECATED):
        client = MillraceHook(data_dir=str(shop.settings.data_dir)).client(start=False)
    with client:
        assert client.log.names() == shop.log.names()
