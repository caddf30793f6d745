"""``pipeline-config.yaml``: the addresses of the service, and defaults for fields that a pipeline leaves out.

Names and defaults are those of reference document 004, sections 5.1 and 7.1. docs/pipelines.md says where each applies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from millrace.base.errors import InvalidSettings
from millrace.flows.declare.part import Part, Secret, expanded, problems_of

MAX_BYTES = 1 << 20


class Server(Part):
    """``server:``"""

    httpPort: int = Field(default=13012, ge=1, le=65535)
    flushMiB: float = Field(default=5, ge=0.001, le=100)
    flushItems: int = Field(default=10_000, ge=1, le=1_000_000)
    flushIntervalSec: float = Field(default=3, ge=0.01, le=3600)
    failureThreshold: int = Field(default=10, ge=1, le=1_000_000)
    watchWorkersIntervalMin: float = Field(default=5, ge=0.001, le=1440)


class Kafka(Part):
    """``kafka:``"""

    sessionTimeoutMs: int = Field(default=45_000, ge=1, le=3_600_000)
    socketTimeoutMs: int = Field(default=60_000, ge=10, le=300_000)
    maxPollIntervalMs: int = Field(default=300_000, ge=1, le=86_400_000)
    autoOffsetReset: Literal["earliest", "latest", "error"] = "earliest"


class Mq(Part):
    """``mq:`` the default brokers of pipelines."""

    mqHost: str = Field(default="", max_length=253, pattern=r"^[A-Za-z0-9_.:-]*$")
    mqPort: int = Field(default=9097, ge=1, le=65535)
    username: str = Field(default="", max_length=256)
    password: Secret = Secret("")
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    tls: bool = False


class Log(Part):
    """``log:``"""

    logLevel: Literal["debug", "info", "warn", "error"] = "info"
    developMode: bool = Field(default=False, description="plain lines instead of JSON, at the debug level")
    maxAge: int = Field(default=100, ge=0, le=100_000, description="days that a rotated file is retained")
    maxBackups: int = Field(default=20, ge=0, le=100_000, description="rotated files that are retained")
    maxSize: int = Field(default=100, ge=1, le=100_000, description="MB of a file before it is rotated")


class Reach(Part):
    """``reach:`` the addresses and folders that declarations may use. Optional; not in the reference document."""

    hosts: tuple[str, ...] = Field(
        default=(),
        max_length=1000,
        description="names (*.svc.cluster.local) and networks (10.0.0.0/8) to allow; empty: all but link-local",
    )
    folders: tuple[str, ...] = Field(
        default=(),
        max_length=1000,
        description="folders of the machine whose files flows may read and write; empty: none",
    )


class Configuration(Part):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: Server = Field(default_factory=Server)
    kafka: Kafka = Field(default_factory=Kafka)
    mq: Mq = Field(default_factory=Mq)
    log: Log = Field(default_factory=Log)
    reach: Reach = Field(default_factory=Reach)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file, with ``${env:NAME}`` from the environment. Raises InvalidSettings, naming each wrong key."""
        return cls.parse(expanded(read_yaml(path)), where=path.name)

    @classmethod
    def parse(cls, value: Any, *, where: str = "pipeline-config.yaml") -> Self:
        """Check the contents of such a file. Raises InvalidSettings, naming each wrong key."""
        try:
            return cls.model_validate({} if value is None else value)
        except ValidationError as error:
            wrong = "; ".join(f"{each.field or 'the file'}: {each.message}" for each in problems_of(error, value))
            raise InvalidSettings(f"{where}: {wrong}") from None

    def with_defaults(self, declared: dict[str, Any]) -> dict[str, Any]:
        """Return a declaration (JSON) with this file's values for the fields that it leaves out."""
        server, kafka = self.server, self.kafka
        found = {"failure_threshold": server.failureThreshold, **declared}
        flush = {"mib": server.flushMiB, "items": server.flushItems, "seconds": server.flushIntervalSec}
        found["flush"] = _over(flush, declared.get("flush"))
        found["recovery"] = _over({"interval_minutes": server.watchWorkersIntervalMin}, declared.get("recovery"))
        source = declared.get("source")
        if isinstance(source, dict) and source.get("kind") == "kafka":
            found["source"] = {
                "session_timeout_ms": kafka.sessionTimeoutMs,
                "socket_timeout_ms": kafka.socketTimeoutMs,
                "max_poll_interval_ms": kafka.maxPollIntervalMs,
                "offset_reset": kafka.autoOffsetReset,
                **({} if "bootstrap" in source else self.brokers()),
                **source,
            }
        errors = declared.get("errors")
        if errors is None or isinstance(errors, dict):
            alone = isinstance(source, dict) and source.get("kind") != "kafka"
            found["errors"] = self._errors(errors or {}, alone=alone)
        sink = declared.get("sink")
        if isinstance(sink, dict) and sink.get("kind") == "kafka":
            ours = {} if "bootstrap" in sink else self.brokers()
            found["sink"] = {"socket_timeout_ms": kafka.socketTimeoutMs, **ours, **sink}
        return found

    def _errors(self, declared: dict[str, Any], *, alone: bool) -> dict[str, Any]:
        """Return the errors' declaration with the brokers' time-out, if the error topic has brokers of its own.

        If the source has no brokers (`alone`) and the error topic names none, use those of `mq`.
        """
        cluster, ours = declared.get("cluster"), self.brokers()
        if not isinstance(cluster, dict) and not (cluster is None and alone and ours):
            return declared
        named = cluster or {}
        known = {} if "bootstrap" in named else ours
        return {**declared, "cluster": {"socket_timeout_ms": self.kafka.socketTimeoutMs, **known, **named}}

    def brokers(self) -> dict[str, Any]:
        """Return `mq` in the form of a KafkaCluster's declaration; empty if it names no host."""
        mq = self.mq
        if not mq.mqHost:
            return {}
        security: dict[str, Any] = {"protocol": "SSL" if mq.tls else "PLAINTEXT"}
        if mq.username:
            security = {
                "protocol": "SASL_SSL" if mq.tls else "SASL_PLAINTEXT",
                "mechanism": mq.mechanism,
                "username": mq.username,
                "password": mq.password.get_secret_value(),
            }
        return {"bootstrap": [f"{mq.mqHost}:{mq.mqPort}"], "security": security}


def sealed(token: bytes) -> str:
    """Return the spelling of an encrypted secret in a file."""
    return f"${{sealed:{token.decode()}}}"


def read_yaml(path: Path) -> Any:
    """Return the contents of a YAML (or JSON) file as plain values. Raises InvalidSettings."""
    import yaml

    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidSettings(f"{path.name} is larger than {MAX_BYTES >> 20} MiB")
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InvalidSettings(f"{path.name} is not YAML: {' '.join(str(error).split())}") from None


def _over(defaults: dict[str, Any], declared: Any) -> Any:
    if declared is None:
        return defaults
    return {**defaults, **declared} if isinstance(declared, dict) else declared
