"""How the server of a log folder is started by whoever needs it: what crosses its command line, and what a deployment asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from millrace.base.log_backends import backend_of, is_in_data_folder
from millrace.base.settings import Settings
from millrace.message.log_entries import DEFAULT_MAX_ENTRY_BYTES

APPEND_HOST: Final = "millrace.node.append.server:append_extension"
"""What a log server is given as --extension to host the append role: the one call upward, by name."""
CLUSTER_APPEND_HOST: Final = "millrace.node.cluster.append_router:append_extension"
"""The same where nodes of a cluster may have the append role: it knows who does."""
SHARED_APPEND_HOST: Final = "millrace.node.cluster.single_node:append_extension"
"""The same where none may, and the catalog lies in a meta store."""


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """How a client starts a server; one that runs already is taken as it is."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""
    idle_timeout: float | None = None
    """Seconds without a client until it stops by itself; None: never."""
    tls: tuple[str, str, str] | None = None
    """Files of its certificate chain and key (PEM), and the name in the certificate; None: no TLS."""
    backend: str = ""
    """URL of the log that it serves (millrace.log.registry); empty: the embedded one in the folder."""
    connections: int | None = None
    """Connections that it takes (millrace.log.server.connections); None: as many as is usual."""
    streams: int | None = None
    """Streams of appends that it takes."""
    settings: tuple[tuple[str, str], ...] = ()
    """Of the backend (RocksMQSettings for the embedded log), by name."""
    extensions: tuple[str, ...] = ()
    """What else it hosts: `module:function`, each of which takes the LogService and the folder and returns an Extension."""

    environment: tuple[tuple[str, str], ...] = ()
    """Settings of the deployment that it is handed, as variables: what hosts it is has them from its environment."""

    def arguments(self) -> list[str]:
        """As the server's command line takes them."""
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
"""How whoever may start the log's server must start it: with the append host in it. Of a deployment: launch_of."""


def _append_host(settings: Settings) -> str:
    if not backend_of(settings.log).local:
        return CLUSTER_APPEND_HOST
    return SHARED_APPEND_HOST if settings.meta_store else APPEND_HOST


def _idle_timeout(settings: Settings) -> float | None:
    """After how long without a client the server ends. Clients elsewhere, who know its address, could not start it again."""
    for_this_host = settings.log_port == 0 and settings.log_host in _LOOPBACK
    return settings.log_idle_seconds if for_this_host and settings.log_idle_seconds > 0 else None


def launch_of(settings: Settings) -> ServerLaunch:
    """How the log's server of a deployment is started: over the backend of the setting `log`, with the append host in it."""
    embedded = is_in_data_folder(settings.log)
    given: dict[str, str] = {}
    if embedded:
        given |= {"segment_bytes": str(settings.log_file_bytes), "clock_leap": str(settings.log_clock_leap)}
    # A broker has a limit of its own, which the setting's default is not to contradict.
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
        environment=(("MILLRACE_META_STORE", settings.meta_store),) if settings.meta_store else (),
        extensions=(_append_host(settings),),
    )
