"""A PChannel that the streaming node parked, as a person brings it on; without Spark."""

from __future__ import annotations

from contextlib import closing

import pytest

from millrace.client.append_client import AppendClient
from millrace.message.ids import LogId
from millrace.message.tombstones import Tombstone
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.parking import read_parked, restart_follower, unpark
from millrace.rpc import calls
from millrace.storage.table import table_at
from tests.node.ingest.deployment import Deployment
from tests.node.log_samples import accepted, opening, poison
from tests.node.range_loop.host import Host


@pytest.mark.slow
def test_a_parked_pchannel_goes_on_behind_a_tombstone(deployment: Deployment) -> None:
    parked = deployment.settings.parked_path
    _, _, entry, _ = deployment.append("p1", opening(), accepted(), poison(), accepted())
    with closing(Host(IngestLoop(deployment.settings))) as host:
        assert host.step() == ["p1"]
        assert [each.position for each in read_parked(parked)] == [entry]
        client = AppendClient(deployment.service)
        named = {"pchannel": "p1", "entry": entry}
        seen = client.call(calls.TOMBSTONE, named)
        assert LogId(*seen["committed"]) == entry
        signed = {"sha256": seen["sha256"], "author": "ada", "reason": "INC-1"}
        placed = Tombstone.from_json("p1", client.call(calls.TOMBSTONE, named | signed))
        restart_follower(client, "p1")
        unpark(parked, "p1")
        host.clock.now += 10
        assert host.step() == ["p1"]
    assert deployment.rows("p1") >= 4
    rows = table_at(deployment.settings.wal_uri).dataset().to_table(columns=["kind", "payload"]).to_pylist()
    assert [row["payload"] for row in rows if row["kind"] == "rejection"] == [placed.value]
    assert not read_parked(parked)
    deployment.check()
