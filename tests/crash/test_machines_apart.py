"""Machines that share a broker, a meta store and an object store, and no folder: each may go, also the first one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import CollectionExists, MillraceError
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.brokers.etcd import EtcdServer
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.versitygw import VersityGateway
from millrace.client.database import connect
from millrace.demo.cluster import LocalCluster
from millrace.operations.verification import verify_collections
from millrace.rpc.wire import TOKEN_VARIABLE
from millrace.runtime.child_processes import ChildProcess
from tests.crash.kill_rig import end_server
from tests.crash.test_cluster_moves import PCHANNELS, SCHEMA, WAIT, Stream, until, wait_flushed
from tests.network_namespaces import Machine, machines, require_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


class Machines:
    """This machine and others, each with a data folder and a cache that no other sees."""

    def __init__(self, folder: Path, shared: Settings, away: list[Machine]) -> None:
        self._folder = folder
        self._shared = shared
        self.away = away
        self.jobs: dict[str, ChildProcess] = {}

    def settings(self, name: str, host: str = "") -> Settings:
        return replace(self._shared, data_dir=self._folder / name / "data", log_host=host or self.away[0].home)

    def start(self, name: str, command: list[str], machine: Machine) -> None:
        settings = replace(self.settings(f"machine{machine.number}", machine.host), node=name)
        home = settings.data_dir.parent
        settings.run_path.mkdir(parents=True, exist_ok=True)
        settings.data_dir.chmod(0o700)
        others = [path for path in self._folder.iterdir() if path != home and path.is_dir()]
        within = machine.within(home, hidden=others)
        env = {**settings.environment(), "MILLRACE_CACHE": str(home / "cache"), "PYTHONPATH": ":".join(sys.path)}
        log_file = self._folder / f"{name}.log"
        self.jobs[name] = ChildProcess([*within, sys.executable, *command], log_file=log_file, env=env)

    def stop(self) -> None:
        """Stop everything that runs on the other machines."""
        for job in self.jobs.values():
            job.stop(deadline=20)
        for machine in self.away:
            end_server(self.settings(f"machine{machine.number}"))

    def node(self, name: str, machine: Machine) -> None:
        self.start(name, ["-m", "millrace.node.cluster"], machine)


@contextmanager
def apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    require_namespaces()
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-all-machines-have")
    base = Settings(data_dir=folder / "servers" / "data", session_seconds=3.0, balance_interval=1.0, balance_lag=60.0)
    base.data_dir.mkdir(parents=True, mode=0o700)
    with machines(3) as away, ExitStack() as stack:
        store = stack.enter_context(VersityGateway(folder / "servers" / "s3", settings=base, host=away[0].home))
        for name, value in store.client_environment.items():
            monkeypatch.setenv(name, value)
        etcd = stack.enter_context(EtcdServer(folder / "servers" / "etcd", settings=base, host=away[0].home))
        kafka = stack.enter_context(KafkaBroker(folder / "servers" / "kafka", settings=base, host=away[0].home))
        shared = replace(
            base,
            tables=f"{store.url}/{folder.name}",
            log=kafka.url,
            meta_store=etcd.url,
            pchannels=PCHANNELS,
            trigger_interval=0.5,
            flush_interval=1.0,
        )
        made = Machines(folder, shared, away)
        try:
            yield made
        finally:
            made.stop()


def test_every_machine_may_go_and_every_row_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with apart(tmp_path, monkeypatch) as all_, ExitStack() as opened:
        first, second = all_.settings("first"), all_.settings("second")
        for each in (first, second):
            opened.callback(end_server, each)
        client = opened.enter_context(connect(settings=first))
        client.catalog.ensure_pchannels(PCHANNELS)
        collection = client.catalog.create_collection("rows", SCHEMA, vchannels=PCHANNELS)
        all_.start("c1", ["-m", "millrace.service", "--name", "c1"], all_.away[2])
        for number, name in enumerate(("n1", "n2")):
            all_.node(name, all_.away[number])
        with LocalCluster(first) as cluster:
            cluster.jobs = all_.jobs
            cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
            stream = Stream(client, collection)
            stream.start()
            try:
                wait_flushed(first, client, cluster)
                all_.away[0].cut_off()
                cluster.wait_owned({"n2"}, pchannels=PCHANNELS, deadline=WAIT)
                wait_flushed(first, client, cluster)
                all_.away[0].join()
                cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
                wait_flushed(first, client, cluster)
            finally:
                stream.stop()
            assert not stream.failed()
            # The first machine goes in the middle of DDL, with all that lies there; another one completes it.
            monkeypatch.setenv(VARIABLE, "ddl.sent")
            end_server(first)
            count = stream.count
            client.close()
            with connect(settings=replace(first, start_deadline=8.0)) as dying, pytest.raises(MillraceError):
                dying.catalog.create_collection("more", SCHEMA, vchannels=PCHANNELS)
            monkeypatch.delenv(VARIABLE)
            end_server(first)
            shutil.rmtree(first.data_dir)
            other = opened.enter_context(connect(settings=second))
            until(lambda: "more" in {each.name for each in other.catalog.collections()}, cluster)
            with pytest.raises(CollectionExists):
                other.catalog.create_collection("more", SCHEMA, vchannels=PCHANNELS)
            # A node's machine goes, and a new one comes in its place, with nothing.
            all_.jobs.pop("n1").kill()
            shutil.rmtree(tmp_path / "machine0")
            cluster.wait_owned({"n2"}, pchannels=PCHANNELS, deadline=WAIT)
            all_.node("n3", all_.away[0])
            cluster.wait_owned({"n2", "n3"}, pchannels=PCHANNELS, deadline=WAIT)
            stream = Stream(other, other.catalog.collection("rows"), begin=count)
            stream.start()
            until(lambda: stream.count > count + 200 or stream.failed(), cluster)
            stream.stop()
            wait_flushed(second, other, cluster)
            all_.stop()
            rows = other.collection("rows").read(columns=["id"])["id"].to_pylist()
            assert sorted(rows) == list(range(stream.count))
            reports = verify_collections(second)
            assert all(each.ok for each in reports.values())
            assert reports[collection.id].stored == stream.count, "rows are in the table twice"
