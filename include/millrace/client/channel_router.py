"""Routing of a client's appends: to the log server, or to the cluster node that owns the PChannel.

The log server tells the client whether nodes of a cluster take appends; with one node there are no extra calls. A node
that has lost a PChannel refuses its appends (AssignmentStale): the client asks the log server for the new owner and
continues there. The caller only sees latency.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import AssignmentStale, LogUnavailable, MetaUnavailable, MillraceError
from millrace.rpc import calls
from millrace.rpc.assignments import Assignment, AssignmentCache, AssignmentUpdate
from millrace.rpc.discovery import ServerRecord
from millrace.rpc.link import ConnectionLost, Link, Watchdog
from millrace.rpc.remote_log import RemoteLogService, call_once
from millrace.rpc.wire import APPEND_ROLE

ASSIGNMENT_POLL_SECONDS: Final = 0.5
"""Seconds between two polls of the assignments, once a node owns a PChannel."""
CONNECT_SECONDS: Final = 2.0
"""Timeout of the first call to a node."""
_PAUSE: Final = 0.05

_T = TypeVar("_T")


class _Source:
    """An AssignmentSource that asks the log server."""

    def __init__(self, service: RemoteLogService) -> None:
        self._service = service
        self.token = ""
        """Token for the nodes: the log server's, if it trusts this client with it, else the client's own."""

    def all(self) -> AssignmentUpdate:
        return self.since(-1)

    def since(self, version: int) -> AssignmentUpdate:
        def ask(link: Link, deadline: Deadline) -> AssignmentUpdate:
            said = link.act(calls.ASSIGNMENTS.name, {"after": version}, timeout=deadline.remaining(minimum=_PAUSE))
            self.token = str(said.get("token") or link.record.token)
            found = (Assignment(name, APPEND_ROLE, term, *where) for name, term, *where in said["assignments"])
            return AssignmentUpdate(int(said["version"]), bool(said["whole"]), tuple(found))

        return self._service.call_with_retry(ask, seconds=self._service.deadline)


class ChannelRouter:
    """The servers that one client appends through. Thread-safe."""

    def __init__(self, service: RemoteLogService) -> None:
        self._service = service
        self._source = _Source(service)
        self._assignments = AssignmentCache(self._source)
        self._asking = threading.Lock()
        self._asked = 0
        self._watchdog = Watchdog()
        self._links: dict[str, Link] = {}
        self._guard = threading.Lock()
        """Guards the connections: two appends whose node dies both drop its connection."""
        self._closed = threading.Event()
        self._follower: threading.Thread | None = None

    def route(self, pchannel: str, *, deadline: float | None = None) -> ChannelRoute:
        """Return the route of a PChannel's appends for one caller.

        `deadline` is in seconds (default: the service's).
        """
        return ChannelRoute(self, pchannel, self._service.deadline if deadline is None else deadline)

    def known(self) -> dict[str, str]:
        """Return by PChannel the address of its owner, for the PChannels that this client has asked about."""
        return {each.pchannel: each.address for each in self._assignments.known() if each.address}

    def link(self, place: ChannelRoute, deadline: Deadline) -> Link:
        """Return a connection to the PChannel's current owner. Raises LogUnavailable."""
        while True:
            place.assignment = found = self._assignments.get(place.pchannel, APPEND_ROLE)
            if found is None:
                return self._service.link(deadline)
            try:
                return self._node(found.address, deadline)
            except ConnectionLost as error:
                if not deadline.pause(jittered(_PAUSE)):
                    raise LogUnavailable(f"the node at {found.address} does not answer: {error}") from error
                self.refresh(anew=True)

    def _node(self, address: str, deadline: Deadline) -> Link:
        link = self._links.get(address)
        if link is not None:
            return link
        server = self._service.link(deadline).record
        record = ServerRecord.remote(address, self._source.token, roots=server.roots, tls_name=server.tls_name)
        link = Link(record, self._watchdog)
        try:
            link.act(calls.PING.name, {}, timeout=deadline.remaining(minimum=_PAUSE, maximum=CONNECT_SECONDS))
        except BaseException:
            link.close()
            raise
        with self._guard:
            if self._closed.is_set():
                link.close()
                raise LogUnavailable("this client is closed: connect again")
            other = self._links.setdefault(address, link)
        if other is not link:
            link.close()
        return other

    def drop(self, link: Link) -> None:
        """Drop a failed connection, so that the PChannel's owner is looked up again."""
        address = link.record.address
        with self._guard:
            known = self._links.get(address) is link
            if known:
                del self._links[address]
        if known:
            link.close()
            self._assignments.invalidate()
        else:
            self._service.drop_link(link)

    def on_stale(self, assignment: Assignment | None) -> None:
        """Look up the owner again after a refusal under `assignment` (None: by the log server)."""
        if assignment is not None:
            self._assignments.mark_stale(assignment)
        self.refresh(anew=False)

    def refresh(self, *, anew: bool) -> None:
        """Update the assignments; of concurrent callers, one asks for all.

        With `full`, fetch everything: the death of a node changes no assignment that anybody writes. While the meta
        store is down, nothing changes, and appends ask again until their deadline.

        Raises LogUnavailable.
        """
        before = self._asked
        with self._asking:
            if self._asked != before:
                return
            if anew:
                self._assignments.invalidate()
            with suppress(MetaUnavailable):
                self._assignments.refresh()
            self._asked += 1
            if self._follower is None and self._assignments.known() and not self._closed.is_set():
                self._follower = threading.Thread(target=self._follow, name="assignments", daemon=True)
                self._follower.start()

    def _follow(self) -> None:
        """Close connections to nodes that own nothing any more.

        Callers that wait for an answer of a suspended node then continue.
        """
        while not self._closed.wait(ASSIGNMENT_POLL_SECONDS):
            try:
                self.refresh(anew=False)
            except MillraceError:
                continue  # the log server is down, which appends notice themselves
            serving = {each.address for each in self._assignments.known()}
            with self._guard:
                idle = [self._links.pop(address) for address in self._links.keys() - serving]
            for link in idle:
                link.close()

    def close(self) -> None:
        self._closed.set()
        if self._follower is not None:
            self._follower.join()
        with self._guard:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        self._watchdog.close()


class ChannelRoute:
    """The Connector (millrace.rpc.append_pipeline) of one caller's appends to one PChannel."""

    def __init__(self, places: ChannelRouter, pchannel: str, deadline: float) -> None:
        self._places = places
        self.pchannel = pchannel
        self.deadline = deadline
        self.assignment: Assignment | None = None
        """The assignment of the last connection; None if that goes to the log server."""

    def link(self, deadline: Deadline) -> Link:
        return self._places.link(self, deadline)

    def drop_link(self, link: Link) -> None:
        self._places.drop(link)

    def rediscover(self) -> None:
        self._places.on_stale(self.assignment)

    def call_once(self, call: Callable[[Link, Deadline], _T], *, seconds: float, what: str) -> _T:
        """Call like :meth:`RemoteLogService.call_once`, at the PChannel's owner, even if that changes."""
        deadline = Deadline.after(seconds)
        while True:
            try:
                return call_once(self, call, seconds=deadline.remaining(minimum=_PAUSE), what=what)
            except AssignmentStale as error:
                self.rediscover()
                if not deadline.pause(jittered(_PAUSE)):
                    raise LogUnavailable(
                        f"{what}: not done, nobody took it within {seconds:.1f} s ({error})"
                    ) from error
