"""The second golden deployment opens, holds what it held, and goes on.

Rules, changed schemas, keys and types of the chain's version 4.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import AppendRejected, CheckViolated
from millrace.commands.verify import check_channels, check_collections
from millrace.log.generations.service import open_deployment_log
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.runtime.progress import Progress
from tests.golden.deployment import LOG, facts, of_catalog, of_log, of_wal, rows, served, settings_of, unpacked
from tests.golden.make_second import ARCHIVE, CUSTOMER, FACTS, alter, order, trade

KNOWN = facts(FACTS)
READS: list[dict[str, Any]] = KNOWN["reads"]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("second"), ARCHIVE)


def test_the_wal_holds_what_was_committed_with_its_states_byte_for_byte(untouched: Path) -> None:
    assert of_wal(settings_of(untouched)) == KNOWN["wal"]


@pytest.mark.parametrize("read", READS, ids=lambda read: read["what"])
def test_a_read_at_each_tick_finds_what_it_found(untouched: Path, read: dict[str, Any]) -> None:
    assert rows(settings_of(untouched), read["collection"], at=read["at"]) == read["rows"]


def test_the_log_run_through_the_chain_again_gives_every_row_and_state(untouched: Path) -> None:
    settings = settings_of(untouched)
    with open_deployment_log(settings.log_path, settings=LOG) as log:
        assert of_log(log) == KNOWN["log"]
        assert all(each["holds"] for each in check_channels(settings, log=log))
    assert all(each["holds"] for each in check_collections(settings))


@pytest.mark.slow
def test_everything_goes_on_by_the_rules_that_it_had(tmp_path: Path) -> None:
    with served(unpacked(tmp_path / "second", ARCHIVE)) as client:
        assert of_catalog(client) == KNOWN["catalog"]
        for number in range(2):
            client.connection.tick(f"dml_{number}")
        first = client.definition("orders")
        older = replace(first, schemas=first.schemas[:1])
        customer, writer = client.new_producer(producer_id=CUSTOMER), client.new_producer()
        customer.insert(older, [order(100, 3, "2.00")])
        alter(client, "orders", add_check={"few": "pieces < 1000"})
        with pytest.raises(AppendRejected, match=r"CHECK_VIOLATED.*'few'"):  # which the first schema's rules allow
            customer.insert(older, [order(102, 5000, "0.01")])
        with pytest.raises(CheckViolated, match="near"):
            writer.insert(first, [{"id": 101, "pieces": 9, "price": 100, "region": "south"}])
        due = {"due": "pieces * price + 1"}
        changed = alter(client, "orders", drop_check="near", add={"due": "decimal(15,2)?"}, computed=due)
        writer.insert(changed, [{"id": 101, "pieces": 9, "price": 100, "region": "south"}])
        writer.upsert("trades", [trade("a", 2, "1.5")])
        ingest_to_end(client.settings, client.log)
        flush_to_end(client.settings)
        found = {row["id"]: row for row in client.collection("orders").read().to_pylist()}
        assert {95, 96} <= set(found), "what was in the log alone"
        assert [found[100][name] for name in ("tax", "total", "region", "due")] == [
            Decimal("1.50"),
            Decimal("6.00"),
            None,
            None,
        ]
        assert (found[101]["due"], found[101]["seen"] is not None) == (Decimal("901.00"), True)
        assert Decimal("1.5") in client.collection("trades").read()["price"].to_pylist()
        assert checkpoint(client.settings, client.log, CheckpointParams(), Progress()).ok
        assert all(each["holds"] for each in check_channels(client.settings, log=client.log))
        assert all(each["holds"] for each in check_collections(client.settings))
