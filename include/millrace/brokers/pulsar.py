"""Pulsar: its standalone, broker and bookie in one process with RocksDB for metadata, on the loopback interface.

It accepts every client of this host. Acknowledged messages are synced and survive its own SIGKILL. Ledgers are small,
so that truncation frees space soon, and entries may be as large as in the embedded log.
"""

from __future__ import annotations

import http.client
from typing import Final

from millrace.brokers.jars import broker_jars
from millrace.brokers.server import TEMPORARY, LocalServer, java_command
from millrace.message.log_entries import DEFAULT_MAX_ENTRY_BYTES

_MAIN: Final = "org.apache.pulsar.PulsarStandaloneStarter"
_OPENED: Final = (
    "java.base/jdk.internal.loader",
    "java.base/java.lang",
    "java.base/java.io",
    "java.base/java.util.zip",
    "java.base/sun.net",
    "java.base/jdk.internal.misc",
    "java.base/java.nio",
    "java.base/jdk.internal.platform",
    "java.management/sun.management",
    "jdk.management/com.sun.management.internal",
)
"""Java packages that BookKeeper and Netty access by reflection."""

_LOGGING: Final = (
    '<Configuration status="WARN">'
    '<Appenders><Console name="c"><PatternLayout pattern="%d %p %c{1} %m%n"/></Console></Appenders>'
    '<Loggers><Root level="WARN"><AppenderRef ref="c"/></Root>'
    # Silences one line for every new ledger, which says that a single host has no rack.
    '<Logger name="org.apache.bookkeeper.client.TopologyAwareEnsemblePlacementPolicy" level="ERROR"/>'
    "</Loggers></Configuration>\n"
)
_MESSAGE_ROOM: Final = 1 << 20


class PulsarBroker(LocalServer):
    """A Pulsar standalone over the folder `data`."""

    port_names = ("client", "admin")

    heap = "384m"

    @property
    def namespace_url(self) -> str:
        """The URL of its namespace for Millrace; a prefix may be appended."""
        return f"pulsar://{self.address}/millrace/log"

    @property
    def admin_url(self) -> str:
        """The URL of its admin API."""
        return f"http://127.0.0.1:{self.port['admin']}"

    @property
    def url(self) -> str:
        return f"{self.namespace_url}?admin={self.admin_url}&max_entry_bytes={DEFAULT_MAX_ENTRY_BYTES}"

    def ready(self) -> bool:
        """Return whether a message passes through it: its own health check sends one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port["admin"], timeout=5.0)
        try:
            connection.request("GET", "/admin/v2/brokers/health")
            return connection.getresponse().read() == b"ok"
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def prepare(self) -> list[str]:
        jars = broker_jars("pulsar", self._settings)
        configuration, logging = self.data / "standalone.conf", self.data / "log4j2.xml"
        configuration.write_text(
            "".join(f"{name}={value}\n" for name, value in self._configuration().items()), encoding="utf-8"
        )
        logging.write_text(_LOGGING, encoding="utf-8")
        options = [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED]
        options += [f"-XX:MaxDirectMemorySize={self._heap}", "-Dio.netty.tryReflectionSetAccessible=true"]
        options += [f"-Dlog4j.configurationFile={logging}"]
        return [
            *java_command(jars, heap=self._heap, main=_MAIN, temporary=self.data / TEMPORARY, options=options),
            *("--config", str(configuration), "--no-functions-worker", "--no-stream-storage"),
            *("--advertised-address", "127.0.0.1"),
            *("--metadata-dir", str(self.data / "metadata"), "--bookkeeper-dir", str(self.data / "bookkeeper")),
        ]

    def _configuration(self) -> dict[str, str]:
        largest = DEFAULT_MAX_ENTRY_BYTES + _MESSAGE_ROOM
        return {
            "clusterName": "standalone",
            "advertisedAddress": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "brokerServicePort": str(self.port["client"]),
            "webServicePort": str(self.port["admin"]),
            # Keeps the bookie, which chooses its port itself, off the other interfaces.
            "allowLoopback": "true",
            "listeningInterface": "lo",
            "managedLedgerDefaultEnsembleSize": "1",
            "managedLedgerDefaultWriteQuorum": "1",
            "managedLedgerDefaultAckQuorum": "1",
            "managedLedgerCacheSizeMB": "32",
            "managedLedgerMaxSizePerLedgerMbytes": "64",
            "managedLedgerMinLedgerRolloverTimeMinutes": "0",
            "maxMessageSize": str(largest),
            "nettyMaxFrameSizeBytes": str(largest + _MESSAGE_ROOM),
            # Nothing after the snapshot of deduplication is deleted, so frequent snapshots free ledgers soon.
            "brokerDeduplicationSnapshotFrequencyInSeconds": "5",
            "brokerDeduplicationSnapshotIntervalSeconds": "5",
            "dbStorage_writeCacheMaxSizeMb": "32",
            "dbStorage_readAheadCacheMaxSizeMb": "16",
            "diskUsageThreshold": "0.99",
            "diskUsageWarnThreshold": "0.99",
            "loadBalancerEnabled": "false",
            "numIOThreads": "2",
            "numHttpServerThreads": "8",
            "brokerDeleteInactiveTopicsEnabled": "false",
            "systemTopicEnabled": "false",
            "topicLevelPoliciesEnabled": "false",
        } | self._properties
