"""What the meta store of a small cluster holds, written by hand."""

from __future__ import annotations

import json

from millrace.coord.channels.record import ChannelRecord
from millrace.coord.leadership import LEADER_KEY
from millrace.coord.session import INGEST, NODE_PREFIX, NodeInfo
from millrace.meta.store import MetaStore, Put


def write_cluster(store: MetaStore) -> None:
    """c1 leads; n1 has dml_0, which was n0's; dml_1's owner was lost."""
    there = (
        ChannelRecord("dml_0", INGEST)
        .begin_assignment("n0@6", "grpc://127.0.0.1:2", "place", 1e9)
        .complete_assignment(1e9 + 1)
    )
    there = there.begin_assignment("n1@7", "grpc://127.0.0.1:1", "drain", 1e9 + 5).complete_assignment(1e9 + 7.5)
    gone = ChannelRecord("dml_1", INGEST).begin_assignment("n1@7", "", "place").mark_unavailable("lost", 1e9 + 9)
    store.commit([Put(each.key, each.encode()) for each in (there, gone)])
    store.commit([Put(f"{NODE_PREFIX}n1@7", NodeInfo("n1", "grpc://127.0.0.1:1", (INGEST,)).encode())])
    store.commit([Put(LEADER_KEY, json.dumps(["c1", "http://127.0.0.1:1"]).encode())])
