"""The start of a log folder's server by its clients: its command line, and the options of a deployment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from millrace.base.log_backends import backend_of, is_in_data_folder
from millrace.base.settings import Settings
from millrace.message.log_entries import DEFAULT_MAX_ENTRY_BYTES

APPEND_HOST: Final = "millrace.node.append.server:append_extension"
"""The --extension of a log server that hosts the append role: the one call outward, by name."""
CLUSTER_APPEND_HOST: Final = "millrace.node.cluster.append_router:append_extension"
"""The same, if nodes of a cluster may have the append role: it knows which node has it."""
SHARED_APPEND_HOST: Final = "millrace.node.cluster.single_node:append_extension"
"""The same, if no node may have it and the catalog is in a meta store."""


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """Options for starting a server; a server that already runs is used as it is."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: a free port."""
    idle_timeout: float | None = None
    """Seconds without a client after which the server stops by itself; None: never."""
    tls: tuple[str, str, str] | None = None
    """Files of its certificate chain and key (PEM), and the name in the certificate; None: no TLS."""
    backend: str = ""
    """URL of the log that it serves (millrace.log.registry); empty: the embedded log in the folder."""
    connections: int | None = None
    """Maximum number of connections (millrace.log.server.connections); None: the default."""
    streams: int | None = None
    """Maximum number of append streams; None: the default."""
    settings: tuple[tuple[str, str], ...] = ()
    """Settings of the backend by name (RocksMQSettings for the embedded log)."""
    extensions: tuple[str, ...] = ()
    """Extensions that it hosts, as `module:function`.

    Each takes the LogService and the folder and returns an Extension.
    """

    environment: tuple[tuple[str, str], ...] = ()
    """Settings of the deployment, passed as environment variables, where its extensions read them."""

    def arguments(self) -> list[str]:
        """Return the options as command-line arguments of the server."""
        given = [f"--host={self.host}", f"--port={self.port}"]
        if self.idle_timeout is not None:
            given.append(f"--idle-timeout={self.idle_timeout}")
        if self.tls is not None:
            given += [f"--tls-{part}={value}" for part, value in zip(("cert", "key", "name"), self.tls, strict=True)]
        if self.backend:
            given.append(f"--backend={self.backend}")
        if self.connections is not None:
            given.append(f"--connections={self.connections}")
        if self.streams is not None:
            given.append(f"--streams={self.streams}")
        given += [f"--set={name}={value}" for name, value in self.settings]
        given += [f"--extension={extension}" for extension in self.extensions]
        return given


_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})

DEFAULT_LAUNCH: Final = ServerLaunch(extensions=(APPEND_HOST,))
"""Default launch of a log server, with the append host in it. For a deployment, use launch_of."""


def _append_host(settings: Settings) -> str:
    if not backend_of(settings.log).local:
        return CLUSTER_APPEND_HOST
    return SHARED_APPEND_HOST if settings.meta_store else APPEND_HOST


def _idle_timeout(settings: Settings) -> float | None:
    """Return after how many seconds without a client the server stops.

    A server that remote clients may use never does: they know its address, but could not start it again.
    """
    for_this_host = settings.log_port == 0 and settings.log_host in _LOOPBACK
    return settings.log_idle_seconds if for_this_host and settings.log_idle_seconds > 0 else None


def launch_of(settings: Settings) -> ServerLaunch:
    """Return how a deployment's log server is started: on the setting `log`'s backend, with the append host."""
    embedded = is_in_data_folder(settings.log)
    given: dict[str, str] = {}
    if embedded:
        given |= {"segment_bytes": str(settings.log_file_bytes), "clock_leap": str(settings.log_clock_leap)}
    # A broker has its own limit, which the setting's default must not override.
    if embedded or settings.max_entry_bytes != DEFAULT_MAX_ENTRY_BYTES:
        given["max_entry_bytes"] = str(settings.max_entry_bytes)
    return replace(
        DEFAULT_LAUNCH,
        host=settings.log_host,
        port=settings.log_port,
        idle_timeout=_idle_timeout(settings),
        tls=settings.log_tls,
        backend="" if embedded else settings.log,
        connections=settings.log_connections,
        streams=settings.log_streams,
        settings=tuple(given.items()),
        environment=(("MILLRACE_META_STORE", settings.meta_store), ("MILLRACE_TABLES", settings.tables_place)),
        extensions=(_append_host(settings),),
    )
