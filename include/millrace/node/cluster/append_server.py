"""A node's append role: its own server for appends to the PChannels that it was assigned.

It hosts what the log's server hosts, over the same log. It opens a PChannel with the next term of its log, so that
writes of a previous owner are rejected (law 5), and follows the log from the newest committed state. When it releases a
PChannel it stops accepting appends, and first answers those that were appended.

On a backend with a single writer, each opening fences the previous writer. An owner that is fenced while its session is
valid (by one that was suspended during its opening) opens the log again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from millrace.access.access_log import AccessLog
from millrace.access.token_file import TokenFile
from millrace.base.closeable import Closeable
from millrace.base.errors import (
    AssignmentStale,
    InvalidArgument,
    InvalidSettings,
    LogFenced,
    LogUnavailable,
    MillraceError,
)
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import pchannel_names
from millrace.coord.append_port import SingleEntryAppender
from millrace.coord.catalog.shared import open_shared_catalog
from millrace.coord.coordinator import Coordinator
from millrace.coord.store_factory import cluster_token
from millrace.log.generations.service import open_deployment_log
from millrace.log.generations.shared_list import shared_list
from millrace.log.protocol import LogService
from millrace.log.server.flight import LogServer
from millrace.log.server.main import shared_token
from millrace.node.append.flow_monitor import FlowMonitor
from millrace.node.append.host import AppendHost, HostSettings
from millrace.node.append.server import AppendExtension, committed_state_loader
from millrace.rpc.launch import launch_of

_POLL = 0.05
_log: Final = logging.getLogger(__name__)


class AppendGate:
    """The PChannels that this node may append to now (implements AppendPlacement of millrace.node.append.server)."""

    def __init__(self, held: Callable[[str], bool]) -> None:
        """Create a closed gate. `held` returns whether a session is still valid."""
        self._held = held
        self._changed = threading.Condition()
        self._open: dict[str, str] = {}
        """Session under which each PChannel is held."""
        self._appending = Counter[str]()

    def open_channel(self, pchannel: str, session: str) -> None:
        with self._changed:
            self._open[pchannel] = session

    def close_channel(self, pchannel: str) -> None:
        """Stop accepting appends, and wait for those in progress."""
        with self._changed:
            self._open.pop(pchannel, None)
            while self._appending[pchannel]:
                self._changed.wait(_POLL)

    @contextmanager
    def appending(self, pchannel: str) -> Iterator[None]:
        with self._changed:
            session = self._open.get(pchannel)
            if session is None or not self._held(session):
                raise AssignmentStale(f"this node does not accept appends to {pchannel}: refresh the assignment")
            self._appending[pchannel] += 1
        try:
            yield
        except LogFenced as error:
            if not self._held(session):
                raise AssignmentStale(
                    f"this node no longer accepts appends to {pchannel}: refresh the assignment"
                ) from error
            # Not stale: this node owns the PChannel, and a retry finds the log reopened.
            raise LogUnavailable(f"the log of {pchannel} is being taken back: append again ({error})") from error
        finally:
            with self._changed:
                self._appending[pchannel] -= 1
                self._changed.notify_all()

    def session(self, pchannel: str) -> str:
        """Return the valid session under which the PChannel is open, or ""."""
        with self._changed:
            session = self._open.get(pchannel, "")
            return session if session and self._held(session) else ""

    def assignments(self, *, after: int, trusted: bool) -> dict[str, Any]:
        raise InvalidArgument("only the log's server answers assignments")

    def close(self) -> None:
        """Do nothing: the server closes the gate with its extension."""


class AppendServer(Closeable):
    """The node's own append server. It accepts appends to opened PChannels, from construction on."""

    def __init__(
        self,
        settings: Settings,
        *,
        held: Callable[[str], bool],
        drain_seconds: float,
        may_open: Callable[[], None] = lambda: None,
        open_log: Callable[[Settings], LogService] | None = None,
    ) -> None:
        """Start the server.

        `drain_seconds`: how long a release waits for pending answers. `may_open` raises if no PChannel may be opened
        now.
        `open_log` replaces the way to open the log.
        Raises InvalidSettings if the server cannot listen, and errors of opening the log.
        """
        self._drain_seconds = drain_seconds
        self.gate = AppendGate(held)
        self._held = held
        self._may_open = may_open
        self._lock = threading.Lock()
        self._reopening: dict[str, threading.Thread] = {}
        self._closed = False
        service = (open_log or _deployment_log)(settings)
        with ExitStack() as made:
            made.callback(service.close)
            self.host = AppendHost(
                service,
                committed_state_loader(settings.wal_uri, service),
                pchannels=partial(pchannel_names, settings.data_dir),
                settings=HostSettings(tick_interval=settings.tick_interval),
                on_fenced=self._fenced,
            )
            made.callback(self.host.close)
            append = SingleEntryAppender(self.host, settings.append_deadline)
            self._catalog = Coordinator(settings, log=service, append=append, shared=open_shared_catalog(settings))
            made.callback(self._catalog.close)
            flow = FlowMonitor(settings, self.host, service)
            hosted = AppendExtension(self.host, flow=flow, catalog=self._catalog, placement=self.gate)
            try:
                self._server = LogServer(
                    service,
                    tokens=[cluster_token(settings), *shared_token()],
                    token_file=TokenFile(settings.data_dir),
                    extensions=[hosted],
                    host=settings.log_host,
                    access_log=AccessLog.of(settings),
                    tls=None if settings.log_tls is None else _certificates(settings.log_tls),
                )
            except pa.ArrowException as error:
                raise InvalidSettings(f"the node cannot listen for appends at {settings.log_host}: {error}") from error
            made.pop_all()
        flow.start()
        self.address: str = self._server.address

    def open(self, pchannel: str, session: str) -> None:
        """Open the next term of the log and accept appends.

        Raises AssignmentStale if the session has ended, and errors of the opening.
        """
        self._may_open()
        self._check(pchannel, session)
        self._catalog.open_term(pchannel)
        self.gate.open_channel(pchannel, session)

    def _check(self, pchannel: str, session: str) -> None:
        if not self._held(session):
            raise AssignmentStale(f"the session under which {pchannel} was assigned has ended")

    def _fenced(self, pchannel: str) -> None:
        """Handle a log that another writer took over: its owner opens it again in a thread."""
        with self._lock:
            if self._closed or pchannel in self._reopening or not self.gate.session(pchannel):
                return
            thread = threading.Thread(target=self._reopen, args=(pchannel,), name=f"reopen-{pchannel}", daemon=True)
            self._reopening[pchannel] = thread
        thread.start()

    def _reopen(self, pchannel: str) -> None:
        try:
            if self.gate.session(pchannel):
                self._catalog.open_term(pchannel)
                _log.warning("another writer had taken over the log of %s: this node reopened it", pchannel)
        except Exception as error:  # the next append finds it still fenced and triggers another attempt
            if not isinstance(error, MillraceError) and not self._closed:
                raise
            _log.warning("cannot reopen %s: %s", pchannel, error)
        finally:
            with self._lock:
                self._reopening.pop(pchannel, None)

    def release(self, pchannel: str) -> None:
        """Stop appends to the PChannel. Returns when all previous appends are answered or abandoned."""
        self.gate.close_channel(pchannel)
        self.host.release(pchannel, deadline=self._drain_seconds)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            reopening = list(self._reopening.values())
        for thread in reopening:  # join them before closing what they use
            thread.join(self._drain_seconds)
        self._server.close()
        self._server.connections.shut_all()


def _deployment_log(settings: Settings) -> LogService:
    launch = launch_of(settings)
    return open_deployment_log(
        settings.log_path,
        launch.backend,
        settings=dict(launch.settings),
        embedded=False,
        shared=shared_list(settings),
    )


def _certificates(tls: tuple[str, str, str]) -> tuple[bytes, bytes]:
    try:
        return Path(tls[0]).read_bytes(), Path(tls[1]).read_bytes()
    except OSError as error:
        raise InvalidSettings(f"the node's certificate or key cannot be read: {error}") from error
