"""Nodes one version apart under a stream of rows: the earlier build's are replaced one after the other.

On a disk the nodes share one data folder. On an object store they share the broker, etcd and the bucket alone.

The earlier nodes are real: tests/golden/node-1.tar.xz has the rooms that a node imports, of commit 63d44e24, the last
one before entries named their principal (chain 5). A test cannot take them from git, because a clone may be shallow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import FeatureNotActive, UpgradeRefused
from millrace.base.settings import Settings
from millrace.brokers.versitygw import VersityGateway
from millrace.client.database import connect
from millrace.coord.cluster_level import cluster_level, finish_upgrade, require_level, upgrade_status
from millrace.demo.cluster import LocalCluster
from millrace.rpc.wire import TOKEN_VARIABLE
from millrace.runtime.child_processes import ChildProcess
from tests import running_brokers
from tests.crash.kill_rig import ROOT, end_server
from tests.crash.test_cluster_moves import SCHEMA, WAIT, Stream, check, on_kafka, until, wait_flushed

ARCHIVE = ROOT / "tests" / "golden" / "node-1.tar.xz"
PCHANNELS = 4
_KNOWN = "import json; from millrace.base.settings import describe; print(json.dumps([each[1] for each in describe()]))"


class EarlierNode(ChildProcess):
    """A node of the earlier build. Its environment has the settings that this build knows, and no others."""

    def __init__(self, folder: Path, settings: Settings, name: str, more: Mapping[str, str]) -> None:
        code = {"PYTHONPATH": str(folder / "include")}
        asked = [sys.executable, "-c", _KNOWN]
        known = subprocess.run(asked, env={**os.environ, **code}, check=True, capture_output=True, text=True).stdout
        every: Mapping[str, str] = replace(settings, node=name).environment()
        environment = {variable: text for variable, text in every.items() if f'"{variable}"' in known}
        log_file = settings.run_path / f"{name}.log"
        command = [sys.executable, "-m", "millrace.node.cluster"]
        super().__init__(command, log_file=log_file, env={**environment, **code, **more})


class Upgrade:
    """A cluster whose nodes are of either build."""

    def __init__(self, folder: Path, settings: Settings, cluster: LocalCluster, *, apart: bool) -> None:
        self._folder, self.settings, self.cluster, self._apart = folder, settings, cluster, apart

    def begin(self) -> None:
        for name in ("n1", "n2"):
            self.earlier(name)
        until(lambda: all(self.cluster.session(name) for name in ("n1", "n2")), self.cluster)

    def earlier(self, name: str) -> None:
        self.cluster.jobs[name] = EarlierNode(self._folder / "earlier", self.settings, name, self._own(name))

    def newer(self, name: str) -> None:
        self.cluster.node(name, environment=self._own(name))

    def _own(self, name: str) -> dict[str, str]:
        """Return the folders of the node's machine, if it has some of its own."""
        home = self._folder / name
        folders = {"MILLRACE_DATA": str(home / "data"), "MILLRACE_CACHE": str(home / "cache")}
        return folders if self._apart else {}


@contextmanager
def upgrading(folder: Path, monkeypatch: pytest.MonkeyPatch, *, on_store: bool) -> Iterator[Upgrade]:
    settings = Settings(
        data_dir=folder / "data", session_seconds=3.0, balance_interval=1.0, balance_lag=60.0, trigger_interval=0.5,
        flush_interval=1.0, pchannels=PCHANNELS, publish=False,
    )  # fmt: skip
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder / "earlier", filter="data")
    with ExitStack() as stack:
        if on_store:
            s3 = stack.enter_context(VersityGateway(folder / "s3", settings=settings).start())
            monkeypatch.setenv("MILLRACE_CACHE", str(folder / "cache"))
            monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-all-machines-have")
            for name, value in s3.client_environment.items():
                monkeypatch.setenv(name, value)
            meta = f"{running_brokers.etcd().url}/{uuid.uuid4().hex}"
            settings = replace(settings, tables=f"{s3.url}/{folder.name}", log=on_kafka(), meta_store=meta)
        settings.run_path.mkdir(parents=True)
        for name in ("n1", "n2", "n3") if on_store else ():
            stack.callback(end_server, replace(settings, data_dir=folder / name / "data"))
        stack.callback(end_server, settings)
        with LocalCluster(settings) as cluster:
            yield Upgrade(folder, settings, cluster, apart=on_store)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("on_store", [False, True], ids=["disk", "store"])
def test_nodes_are_upgraded_one_by_one_while_rows_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_store: bool
) -> None:
    with upgrading(tmp_path, monkeypatch, on_store=on_store) as upgrade, ExitStack() as stack:
        settings, cluster = upgrade.settings, upgrade.cluster
        if on_store:  # a process of this build that finds no earlier node finishes the upgrade
            upgrade.begin()
        client = stack.enter_context(connect(settings=settings))
        if not on_store:  # the client has started the log server, of this build
            upgrade.begin()
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
            upgrade.newer("n1")
            until(lambda: upgrade_status(cluster.store).nodes.get("n1") == 2, cluster)
            cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
            wait_flushed(settings, client, cluster)  # by an earlier and a new node, in one log
            assert upgrade_status(cluster.store).nodes == {"n1": 2, "n2": 1}
            assert len(client.collection("rows").read()) >= stream.count // 2
            with pytest.raises(UpgradeRefused, match="n2"):
                finish_upgrade(cluster.store)

            cluster.jobs["n2"].stop(deadline=30.0)
            upgrade.newer("n2")
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
            upgrade.earlier("n3")
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
