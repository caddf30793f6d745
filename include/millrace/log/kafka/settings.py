"""Settings of the Kafka backend, validated before use; credentials from the environment; names of topics.

An option of the log's URL is a field of :class:`KafkaSettings` or, with a dot in its name, a client property
(``security.protocol``, ``sasl.mechanism``, ``ssl.ca.location`` ...) in librdkafka's spelling, for both clients.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Self

from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.message.log_entries import DEFAULT_MAX_ENTRY_BYTES

BATCH_BYTES: Final = 1 << 20
"""Size of one batch on the wire, unless a single entry is larger."""
OVERHEAD_BYTES: Final = 64 << 10
"""Bytes that Kafka's framing may add to a batch."""

_LOCATION: Final = "kafka://host:port[,host:port...][/prefix]"
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PLACE: Final = re.compile(r"[^\s/,]+:\d{1,5}")
_MOST_PARTITIONS: Final = 10_000
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
_ESCAPED: Final = re.compile(r"_([0-9A-F]{2})")
_TOPIC_BYTES: Final = 249
_NUMBERED: Final = re.compile(r"dml_(0|[1-9]\d{0,8})")
"""The coordinator's names of PChannels."""

_CLIENT: Final[dict[str, str]] = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.crl.location": "ssl_crlfile",
    "ssl.endpoint.identification.algorithm": "ssl_check_hostname",
    "client.id": "client_id",
    "socket.timeout.ms": "",
    "socket.keepalive.enable": "",
    "broker.address.family": "",
    "client.dns.lookup": "",
    "compression.type": "",
    "compression.level": "",
    "statistics.interval.ms": "",
}
"""Properties allowed in a URL: librdkafka's name -> kafka-python's ("": not needed). Properties that promises depend on
are missing.
"""


