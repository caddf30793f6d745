"""Nodes one version apart under a stream of rows: the earlier build's are replaced one after the other.

The earlier nodes are real: tests/golden/node-1.tar.xz has the rooms that a node imports, of commit 63d44e24, the last
one before entries named their principal (chain 5). A test cannot take them from git, because a clone may be shallow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import FeatureNotActive, UpgradeRefused
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.coord.cluster_level import cluster_level, finish_upgrade, require_level, upgrade_status
from millrace.demo.cluster import LocalCluster
from millrace.runtime.child_processes import ChildProcess
from tests.crash.kill_rig import ROOT, end_server
from tests.crash.test_cluster_moves import SCHEMA, WAIT, Stream, check, until, wait_flushed

ARCHIVE = ROOT / "tests" / "golden" / "node-1.tar.xz"
PCHANNELS = 4
_KNOWN = "import json; from millrace.base.settings import describe; print(json.dumps([each[1] for each in describe()]))"


class EarlierNode(ChildProcess):
    """A node of the earlier build. Its environment has the settings that this build knows, and no others."""

    def __init__(self, folder: Path, settings: Settings, name: str) -> None:
        code = {"PYTHONPATH": str(folder / "include")}
        asked = [sys.executable, "-c", _KNOWN]
        known = subprocess.run(asked, env={**os.environ, **code}, check=True, capture_output=True, text=True).stdout
        every: Mapping[str, str] = replace(settings, node=name).environment()
        environment = {variable: text for variable, text in every.items() if f'"{variable}"' in known}
        log_file = settings.run_path / f"{name}.log"
        super().__init__([sys.executable, "-m", "millrace.node.cluster"], log_file=log_file, env=environment | code)


@contextmanager
def upgrading(folder: Path) -> Iterator[tuple[Settings, LocalCluster]]:
    settings = Settings(
        data_dir=folder / "data", session_seconds=3.0, balance_interval=1.0, balance_lag=60.0, trigger_interval=0.5,
        flush_interval=1.0, pchannels=PCHANNELS, publish=False,
    )  # fmt: skip
    settings.run_path.mkdir(parents=True)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder / "earlier", filter="data")
    try:
        with LocalCluster(settings) as cluster:
            yield settings, cluster
    finally:
        end_server(settings)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_are_upgraded_one_by_one_while_rows_come(tmp_path: Path) -> None:
    # The client starts the log server, of this build.
    with upgrading(tmp_path) as (settings, cluster), connect(settings=settings) as client:
        for name in ("n1", "n2"):
            cluster.jobs[name] = EarlierNode(tmp_path / "earlier", settings, name)
        until(lambda: all(cluster.session(name) for name in ("n1", "n2")), cluster)
        cluster.coordinator()
        until(lambda: cluster.store.get("control/level") is not None, cluster)
        client.catalog.ensure_pchannels(PCHANNELS)
        collection = client.catalog.create_collection("rows", SCHEMA, vchannels=PCHANNELS)
        stream = Stream(client, collection)
        stream.start()
        try:
            cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
            wait_flushed(settings, client, cluster)
            assert cluster_level(cluster.store) == 1
            assert upgrade_status(cluster.store).lagging == ["n1", "n2"]
            with pytest.raises(UpgradeRefused, match="n1, n2"):
                finish_upgrade(cluster.store)
            with pytest.raises(FeatureNotActive, match="upgrade finish"):
                require_level(settings, 2, "moves of the tables")

            cluster.jobs["n1"].stop(deadline=30.0)
            cluster.node("n1")
            until(lambda: upgrade_status(cluster.store).nodes.get("n1") == 2, cluster)
            cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
            wait_flushed(settings, client, cluster)  # by an earlier and a new node, in one log
            assert upgrade_status(cluster.store).nodes == {"n1": 2, "n2": 1}
            assert len(client.collection("rows").read()) >= stream.count // 2
            with pytest.raises(UpgradeRefused, match="n2"):
                finish_upgrade(cluster.store)

            cluster.jobs["n2"].stop(deadline=30.0)
            cluster.node("n2")
            until(lambda: upgrade_status(cluster.store).nodes.get("n2") == 2, cluster)
            cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
            names = [each.name for each in client.catalog.pchannels()]
            assert {client.connection.describe(name)["chain_version"] for name in names} == {4}
            assert finish_upgrade(cluster.store).level == 2
            for name in names:
                client.catalog.open_term(name)
            assert {client.connection.describe(name)["chain_version"] for name in names} == {5}
            wait_flushed(settings, client, cluster)

            # An earlier node that comes back is given nothing, so it parks nothing.
            cluster.jobs["n3"] = EarlierNode(tmp_path / "earlier", settings, "n3")
            until(lambda: bool(cluster.session("n3")), cluster)
            wait_flushed(settings, client, cluster)
            assert "n3" not in cluster.owners().values()
            cluster.jobs["n3"].stop(deadline=30.0)
        finally:
            stream.stop()
        del cluster.jobs["n3"]
        assert not stream.failed()
        wait_flushed(settings, client, cluster)
        check(settings, client, collection, stream.count)
