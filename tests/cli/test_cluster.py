"""A cluster from the command line: what it shows of nodes and PChannels, and how a node is emptied."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from millrace.base.settings import Settings
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.control import owned_by, read_control_state
from millrace.coord.leadership import LEADER_KEY
from millrace.coord.session import INGEST, NODE_PREFIX, NodeInfo
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import Delete, MetaStore, Put
from tests.cli.deployment import Deployment


@pytest.fixture
def store(deployment: Deployment) -> Iterator[MetaStore]:
    """Of a cluster with a leader, the nodes n1 and n2, and what n1 and n3, which is gone, have."""
    with open_cluster_store(deployment.settings, SystemClock()) as store:
        for name in ("n1", "n2"):
            info = NodeInfo(name, f"grpc://127.0.0.1:{name[1]}", (INGEST,))
            store.commit([Put(f"{NODE_PREFIX}{name}@7", info.encode())])
        mine = (
            ChannelRecord("dml_0", INGEST).begin_assignment("n1@7", "grpc://127.0.0.1:1", "place").complete_assignment()
        )
        lost = (
            ChannelRecord("dml_1", INGEST).begin_assignment("n3@6", "grpc://127.0.0.1:3", "place").complete_assignment()
        )
        store.commit([Put(each.key, each.encode()) for each in (mine, lost)])
        store.commit([Put(LEADER_KEY, json.dumps(["c1", "http://127.0.0.1:1"]).encode())])
        yield store


def test_nodes_and_channels_are_shown_as_they_are(deployment: Deployment, store: MetaStore) -> None:
    nodes = {each["name"]: each for each in deployment.as_json("nodes")}
    assert {name: (each["state"], each["owns"]) for name, each in nodes.items()} == {
        "n1": ("up", ["dml_0"]),
        "n2": ("up", []),
        "n3": ("gone", ["dml_1"]),
    }
    assert "n1@7" in deployment.ok("nodes")
    first = deployment.as_json("channels")[0]
    assert (first["pchannel"], first["role"], first["state"], first["term"], first["node"]) == (
        "dml_0",
        "ingest",
        "assigned",
        1,
        "n1",
    )
    assert "dml_1" in deployment.ok("channels")


def test_a_node_is_drained_and_taken_back(deployment: Deployment, store: MetaStore) -> None:
    assert "dml_0" in deployment.ok("drain", "n1")
    assert read_control_state(store).drains == {"n1"}
    assert {each["name"]: each["state"] for each in deployment.as_json("nodes")}["n1"] == "draining"
    assert "still has dml_0" in deployment.fails("DEADLINE_EXCEEDED", "drain", "n1", "--wait", "0.3")
    record = ChannelRecord("dml_0", INGEST).begin_assignment("n1@7", "", "place").begin_assignment("n2@7", "", "drain")
    store.commit([Put(record.key, record.encode())])
    assert owned_by(store, "n1") == ["dml_0"], "it has not let go yet"
    store.commit([Put(record.key, record.complete_assignment().encode())])
    assert "nothing any more" in deployment.ok("drain", "n1", "--wait", "5")
    assert "again" in deployment.ok("drain", "n1", "--undo")
    assert read_control_state(store).drains == frozenset()


def test_a_node_that_nobody_knows_is_a_typed_error(deployment: Deployment, store: MetaStore) -> None:
    assert "n1, n2" in deployment.fails("NODE_NOT_FOUND", "drain", "n9")
    assert "n1, n2" in deployment.fails("NODE_NOT_FOUND", "drain", "n9", "--undo")
    assert deployment.run("drain", "n2", "--wait", "-1").exit_code == 2
    assert read_control_state(store).drains == frozenset(), "what was asked for in a wrong way is not begun"
    deployment.ok("drain", "n2")
    store.commit([Delete(f"{NODE_PREFIX}n2@7")])
    assert {each["name"]: each["state"] for each in deployment.as_json("nodes")}["n2"] == "drained"
    deployment.ok("drain", "n2", "--undo")


def test_balance_is_frozen_and_allowed_again(deployment: Deployment, store: MetaStore) -> None:
    assert deployment.as_json("balance") == {
        "leader": "c1",
        "service": "http://127.0.0.1:1",
        "balance": "on",
        "draining": [],
        "pchannels": {"n1": 1, "n2": 0, "n3": 1},
    }
    assert deployment.as_json("balance", "off")["balance"] == "off"
    assert read_control_state(store).frozen
    assert deployment.as_json("balance", "on")["balance"] == "on"
    assert not read_control_state(store).frozen


def test_without_a_cluster_looking_makes_none_and_says_how_to_start_one(deployment: Deployment) -> None:
    for command in (["nodes"], ["channels"], ["balance"], ["drain", "n1"]):
        assert "millrace coord" in deployment.fails("INVALID_SETTINGS", *command)
    assert not deployment.settings.data_dir.exists()


def test_coordinator_and_node_run_in_place_of_the_command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: calls.append((arguments[1:], environment)))
    deployment = Deployment(settings)
    deployment.ok("coord", "--name", "c1")
    deployment.ok("node", "n1")
    deployment.ok("node", "n1", "--spark")
    assert [arguments[:2] for arguments, _ in calls[:2]] == [
        ["-m", "millrace.service"],
        ["-m", "millrace.node.cluster"],
    ]
    assert calls[0][0][2:] == ["--name", "c1"]
    assert calls[2][0][1:] == ["--with-flusher"]
    assert [environment["MILLRACE_NODE"] for _, environment in calls] == ["", "n1", "n1"]
    assert "allowed" in deployment.fails("INVALID_SETTINGS", "node", "a node")
