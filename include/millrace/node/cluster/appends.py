"""A node's append role: a server of its own for what clients append to the PChannels that it was given.

It hosts what the log's server hosts, over the same log. A PChannel opens with the next term of its log, so that what an owner before
this one still writes is rejected (law 5), and follows the log from the newest committed state on. Let go, it takes no more appends;
what was appended is answered first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.access.token_file import TokenFile
from millrace.base.closing import Closing
from millrace.base.errors import AssignmentStale, InvalidArgument, InvalidSettings
from millrace.base.settings import Settings
from millrace.catalog.records import pchannel_names
from millrace.coord.appending import OneByOne
from millrace.coord.coordinator import Coordinator
from millrace.coord.opening import cluster_token
from millrace.log.generations.service import open_deployment_log
from millrace.log.server.flight import LogServer
from millrace.log.server.main import shared_token
from millrace.node.append.flow_monitor import FlowMonitor
from millrace.node.append.host import AppendHost, HostSettings
from millrace.node.append.server import AppendExtension, committed_states
from millrace.rpc.launch import launch_of

_POLL = 0.05


class Door:
    """What this node may append to now (the protocol Placing of millrace.node.append.server)."""

    def __init__(self, held: Callable[[str], bool]) -> None:
        """`held`: whether a session may be relied on."""
        self._held = held
        self._changed = threading.Condition()
        self._open: dict[str, str] = {}
        """By PChannel the session that it is held in."""
        self._appending = Counter[str]()

    def open(self, pchannel: str, session: str) -> None:
        with self._changed:
            self._open[pchannel] = session

    def shut(self, pchannel: str) -> None:
        """Let nothing more in, and wait for what is being appended."""
        with self._changed:
            self._open.pop(pchannel, None)
            while self._appending[pchannel]:
                self._changed.wait(_POLL)

    @contextmanager
    def appending(self, pchannel: str) -> Iterator[None]:
        with self._changed:
            session = self._open.get(pchannel)
            if session is None or not self._held(session):
                raise AssignmentStale(f"this node does not take what is appended to {pchannel}: ask who does")
            self._appending[pchannel] += 1
        try:
            yield
        finally:
            with self._changed:
                self._appending[pchannel] -= 1
                self._changed.notify_all()

    def assignments(self, *, after: int, trusted: bool) -> dict[str, Any]:
        raise InvalidArgument("ask the log's server who takes the appends of a PChannel")

    def close(self) -> None:
        """Nothing to release: the server closes it with its extension."""


class AppendServer(Closing):
    """A server of the node's own for appends, from construction on; it takes those of the PChannels that are opened."""

    def __init__(self, settings: Settings, *, held: Callable[[str], bool], drain_seconds: float) -> None:
        """`drain_seconds`: how long answers that are due are waited for when a PChannel is let go. Raises InvalidSettings where it
        cannot listen, and what keeps the log from opening."""
        self._drain_seconds = drain_seconds
        self._door = Door(held)
        launch = launch_of(settings)
        service = open_deployment_log(settings.log_path, launch.backend, settings=dict(launch.settings), embedded=False)
        with ExitStack() as made:
            made.callback(service.close)
            self._host = AppendHost(
                service,
                committed_states(settings.wal_uri, service),
                pchannels=partial(pchannel_names, settings.data_dir),
                settings=HostSettings(tick_interval=settings.tick_interval),
            )
            made.callback(self._host.close)
            self._catalog = Coordinator(settings, log=service, append=OneByOne(self._host, settings.append_deadline))
            made.callback(self._catalog.close)
            flow = FlowMonitor(settings, self._host, service)
            hosted = AppendExtension(self._host, flow=flow, catalog=self._catalog, placing=self._door)
            try:
                self._server = LogServer(
                    service,
                    tokens=[cluster_token(settings), *shared_token()],
                    token_file=TokenFile(settings.data_dir),
                    extensions=[hosted],
                    host=settings.log_host,
                    tls=None if settings.log_tls is None else _certificates(settings.log_tls),
                )
            except pa.ArrowException as error:
                raise InvalidSettings(f"the node cannot take appends at {settings.log_host}: {error}") from error
            made.pop_all()
        flow.start()
        self.address: str = self._server.address

    def open(self, pchannel: str, session: str) -> None:
        """Open the next term of the log, and take appends. Raises what keeps the opening from the log."""
        self._catalog.open_term(pchannel)
        self._door.open(pchannel, session)

    def let_go(self, pchannel: str) -> None:
        """Returns when nothing is appended any more, and what was is answered or will not be by this node."""
        self._door.shut(pchannel)
        self._host.leave(pchannel, deadline=self._drain_seconds)

    def close(self) -> None:
        self._server.close()
        self._server.connections.shut_all()


def _certificates(tls: tuple[str, str, str]) -> tuple[bytes, bytes]:
    try:
        return Path(tls[0]).read_bytes(), Path(tls[1]).read_bytes()
    except OSError as error:
        raise InvalidSettings(f"the node's certificate or key cannot be read: {error}") from error
