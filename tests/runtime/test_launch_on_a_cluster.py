"""The setting `spark_master`: the launcher's job submits to Spark's own standalone master, and its tasks run there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.runtime.java import find_java
from millrace.runtime.launch.launcher import Launcher, RunState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


class Daemon:
    """A process of Spark's standalone cluster, with its log."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        spec = importlib.util.find_spec("pyspark")
        assert spec is not None
        assert spec.origin is not None
        home = Path(spec.origin).parent
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name.lower()}.{name}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "SPARK_HOME": str(home),
                    "JAVA_HOME": str(find_java()),
                    "SPARK_DAEMON_MEMORY": "256m",
                    "SPARK_LOCAL_IP": "127.0.0.1",
                },
            )

    def says(self, pattern: str, *, seconds: float = 60.0) -> str:
        """The first group of `pattern` in its log."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self._log.read_text(errors="replace"))) is None:
            assert self._process.poll() is None, self._log.read_text(errors="replace")
            assert time.monotonic() < end, self._log.read_text(errors="replace")
            time.sleep(0.05)
        return match[1]

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A standalone master with one worker; its address."""
    made = [Daemon(tmp_path, "Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")]
    try:
        address = made[0].says(r"Starting Spark master at (spark://\S+)")
        work = str(tmp_path / "work")
        size = ["--cores", "2", "--memory", "1g", "--work-dir", work, "--host", "127.0.0.1", "--webui-port", "0"]
        made.append(Daemon(tmp_path, "Worker", *size, address))
        made[1].says(r"Successfully registered with master (\S+)")
        yield address
    finally:
        for daemon in reversed(made):
            daemon.end()


def test_a_streaming_job_runs_its_tasks_on_the_master(
    settings: Settings, master: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    launcher = Launcher(replace(settings, spark_master=master, spark_memory="512m"))
    with connect(settings=settings) as client:
        try:
            client.catalog.ensure_pchannels(1)
            collection = client.catalog.create_collection("c", SCHEMA)
            client.new_producer().insert(collection, pa.table({"id": list(range(1000))}))
            launcher.start("once", "streaming_node", arguments=["--with-flusher", "--available-now"])
            status = launcher.wait("once", deadline=240)
            assert status.state is RunState.FINISHED, f"{status.error}\n{status.tail(60)}"
            assert client.collection("c").read().num_rows == 1000
        finally:
            launcher.stop("once")
            client.connection.service.shutdown()
    executors = list((tmp_path / "work").glob("app-*/*/stderr"))
    assert executors
    assert "Running task" in "".join(path.read_text(errors="replace") for path in executors)
