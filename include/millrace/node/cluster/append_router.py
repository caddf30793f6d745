"""Routing of appends in a deployment whose nodes take appends: the log's server redirects clients, or appends itself.

`append_extension` is what the server hosts (millrace.rpc.launch). While nodes with the append role are alive, the
server refuses appends as stale, and clients ask it for the PChannel's owner. The server's own appends, DDL and time
ticks, go to the owner as those of any client. When the last node is gone, the server opens a term on each PChannel,
which takes the log back on a backend with a single writer, and appends itself again.

A thread watches the nodes; no append waits for that. If its view is briefly wrong, the chain's terms decide, and on a
backend with a single writer the fenced owner reopens the log (millrace.node.cluster.append_server).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    AssignmentStale,
    InvalidSettings,
    LogFenced,
    LogUnavailable,
    MillraceError,
)
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import pchannel_names
from millrace.client.append_client import AppendClient
from millrace.client.produce.lane import deliver_single
from millrace.coord.assignment_source import CoalescedAssignmentSource, MetaStoreAssignmentSource
from millrace.coord.catalog.shared import open_shared_catalog
from millrace.coord.clock import SystemClock
from millrace.coord.consumer_positions import open_positions
from millrace.coord.machine.copies import following
from millrace.coord.session import APPEND, NODE_PREFIX, NodeInfo
from millrace.coord.store_factory import cluster_token, open_cluster_store, require_cluster
from millrace.log.protocol import LogService
from millrace.meta.factory import ClosableMetaStore
from millrace.node.append import server
from millrace.rpc import calls
from millrace.rpc.append_pipeline import Entries, as_values
from millrace.rpc.launch import launch_of
from millrace.rpc.outcome import AppendOutcome

POLL_SECONDS: Final = 0.25
"""Seconds between two polls of the nodes."""
SELF_CALL_SECONDS: Final = 2.0
"""Deadline for this server's calls to itself about assignments."""

_T = TypeVar("_T")
_log: Final = logging.getLogger(__name__)


def append_extension(service: LogService, folder: Path) -> server.AppendExtension:
    """Make the append host of a log's server in a deployment that may have nodes with the append role."""
    return server.append_extension(
        service, folder, cluster=AppendRouter, positions=open_positions, shared=open_shared_catalog, follow=_follow
    )


def _follow(settings: Settings) -> AbstractContextManager[None]:
    return following(settings) if settings.meta_store else nullcontext()


