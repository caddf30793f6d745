"""Open a meta store by its URL; its libraries are imported only then."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self
from urllib.parse import parse_qsl

from millrace.base.errors import InvalidSettings
from millrace.meta.store import MetaStore

USERNAME_VARIABLE: Final = "MILLRACE_META_USERNAME"
PASSWORD_VARIABLE: Final = "MILLRACE_META_PASSWORD"

_ETCD: Final = re.compile(r"etcds?://([^/?]+)(?:/([A-Za-z0-9._/-]*))?(?:\?(.*))?")


class ClosableMetaStore(MetaStore, Protocol):
    """A store that is closed at the end of its ``with`` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_meta_store(url: str, monotonic: Callable[[], float], *, env: Mapping[str, str]) -> ClosableMetaStore:
    """Open the store at `url`.

    - ``sqlite:////path``
    - ``mariadb://host:port/database``
    - ``etcd://host:port,host:port/prefix`` (``etcds://`` for TLS, ``?ca=/path`` for the CA's certificates)

    The login comes from `env`. `monotonic` is the clock, in seconds, that times the leases of a database.
    Raises InvalidSettings, MetaUnavailable, UnsupportedVersion.
    """
    username, password = env.get(USERNAME_VARIABLE, ""), env.get(PASSWORD_VARIABLE, "")
    if url.startswith(("sqlite:", "mariadb:")):
        from millrace.meta.sql import SqlStore

        return SqlStore(url, monotonic, username=username, password=password)
    found = _ETCD.fullmatch(url)
    if found is None:
        raise InvalidSettings(
            f"meta_store = {url!r}: use sqlite:////path, mariadb://host:port/database or etcd://host:port"
        )
    from millrace.meta.etcd import EtcdAddress, EtcdStore

    scheme = "https" if url.startswith("etcds") else "http"
    options = dict(parse_qsl(found[3] or "", keep_blank_values=True))
    authority = options.pop("ca", None)
    if options:
        raise InvalidSettings(
            f"meta_store: {', '.join(sorted(options))} is not an option of etcd; the only option is ca"
        )
    members = tuple(f"{scheme}://{member}" for member in found[1].split(","))
    prefix = (found[2] or "millrace").strip("/") + "/"
    address = EtcdAddress(members, prefix, Path(authority) if authority else None)
    return EtcdStore(address, username=username, password=password)
