"""Spark's standalone cluster: a master, and workers that each may be on a machine, or in a namespace, of their own."""

from __future__ import annotations

import http.client
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from millrace.base.settings import Settings
from millrace.brokers.server import LOOPBACK, LocalServer
from millrace.runtime.java import find_java

DAEMON_MEMORY = "256m"


def spark_home() -> Path:
    """Return the folder of the installed pyspark, which holds a whole Spark."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class _SparkServer(LocalServer):
    port_names = ("client", "web")
    heap = ""
    home: Path = spark_home()
    """Spark's folder as the process sees it."""

    @property
    def server_environment(self) -> dict[str, str]:
        return {
            "SPARK_HOME": str(self.home),
            "JAVA_HOME": str(find_java()),
            "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
            "SPARK_LOCAL_IP": self.host,
        }

    def _command(self, kind: str, *arguments: str) -> list[str]:
        ports = ["--host", self.host, "--port", str(self.port["client"]), "--webui-port", str(self.port["web"])]
        main = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
        return [str(self.home / "bin" / "spark-class"), main, *ports, *arguments]


class SparkMaster(_SparkServer):
    """The master. Its workers and applications are in its folder: one that starts again continues with them."""

    @property
    def url(self) -> str:
        """The URL for the setting `spark_master`."""
        return f"spark://{self.address}"

    @property
    def server_environment(self) -> dict[str, str]:
        recovery = {"recoveryMode": "FILESYSTEM", "recoveryDirectory": str(self.data / "recovery")}
        options = " ".join(f"-Dspark.deploy.{name}={value}" for name, value in recovery.items())
        return {**super().server_environment, "SPARK_MASTER_OPTS": options}

    def prepare(self) -> list[str]:
        return self._command("Master")

    def workers(self) -> int:
        """Return how many workers it has."""
        connection = http.client.HTTPConnection(self.host, self.port["web"], timeout=5.0)
        try:
            connection.request("GET", "/json/")
            return int(json.loads(connection.getresponse().read())["aliveworkers"])
        finally:
            connection.close()


class SparkWorker(_SparkServer):
    """A worker with its executors' folders in `data`. `within` is a command that runs another, such as ip-netns."""

    def __init__(
        self,
        data: Path,
        *,
        master: str,
        cores: int = 1,
        memory: str = "2g",
        host: str = LOOPBACK,
        within: Sequence[str] = (),
        settings: Settings | None = None,
    ) -> None:
        super().__init__(data, settings=settings, host=host)
        self._size = ("--cores", str(cores), "--memory", memory)
        self._master = master
        self._within = within

    @property
    def url(self) -> str:
        return f"spark-worker://{self.address}"

    def prepare(self) -> list[str]:
        work = str(self.data / "work")
        return [*self._within, *self._command("Worker", *self._size, "--work-dir", work, self._master)]
