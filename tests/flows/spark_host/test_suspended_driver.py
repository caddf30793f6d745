"""A stream's driver that sleeps with a put of its journal on the way, while another machine continues the stream."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.wire import TOKEN_VARIABLE
from millrace.runtime.child_processes import ChildProcess
from tests.crash.kill_rig import end_server
from tests.crash.test_cluster_moves import on_kafka
from tests.s3_server import Faults, bucket
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

DECLARATION = """
flows:
  - name: copied
    source: {kind: collection, collection: numbers}
    sink: {kind: collection, collection: copied, create: true}
"""


class Put:
    """The first journal of the first driver, which does not reach the store before :meth:`release`."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self._let_go = threading.Event()
        self.sender: ChildProcess | None = None

    def __call__(self, method: str, path: str) -> str:
        if method == "PUT" and path.endswith("/millrace-sink/batch.arrow") and not self.held.is_set():
            assert self.sender is not None
            os.kill(self.sender.pid, signal.SIGSTOP)
            self.held.set()
            self._let_go.wait(300)
        return ""

    def release(self) -> None:
        assert self.sender is not None
        self._let_go.set()
        os.kill(self.sender.pid, signal.SIGCONT)


def driver(settings: Settings, folder: Path) -> ChildProcess:
    env = {
        **settings.environment(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "MILLRACE_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, str(ROOT.parent / "jobs" / "stream.py"), "copied"]
    return ChildProcess(command, log_file=folder / "driver.log", env=env)


def test_a_put_that_arrives_after_another_driver_took_over_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-all-machines-have")
    file = tmp_path / "flows.yaml"
    file.write_text(DECLARATION, encoding="utf-8")
    with Faults() as faults, bucket(monkeypatch, faults.at) as uri:
        home = Settings(
            data_dir=tmp_path / "home", tables=f"{uri}/tables", log=on_kafka(), pchannels=1, session_seconds=2.0,
            meta_store=f"sqlite:///{tmp_path}/meta.db", spark_cores=1, flow_declarations=str(file),
        )  # fmt: skip
        machines = {name: replace(home, data_dir=tmp_path / name) for name in ("first", "second")}
        for settings in machines.values():
            settings.run_path.mkdir(parents=True)
        put = faults.break_request = Put()
        drivers: list[ChildProcess] = []
        try:
            with connect(settings=home) as db:
                db.create_collection("numbers", {"id": "int64"}, key="id")

                def send(ids: range) -> None:
                    db["numbers"].insert([{"id": each} for each in ids])
                    ingest_to_end(home, db.log)

                def copied() -> list[int]:
                    ingest_to_end(home, db.log)
                    return sorted(db["copied"].read()["id"].to_pylist())

                send(range(300))
                put.sender = driver(machines["first"], tmp_path / "first")
                drivers.append(put.sender)
                until(lambda: put.held.is_set() or not drivers[0].running(), "the first one journals", seconds=150)
                assert put.held.is_set(), drivers[0].tail()
                drivers.append(driver(machines["second"], tmp_path / "second"))
                until(lambda: len(copied()) >= 300 or not drivers[1].running(), "the second goes on", seconds=150)
                assert drivers[1].running(), drivers[1].tail()
                put.release()
                until(lambda: not drivers[0].running(), "the first one ends", seconds=90)
                assert "StreamBusy: another driver writes to 'copied'" in drivers[0].tail(500)
                send(range(300, 400))
                until(lambda: len(copied()) >= 400, "the second still runs", seconds=90)
                assert copied() == list(range(400))
        finally:
            for each in drivers:
                if each.running():
                    os.kill(each.pid, signal.SIGCONT)
                each.stop(deadline=30)
            for settings in (home, *machines.values()):
                end_server(settings)
