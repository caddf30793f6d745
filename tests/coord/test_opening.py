"""What stands on the settings of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.base.errors import LogBusy
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.opening import open_store, require_no_appending_nodes
from millrace.coord.session import INGEST, NODES, ROLES, NodeInfo
from millrace.meta.store import Delete, Put


def test_the_log_is_switched_when_no_node_takes_appends(settings: Settings) -> None:
    broker = replace(settings, log="kafka://127.0.0.1:1/p")
    require_no_appending_nodes(broker)
    assert not (settings.data_dir / "coord").exists(), "looking makes no cluster"
    with open_store(settings, SystemClock()) as store:
        store.commit([Put(f"{NODES}n1@1", NodeInfo("n1", "grpc://h:1", (INGEST,)).encoded())])
        require_no_appending_nodes(broker)
        store.commit([Put(f"{NODES}n2@2", NodeInfo("n2", "grpc://h:2", ROLES, "grpc://h:3").encoded())])
        with pytest.raises(LogBusy, match="n2 take what is appended: drain and stop"):
            require_no_appending_nodes(broker)
        require_no_appending_nodes(settings)  # on the embedded log they do not
        store.commit([Delete(f"{NODES}n2@2")])
        require_no_appending_nodes(broker)
