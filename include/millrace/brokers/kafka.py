"""Kafka: one node in KRaft mode, broker and controller in one process, on the loopback interface.

Without ``sasl`` it accepts every client of this host. With it, clients use SASL/PLAIN as user "millrace", with a
password that is generated once and stored in the data folder, readable by its owner only (`credentials`). Acknowledged
records survive its own SIGKILL. Like every Kafka it leaves the fsync to the operating system, so a power loss may lose
the end of the log.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.jars import broker_jars
from millrace.brokers.server import LOOPBACK, TEMPORARY, LocalServer, java_command

USER: Final = "millrace"
CLUSTER: Final = "bWlsbHJhY2UtYnJva2VyMQ"
"""Any 16 bytes in base64: the cluster has one node."""

_QUIET: Final = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true")
_SECRET: Final = "password"
_FORMAT_SECONDS: Final = 60.0


class KafkaCredentials(NamedTuple):
    """The login of a client for a broker with SASL."""

    username: str
    password: str

    def environment(self) -> dict[str, str]:
        """Return the environment variables that pass the login to Millrace's processes."""
        return {"MILLRACE_LOG_USERNAME": self.username, "MILLRACE_LOG_PASSWORD": self.password}


class KafkaBroker(LocalServer):
    """A single-node Kafka over the folder `data`."""

    port_names = ("client", "controller")

    heap = "320m"

    def __init__(
        self,
        data: Path,
        *,
        settings: Settings | None = None,
        heap: str = "",
        properties: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
        sasl: bool = False,
    ) -> None:
        """With `sasl`, clients log in by SASL/PLAIN. The other parameters are those of `LocalServer`."""
        super().__init__(data, settings=settings, heap=heap, properties=properties, host=host)
        self._sasl = sasl

    @property
    def url(self) -> str:
        return f"kafka://{self.address}/millrace{self.options}"

    @property
    def options(self) -> str:
        """The query string that a URL of this broker needs."""
        return "?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN" if self._sasl else ""

    @property
    def credentials(self) -> KafkaCredentials | None:
        """The login of clients; None if the broker requires none."""
        return KafkaCredentials(USER, self._password()) if self._sasl else None

    def prepare(self) -> list[str]:
        jars = broker_jars("kafka", self._settings)
        path = self.data / "server.properties"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.writelines(f"{name}={value}\n" for name, value in self._server_properties().items())
        if not (self.data / "logs" / "meta.properties").exists():
            self._format(jars, path)
        temporary = self.data / TEMPORARY
        command = java_command(jars, heap=self._heap, main="kafka.Kafka", temporary=temporary, options=_QUIET)
        return [*command, str(path)]

    def _format(self, jars: list[str], path: Path) -> None:
        temporary = self.data / TEMPORARY
        command = java_command(jars, heap="128m", main="kafka.tools.StorageTool", temporary=temporary, options=_QUIET)
        done = subprocess.run(
            [*command, "format", "-t", CLUSTER, "-c", str(path)],
            capture_output=True, text=True, timeout=_FORMAT_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise InvalidSettings(
                f"Kafka's storage cannot be formatted in {self.data}: {(done.stdout + done.stderr)[-1000:]}"
            )

    def _server_properties(self) -> dict[str, str]:
        client, controller = (f"{self.host}:{self.port[name]}" for name in self.port_names)
        protocol = "SASL_PLAINTEXT" if self._sasl else "PLAINTEXT"
        found = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"CLIENT://{client},CONTROLLER://{controller}",
            "advertised.listeners": f"CLIENT://{client}",
            "listener.security.protocol.map": f"CLIENT:{protocol},CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "CLIENT",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.data / "logs"),
            "auto.create.topics.enable": "false",
            "message.max.bytes": str(64 << 20),
            # Internal topics of a single node, with few partitions: Kafka creates them at a group's first use.
            "offsets.topic.num.partitions": "2",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "2",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "2",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A consumer group that pauses for longer than a week must still find its position.
            "offsets.retention.minutes": str((1 << 31) - 1),
            "num.network.threads": "2",
            "num.io.threads": "4",
            "background.threads": "2",
            "log.cleaner.dedupe.buffer.size": str(4 << 20),
            "log.index.size.max.bytes": str(1 << 20),
            "log.retention.check.interval.ms": "10000",
            "log.segment.delete.delay.ms": "1000",
            # After a SIGKILL the broker can register again only when its old registration has expired.
            "broker.session.timeout.ms": "4000",
            "broker.heartbeat.interval.ms": "500",
            # A clean stop need not wait until another node takes over.
            "controlled.shutdown.enable": "false",
        }
        if self._sasl:
            found |= {
                "sasl.enabled.mechanisms": "PLAIN",
                "sasl.mechanism.inter.broker.protocol": "PLAIN",
                "listener.name.client.plain.sasl.jaas.config": (
                    "org.apache.kafka.common.security.plain.PlainLoginModule required"
                    f' username="{USER}" password="{self._password()}" user_{USER}="{self._password()}";'
                ),
            }
        return found | self._properties

    def _password(self) -> str:
        path = self.data / _SECRET
        try:
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            self.data.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(24))
            return self._password()
