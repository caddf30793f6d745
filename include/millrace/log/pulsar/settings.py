"""Settings of the Pulsar backend, validated before use; credentials from the environment; names of topics.

A PChannel is the topic ``<prefix>.<encoded name>`` in the deployment's namespace. Letters, digits, ``_`` and ``-``
are kept, every other UTF-8 byte becomes ``.XX``. A name that ends like the topic of a partition (``...-partition-3``)
would be mistaken for one, so its last hyphen is escaped as well.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Self

from millrace.base.errors import InvalidSettings

_LOCATION: Final = "pulsar://host:port/tenant/namespace[/prefix]"
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_PLACE: Final = re.compile(r"[A-Za-z0-9_=:.-]+")
_TRUE: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class PulsarSettings:
    """Location and options of the log, the options of its URL. Sizes in bytes, times in seconds."""

    address: str
    """``host:port[,host:port...]`` of the brokers."""
    tenant: str
    namespace: str
    prefix: str = "millrace"
    """Name of the deployment: its topics are ``<prefix>.<pchannel>``."""
    admin: str = ""
    """URL of the admin API, ``http(s)://host:port``; empty: port 8080 (with TLS 8443) of the first broker."""
    tls: bool = False
    tls_trust_certs_file: str = ""
    tls_certificate_file: str = ""
    tls_private_key_file: str = ""
    tls_validate_hostname: bool = True
    listener_name: str = ""
    """Advertised listener of the brokers to use; empty: the default one."""
    manage_policies: bool = True
    """Create a missing namespace and set the policies that a log needs; otherwise they are only checked."""
    max_entry_bytes: int = (5 << 20) - (64 << 10)
    """Largest entry; the brokers' maxMessageSize (5 MiB by default) must be 64 KiB larger."""
    batch_bytes: int = 1 << 20
    batch_messages: int = 1000
    """Messages that the client puts into one Pulsar entry, at most."""
    pending_bytes: int = 64 << 20
    """Bytes in flight to the broker, over all appends to one log."""
    prefetch_bytes: int = 32 << 20
    """Approximate bytes that one reader fetches ahead."""
    send_timeout: float = 30.0
    """Timeout of an unacknowledged append."""
    operation_timeout: float = 30.0
    """Timeout of any other call, including reconnects and broker restarts."""

    def __post_init__(self) -> None:
        if not self.address or ("," in self.address and not all(self.address.split(","))):
            raise InvalidSettings(f"a Pulsar log needs the address of a broker: {_LOCATION}")
        for name in (self.tenant, self.namespace):
            if not _PLACE.fullmatch(name):
                raise InvalidSettings(f"a Pulsar log needs a tenant and a namespace: {_LOCATION}, not {name!r}")
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidSettings(f"pulsar.prefix must be letters, digits, _ and -, not {self.prefix!r}")
        if self.admin and not re.fullmatch(r"https?://[^/@?#]+/?", self.admin):
            raise InvalidSettings(f"pulsar.admin must be http(s)://host:port, not {self.admin!r}")
        for name in ("batch_bytes", "batch_messages", "pending_bytes", "prefetch_bytes", "send_timeout"):
            if getattr(self, name) <= 0:
                raise InvalidSettings(f"pulsar.{name} must be more than 0")
        if not 1 <= self.max_entry_bytes < 1 << 30:
            raise InvalidSettings("pulsar.max_entry_bytes must be between 1 and 1073741823")
        if self.operation_timeout < 1:  # the client takes whole seconds
            raise InvalidSettings("pulsar.operation_timeout must be at least 1")

    @property
    def service_url(self) -> str:
        """URL that the client connects to."""
        return f"{'pulsar+ssl' if self.tls else 'pulsar'}://{self.address}"

    @property
    def admin_url(self) -> str:
        """Root URL of the admin API."""
        if self.admin:
            return self.admin.rstrip("/")
        host = self.address.split(",")[0].rpartition(":")[0] or self.address
        return f"https://{host}:8443" if self.tls else f"http://{host}:8080"

    def topic_url(self, topic: str) -> str:
        """Return a topic's full name."""
        return f"persistent://{self.tenant}/{self.namespace}/{topic}"

    @classmethod
    def of(cls, location: str, options: Mapping[str, object]) -> Self:
        """Return settings from a location and options by name.

        Raises InvalidSettings for unknown names and invalid values.
        """
        address, *places = location.strip("/").split("/")
        if not 2 <= len(places) <= 3:
            raise InvalidSettings(f"the location of a Pulsar log is {_LOCATION}, not {location!r}")
        given: dict[str, object] = dict(zip(("tenant", "namespace", "prefix"), places, strict=False))
        known = {each.name: each.type for each in fields(cls) if each.name not in ("address", "tenant", "namespace")}
        for name, value in options.items():
            if name not in known or name in given:
                raise InvalidSettings(f"unknown pulsar setting {name!r}; known are {', '.join(sorted(known))}")
            given[name] = _parsed(name, value, str(known[name]))
        return cls(address=address, **given)  # type: ignore[arg-type]


def _parsed(name: str, value: object, kind: str) -> object:
    try:
        if kind == "bool":
            return _TRUE[str(value).lower()]
        return {"int": int, "float": float, "str": str}[kind](str(value))
    except (KeyError, ValueError):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise InvalidSettings(f"pulsar.{name} must be {wanted}, not {value!r}") from None


@dataclass(frozen=True, slots=True)
class PulsarCredentials:
    """The login to the brokers: a token, a name and a password, or none. Never in a URL, never displayed."""

    token: str = field(default="", repr=False)
    username: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of_environment(cls) -> Self:
        """Read MILLRACE_LOG_TOKEN, or MILLRACE_LOG_USERNAME and MILLRACE_LOG_PASSWORD."""
        names = ("MILLRACE_LOG_TOKEN", "MILLRACE_LOG_USERNAME", "MILLRACE_LOG_PASSWORD")
        return cls(*(os.environ.get(name, "") for name in names))

    def header(self) -> dict[str, str]:
        """Return the headers of an admin request."""
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        if self.username:
            pair = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
            return {"Authorization": f"Basic {pair}"}
        return {}


_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_PARTITION: Final = re.compile(r"-(?=partition-\d+$)|-(?=\d+$)")
_ESCAPED: Final = re.compile(r"\.([0-9A-F]{2})")


def topic_of(prefix: str, pchannel: str) -> str:
    """Return the topic of a PChannel, without tenant and namespace."""
    encoded = "".join(chr(byte) if byte in _PLAIN else f".{byte:02X}" for byte in pchannel.encode())
    if re.search(r"-partition-\d+$", encoded):
        encoded = _PARTITION.sub(".2D", encoded)
    return f"{prefix}.{encoded}"


def pchannel_of_topic(prefix: str, topic: str) -> str | None:
    """Return the PChannel of a topic; None if it belongs to another deployment."""
    start = f"{prefix}."
    if not topic.startswith(start):
        return None
    encoded = topic[len(start) :]
    try:
        data = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), encoded).encode("latin-1")
        name = data.decode()
    except UnicodeError:
        return None
    return name if topic_of(prefix, name) == topic else None


def groups_topic(prefix: str) -> str:
    """Return the topic whose properties list the consumer groups. It is never a PChannel's: no prefix starts
    with ``_``.
    """
    return f"_groups.{prefix}"
