"""OpenSearch 2.19: one node on the loopback interface, from its jars alone. It accepts every client of this host.

Acknowledged writes survive its own SIGKILL: it syncs its translog before each answer. It has the core's analysers,
aggregations, external versions and dynamic mappings, and reindex's delete and update by query. It has neither scripts
nor security.
"""

from __future__ import annotations

import http.client
import subprocess
from importlib.resources import files
from typing import Final

from millrace.base.errors import InvalidSettings
from millrace.brokers.jars import broker_jars
from millrace.brokers.server import TEMPORARY, LocalServer, java_command
from millrace.runtime.java import find_java

_PLUGINS: Final = "org.opensearch.transport.Netty4Plugin,org.opensearch.index.reindex.ReindexPlugin"
_SOURCE: Final = "OpenSearchNode.java"
_LOOK_SECONDS: Final = 60.0


class OpenSearchServer(LocalServer):
    """A single-node OpenSearch over the folder `data`."""

    port_names = ("client", "transport")

    heap = "448m"

    @property
    def url(self) -> str:
        """The URL for clients, and for a pipeline's `sink.hosts`."""
        return f"http://{self.address}"

    def ready(self) -> bool:
        """Return whether its cluster accepts writes: all of its indexes are available."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port["client"], timeout=5.0)
        try:
            connection.request("GET", "/_cluster/health?wait_for_status=yellow&timeout=2s")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def prepare(self) -> list[str]:
        jars = broker_jars("opensearch", self._settings)
        _needs_compiler()
        source = self.data / _SOURCE
        source.write_text((files("millrace.brokers") / _SOURCE).read_text(encoding="utf-8"), encoding="utf-8")
        settings = {
            "node.name": "one",
            "cluster.name": "millrace",
            "discovery.type": "single-node",
            "network.host": "127.0.0.1",
            "http.port": str(self.port["client"]),
            "transport.port": str(self.port["transport"]),
            "node.processors": "2",
            # A test machine's disk may be nearly full; tests of read-only indexes set them explicitly.
            "cluster.routing.allocation.disk.threshold_enabled": "false",
        } | self._properties
        options = ["-Dlog4j2.level=WARN", "-Dopensearch.set.netty.runtime.available.processors=false"]
        return [
            *java_command(jars, heap=self._heap, main=str(source), temporary=self.data / TEMPORARY, options=options),
            *(str(self.data / "home"), _PLUGINS),
            *(f"{name}={value}" for name, value in settings.items()),
        ]


def _needs_compiler() -> None:
    """Raise InvalidSettings if this Java includes no compiler: Debian's runtimes do, some others do not."""
    java = find_java()
    modules = subprocess.run(
        [java / "bin" / "java", "--list-modules"], capture_output=True, text=True, timeout=_LOOK_SECONDS, check=False
    )
    if "jdk.compiler@" not in modules.stdout:
        raise InvalidSettings(
            f"A small Java program starts OpenSearch, and the Java in {java} has no compiler. Install a JDK"
            " (Debian, Ubuntu: `sudo apt-get install openjdk-17-jdk-headless`) or set JAVA_HOME to one"
        )