class KafkaPartition(NamedTuple):
    """The partition of one PChannel."""

    topic: str
    partition: int = 0

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True)
class KafkaCredentials:
    """The login: MILLRACE_LOG_USERNAME and MILLRACE_LOG_PASSWORD. Never in a URL, never displayed."""

    username: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of_environment(cls) -> Self:
        return cls(*(os.environ.get(f"MILLRACE_LOG_{name}", "") for name in ("USERNAME", "PASSWORD")))


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Location and options of the log. Sizes in bytes, times in seconds."""

    brokers: str
    """Bootstrap servers, ``host:port[,host:port...]``."""
    prefix: str = "millrace"
    """Name of the deployment. Topics are ``<prefix>.<pchannel>``, consumer groups ``<prefix>.<group>``."""
    partitions: int = 0
    """Partitions of one shared topic, named as the deployment, whose partition N is PChannel dml_N. 0: a topic for each
    PChannel.
    """
    max_entry_bytes: int = DEFAULT_MAX_ENTRY_BYTES
    replication_factor: int = -1
    """Replication factor of new topics; -1 means the brokers' default."""
    min_insync_replicas: int = 0
    """Minimum number of in-sync replicas of new topics; 0 means the brokers' default."""
    fsync: bool = False
    """Make the broker sync every append of new topics (flush.messages=1): slow, for a single broker without
    replicas.
    """
    deadline: float = 30.0
    """Timeout of a call, including reconnects and broker restarts."""
    attempts: int = 10
    """Maximum number of sends of a batch within the deadline."""
    queue_bytes: int = 64 << 20
    """Bytes of one log's appends that may be in flight; further appends wait."""
    prefetch_bytes: int = 16 << 20
    """Bytes that one reader fetches ahead."""
    client: Mapping[str, str] = field(default_factory=dict)
    """Client properties, by librdkafka's names."""

    def __post_init__(self) -> None:
        if not all(_PLACE.fullmatch(place) for place in self.brokers.split(",")):
            raise InvalidSettings(f"the location of a Kafka log is {_LOCATION}, not {self.brokers!r}")
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidSettings(
                f"kafka.prefix must be letters, digits, '.', '_' and '-', at most 100, not {self.prefix!r}"
            )
        if not 0 <= self.partitions <= _MOST_PARTITIONS:
            raise InvalidSettings(
                f"kafka.partitions must be between 0 (a topic for each PChannel) and {_MOST_PARTITIONS}"
            )
        if not 1 <= self.max_entry_bytes < 1 << 30:
            raise InvalidSettings("kafka.max_entry_bytes must be between 1 and 1073741823")
        if not (self.replication_factor == -1 or 1 <= self.replication_factor < 1 << 15):
            raise InvalidSettings("kafka.replication_factor must be -1 (the brokers' default) or at least 1")
        if self.replication_factor > 0 and self.min_insync_replicas > self.replication_factor:
            raise InvalidSettings("kafka.min_insync_replicas must not be more than kafka.replication_factor")
        for name in ("deadline", "attempts", "queue_bytes", "prefetch_bytes"):
            if getattr(self, name) <= 0:
                raise InvalidSettings(f"kafka.{name} must be more than 0")

    @classmethod
    def of(cls, location: str, options: Mapping[str, object]) -> Self:
        """Return settings from a location and options by name.

        Raises InvalidSettings for unknown names and invalid values.
        """
        brokers, _, prefix = location.partition("/")
        known = {each.name: str(each.type) for each in fields(cls) if each.name not in ("brokers", "prefix", "client")}
        given: dict[str, Any] = {"prefix": prefix.rstrip("/")} if prefix.rstrip("/") else {}
        client: dict[str, str] = {}
        for name, value in options.items():
            if name in _CLIENT:
                client[name] = str(value)
            elif "." in name:
                secret = any(word in name for word in ("password", "secret", "username", "key.pem", "jaas"))
                raise InvalidSettings(
                    f"kafka: {name} is not an option of the URL"
                    + (
                        ": credentials are MILLRACE_LOG_USERNAME and MILLRACE_LOG_PASSWORD"
                        if secret
                        else f"; known are {', '.join(sorted([*known, *_CLIENT]))}"
                    )
                )
            elif name in known:
                given[name] = _parsed(name, value, known[name])
            else:
                raise InvalidSettings(
                    f"unknown kafka setting {name!r}; known are {', '.join(sorted([*known, *_CLIENT]))}"
                )
        return cls(brokers=brokers, client=client, **given)

    def partition_of(self, pchannel: str) -> KafkaPartition:
        """Return the partition of a PChannel.

        Raises InvalidArgument if the name is invalid or too long.
        """
        numbered = _NUMBERED.fullmatch(pchannel)
        if numbered is not None and int(numbered[1]) < self.partitions:
            return KafkaPartition(self.prefix, int(numbered[1]))
        return KafkaPartition(self.topic(pchannel))

    def is_shared(self, place: KafkaPartition) -> bool:
        """Return whether a partition belongs to the shared topic."""
        return place.topic == self.prefix

    def topic(self, pchannel: str) -> str:
        """Return the topic of a PChannel that has its own.

        Raises InvalidArgument if the name is invalid or too long.
        """
        found = f"{self.prefix}.{_encoded(pchannel)}"
        if not pchannel or len(found) > _TOPIC_BYTES:
            raise InvalidArgument(f"invalid channel name {pchannel!r}: its topic's name must have 1 to 249 characters")
        return found

    def group(self, group: str) -> str:
        """Return Kafka's name of a consumer group."""
        if not group:
            raise InvalidArgument("a consumer group needs a name")
        return f"{self.prefix}.{_encoded(group)}"

    def decode_name(self, found: str) -> str | None:
        """Return the PChannel of a topic, or the group of a Kafka group; None if it belongs to another deployment."""
        start = f"{self.prefix}."
        if not found.startswith(start):
            return None
        rest = found[len(start) :]
        try:
            name = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), rest).encode("latin-1").decode()
        except UnicodeError:
            return None
        return name if name and _encoded(name) == rest else None

    def topic_configs(self) -> dict[str, str]:
        """Return the configuration of new topics: only truncation removes records, and the broker stamps them."""
        found = {
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "message.timestamp.type": "LogAppendTime",
            "unclean.leader.election.enable": "false",
            "max.message.bytes": str(max(self.max_entry_bytes, BATCH_BYTES) + OVERHEAD_BYTES),
        }
        if self.min_insync_replicas > 0:
            found["min.insync.replicas"] = str(self.min_insync_replicas)
        if self.fsync:
            found["flush.messages"] = "1"
        return found

    def rdkafka(self) -> dict[str, Any]:
        """Return the base configuration of confluent-kafka clients."""
        credentials = KafkaCredentials.of_environment()
        found: dict[str, Any] = {
            "bootstrap.servers": self.brokers,
            "client.id": "millrace",
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            "allow.auto.create.topics": False,
            # Failures are raised with their reason; the client would also log them every second.
            "log_level": 2,
            **self.client,
        }
        if "SASL" in self.client.get("security.protocol", "").upper():
            if not credentials.username:
                raise InvalidSettings(
                    "this log requires a login: set MILLRACE_LOG_USERNAME and MILLRACE_LOG_PASSWORD in the environment"
                )
            found |= {"sasl.username": credentials.username, "sasl.password": credentials.password}
        return found

    def kafka_python(self) -> dict[str, Any]:
        """Return the same for kafka-python's admin client."""
        credentials = KafkaCredentials.of_environment()
        found: dict[str, Any] = {"bootstrap_servers": self.brokers.split(","), "client_id": "millrace"}
        for name, value in self.client.items():
            if _CLIENT[name] == "ssl_check_hostname":
                found[_CLIENT[name]] = value.lower() != "none"
            elif _CLIENT[name]:
                found[_CLIENT[name]] = value
        if "security_protocol" in found:
            found["security_protocol"] = found["security_protocol"].upper()
        if credentials.username and "SASL" in found.get("security_protocol", ""):
            found |= {"sasl_plain_username": credentials.username, "sasl_plain_password": credentials.password}
        return found


def _encoded(name: str) -> str:
    """Encode a name: letters, digits and '-' as they are, every other UTF-8 byte as ``_XX``. Kafka confuses
    '.' and '_'.
    """
    return "".join(chr(byte) if byte in _PLAIN else f"_{byte:02X}" for byte in name.encode("utf-8", "surrogatepass"))


def _parsed(name: str, value: object, kind: str) -> object:
    text = str(value).strip()
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        return float(text) if kind == "float" else int(text)
    except (KeyError, ValueError):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise InvalidSettings(f"kafka.{name} must be {wanted}, not {value!r}") from None
