"""Settings of the Pulsar backend, validated before use; credentials, which come from the environment alone."""

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
    """Where the log is, and how it is written and read. Sizes in bytes, times in seconds. The options of a log's URL."""

    address: str
    """``host:port[,host:port...]`` of the brokers."""
    tenant: str
    namespace: str
    prefix: str = "millrace"
    """Name of the deployment: its topics are ``<prefix>.<pchannel>``."""
    admin: str = ""
    """The admin API, ``http(s)://host:port``; empty: port 8080 (with TLS 8443) of the first broker."""
    tls: bool = False
    tls_trust_certs_file: str = ""
    tls_certificate_file: str = ""
    tls_private_key_file: str = ""
    tls_validate_hostname: bool = True
    listener_name: str = ""
    """Which of the brokers' advertised listeners to use; empty: the plain one."""
    manage_policies: bool = True
    """Make the namespace where it is missing and set the policies that keep the log; otherwise they are only checked."""
    max_entry_bytes: int = (5 << 20) - (64 << 10)
    """Largest entry; the brokers' maxMessageSize (5 MiB as they come) must be 64 KiB larger."""
    batch_bytes: int = 1 << 20
    batch_messages: int = 1000
    """How much the client puts in one Pulsar entry."""
    pending_bytes: int = 64 << 20
    """How much may be on its way to the broker, over all appends to one log."""
    prefetch_bytes: int = 32 << 20
    """How much one reader fetches ahead of its reads, about."""
    send_timeout: float = 30.0
    """When an append that was not acknowledged fails."""
    operation_timeout: float = 30.0
    """When any other call fails, broken connections and a restarting broker included."""

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
        """What the client connects to."""
        return f"{'pulsar+ssl' if self.tls else 'pulsar'}://{self.address}"

    @property
    def admin_url(self) -> str:
        """The root of the admin API."""
        if self.admin:
            return self.admin.rstrip("/")
        host = self.address.split(",")[0].rpartition(":")[0] or self.address
        return f"https://{host}:8443" if self.tls else f"http://{host}:8080"

    def topic_url(self, topic: str) -> str:
        """A topic's full name."""
        return f"persistent://{self.tenant}/{self.namespace}/{topic}"

    @classmethod
    def of(cls, location: str, options: Mapping[str, object]) -> Self:
        """Settings from a location and options by name. Raises InvalidSettings for unknown names and wrong values."""
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
    """Who we are to the brokers: a token, or a name and a password, or nobody. Never in a URL, never shown."""

    token: str = field(default="", repr=False)
    username: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of_environment(cls) -> Self:
        """From MILLRACE_LOG_TOKEN, or MILLRACE_LOG_USERNAME and MILLRACE_LOG_PASSWORD."""
        names = ("MILLRACE_LOG_TOKEN", "MILLRACE_LOG_USERNAME", "MILLRACE_LOG_PASSWORD")
        return cls(*(os.environ.get(name, "") for name in names))

    def header(self) -> dict[str, str]:
        """The header of an admin request."""
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        if self.username:
            pair = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
            return {"Authorization": f"Basic {pair}"}
        return {}