class AppendRouter:
    """Routes the appends of the log's server (implements ClusterPlacement of millrace.node.append.server)."""

    def __init__(self, settings: Settings) -> None:
        """Create the router. Without a cluster, its cost is a look at one file each POLL_SECONDS."""
        self._settings = settings
        self._store: ClosableMetaStore | None = None
        self._looked = False
        self._alive: frozenset[str] = frozenset()
        """Sessions of nodes with the append role."""
        self._left = False
        """Whether there were such nodes since this server started."""
        self._back: set[str] = set()
        """PChannels of former nodes that this server took back."""
        self._taking = threading.RLock()
        self._now: str = ""
        """The PChannel that the holder of `_taking` is taking back."""
        self._open_term: Callable[[str], object] | None = None
        self._client: AppendClient | None = None
        self._closed = threading.Event()
        self._looking = threading.Lock()
        self._asked = CoalescedAssignmentSource(self._source)
        self._thread = threading.Thread(target=self._watch, name="nodes-that-append", daemon=True)

    def start(self, open_term: Callable[[str], object]) -> None:
        self._open_term = open_term
        self._thread.start()

    # -- what clients append -----------------------------------------------------------------------------------------

    @contextmanager
    def appending(self, pchannel: str) -> Iterator[None]:
        if not self.is_local(pchannel):
            raise AssignmentStale(f"nodes of the cluster take the appends to {pchannel}: refresh the assignment")
        try:
            yield
        except LogFenced:
            with self._looking:
                self._look()
            if self._alive:  # a node joined since the last poll
                raise AssignmentStale(f"a node now takes the appends to {pchannel}: refresh the assignment") from None
            raise

    def assignments(self, *, after: int, trusted: bool) -> dict[str, Any]:
        update = self._asked.since(after)
        if not update.version:
            return {"version": 0, "whole": True, "assignments": []}
        found = [
            [each.pchannel, each.term, each.session, each.address if each.session in self._alive else ""]
            for each in update.assignments
            if each.role == APPEND
        ]
        answer: dict[str, Any] = {"version": update.version, "whole": update.whole, "assignments": found}
        return answer | ({"token": cluster_token(self._settings)} if trusted else {})

    def _source(self) -> MetaStoreAssignmentSource | None:
        with self._looking:
            self._look()
            return MetaStoreAssignmentSource(self._store) if self._store is not None and self._alive else None

    # -- what the server appends -------------------------------------------------------------------------------------

    def is_local(self, pchannel: str) -> bool:
        if not self._looked:  # append nothing before the nodes are known: on some logs that would fence them
            with self._looking:
                try:
                    self._look()
                except MillraceError as error:
                    raise LogUnavailable(f"cannot tell now whether nodes take appends: {error}") from error
        if self._alive:
            return False
        if self._left:
            self._take_back(pchannel)
        return True

    def append(self, pchannel: str, entries: Entries, *, deadline: float, principal: str = "") -> AppendOutcome:
        route, values = self._through().router.route(pchannel), as_values(entries)
        return _delivered(lambda end: route.append(values, end, principal=principal), pchannel, deadline)

    def tick(self, pchannel: str, *, tick: int = 0, source_id: int = 0, deadline: float) -> None:
        # Marked as forwarded: a node that does not own the PChannel refuses it and never forwards it again.
        route = self._through().router.route(pchannel)
        request = {"pchannel": pchannel, "forwarded": True, "tick": tick, "source_id": source_id}

        def act(end: Deadline) -> dict[str, Any]:
            return route.act(calls.TICK, request | {"deadline": end.remaining(minimum=0.001)}, end)

        _delivered(act, pchannel, deadline)

    def suppress_ticks(self) -> bool:
        return bool(self._alive) or not self._looked

    def _through(self) -> AppendClient:
        """Return a client of this very server, which finds owners as any client does."""
        with self._taking:
            if self._client is None:
                if self._closed.is_set():
                    raise LogUnavailable("the log's server stops: append again")
                # Its follower calls this server, whose shutdown waits for the call: keep the deadline short.
                self._client = AppendClient.connect(
                    self._settings.data_dir,
                    start=False,
                    now=False,
                    deadline=SELF_CALL_SECONDS,
                    launch=launch_of(self._settings),
                )
            return self._client

    def _take_back(self, pchannel: str) -> None:
        with self._taking:
            if pchannel in self._back or pchannel == self._now or self._open_term is None:
                return
            self._now = pchannel
            try:
                self._open_term(pchannel)  # re-enters this method in the same thread
            finally:
                self._now = ""
            self._back.add(pchannel)
            _log.info("no node is left: this server takes the appends to %s", pchannel)

    def _take_all_back(self) -> None:
        with self._taking:
            client, self._client = self._client, None
        if client is not None:
            client.close()
        for pchannel in sorted(pchannel_names(self._settings.data_dir)):
            if self._alive or self._closed.is_set():
                return
            try:
                self._take_back(pchannel)
            except MillraceError as error:  # the next append retries
                _log.warning("cannot take back %s: %s: %s", pchannel, error.code, error)

    # -- who is there ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause):
            pause, before = POLL_SECONDS, self._alive
            with self._looking:
                try:
                    self._look()
                except MillraceError as error:  # keep the last view: clients are asked to retry
                    _log.warning("cannot read the meta store: %s: %s", error.code, error)
            if before and not self._alive:
                self._take_all_back()

    def _look(self) -> None:
        """Read which nodes are alive. Raises MetaUnavailable, UnsupportedVersion."""
        if self._closed.is_set():
            return
        if self._store is None:
            try:
                require_cluster(self._settings)
            except InvalidSettings:
                self._looked = True
                return
            self._store = open_cluster_store(self._settings, SystemClock())
        listed = self._store.list(NODE_PREFIX).entries
        alive = frozenset(
            entry.key.removeprefix(NODE_PREFIX) for entry in listed if APPEND in NodeInfo.decode(entry.value).roles
        )
        if alive:
            self._left = True
            self._back.clear()
        self._alive, self._looked = alive, True

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._client is not None:
            self._client.close()
        if self._store is not None:
            self._store.close()


def _delivered(send: Callable[[Deadline], _T], pchannel: str, seconds: float) -> _T:
    """Send to the PChannel's owner within `seconds`, whichever node that is; after an ambiguous failure, not again."""
    try:
        return deliver_single(send, deadline=Deadline.after(seconds))
    except AssignmentStale as error:
        raise LogUnavailable(
            f"no node accepted the append to {pchannel} within {seconds:.1f} s: nothing was appended ({error})"
        ) from error
