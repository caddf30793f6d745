"""The tables move to a real S3 and back, killed at each step, while producers, a node and the flusher work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings, following
from millrace.base.settings.place import read_place
from millrace.brokers.versitygw import VersityGateway
from millrace.client.database import Database
from millrace.demo.cluster import LocalCluster
from millrace.operations.verification import verify_collections
from millrace.storage.store import list_below, store_at
from tests.crash.kill_rig import ROOT
from tests.crash.test_cluster_moves import WAIT, check, streaming, wait_flushed

PCHANNELS = 2
POINTS = [
    "move.claimed", "move.file", "move.file@4", "move.pass", "move.closing", "move.closed", "move.closed@3",
    "move.copied", "move.switched",
]  # fmt: skip


@contextmanager
def kept_running(cluster: LocalCluster, name: str) -> Iterator[None]:
    """Start the node again whenever it ends, as a supervisor does."""
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(0.2):
            if not cluster.jobs[name].running():
                cluster.node(name)

    cluster.node(name)
    thread = threading.Thread(target=keep, name="supervisor")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def move(settings: Settings, *, point: str = "", **params: object) -> dict[str, object]:
    """Run the operation as its job does; with `point`, it is killed there."""
    result = settings.run_path / "move.result.json"
    result.unlink(missing_ok=True)
    environment = {**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT / "include"), VARIABLE: point}
    environment = {name: text for name, text in environment.items() if name != VARIABLE or point}
    command = [sys.executable, "-m", "millrace.operations", "move", "--params", json.dumps(params)]
    ran = subprocess.run(
        [*command, "--result", str(result)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if point:
        assert ran.returncode == -signal.SIGKILL, ran.stderr
        return {}
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(result.read_text())["report"]
    return found


def forget_pins(tables: str) -> None:
    """Remove the pins of the killed moves, which would hold their files for five more minutes."""
    store = store_at(f"{tables}/pins")
    store.delete(store.list(""))


def whole(settings: Settings, client: Database, count: int) -> None:
    ids = client.collection("rows").read()["id"].to_pylist()
    assert sorted(ids)[:count] == list(range(count))
    assert len(set(ids)) == len(ids), "a row is there twice"
    assert all(each.matches_flushed for each in verify_collections(settings).values())


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first one of a machine builds versitygw
def test_tables_move_to_a_store_and_back_and_every_row_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    with VersityGateway(tmp_path / "s3", settings=Settings.load(env={})).start() as s3:
        for name, value in s3.client_environment.items():
            monkeypatch.setenv(name, value)
        with streaming(tmp_path, PCHANNELS, publish=False) as (loaded, client, collection, cluster, stream):
            settings = following(loaded)
            cluster.coordinator()
            with kept_running(cluster, "n1"):
                cluster.wait_owned({"n1"}, pchannels=PCHANNELS, deadline=WAIT)
                wait_flushed(settings, client, cluster)
                for to in (f"{s3.url}/tables", str(settings.data_dir)):
                    for point in POINTS:
                        move(settings, point=point, to=to)
                        assert not stream.failed()
                    report = move(settings, to=to)
                    place = read_place(settings.data_dir)
                    assert place is not None
                    assert (place.target, place.closed) == (None, False)
                    assert settings.tables_uri == (to if "://" in to else str(settings.data_dir)) == report["target"]
                    count = stream.count
                    wait_flushed(settings, client, cluster)
                    whole(settings, client, count)
                    forget_pins(place.earlier[-1] or str(settings.data_dir))
                    assert move(settings, remove_old=True)["removed_files"] != 0
                    wait_flushed(settings, client, cluster)
                assert not list_below(store_at(f"{s3.url}/tables"))
                stream.stop()
                assert not stream.failed()
                assert max(stream.waited) < 10.0, "producers wait for nothing but the machine"
                wait_flushed(settings, client, cluster)
                check(settings, client, collection, stream.count)
