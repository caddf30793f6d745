"""Routing of a client's appends: to the log server, or to the cluster node that owns the PChannel.

The log server tells the client whether nodes of a cluster take appends; with one node there are no extra calls. A node
that has lost a PChannel refuses its appends (AssignmentStale); before the next one, the client asks the log server for
the new owner. A route finds a server and sends an append to it once. Whether and when it is sent again, the sequencer
decides (millrace.client.produce.sequencer).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import AssignmentStale, LogUnavailable, MetaUnavailable, MillraceError
from millrace.client.append_bundles import BundledAppends
from millrace.rpc import calls
from millrace.rpc.append_pipeline import AppendPipeline
from millrace.rpc.assignments import Assignment, AssignmentCache, AssignmentUpdate
from millrace.rpc.calls import ServerCall
from millrace.rpc.discovery import ServerRecord
from millrace.rpc.link import ConnectionLost, ExchangeStream, Link, Watchdog
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.remote_log import RemoteLogService, send_once
from millrace.rpc.wire import APPEND_ROLE, TIMEOUT, ack_from_bytes

ASSIGNMENT_POLL_SECONDS: Final = 0.5
"""Seconds between two polls of the assignments, once a node owns a PChannel."""
CONNECT_SECONDS: Final = 2.0
"""Timeout of the first call to a node."""
MARGIN: Final = 2.0
"""Seconds that a client waits longer than the server, so that the server's own, more precise error arrives first."""
_PAUSE: Final = 0.05
_LEAST: Final = 0.05
"""Minimum timeout of a call in seconds, however little of its deadline is left."""

_T = TypeVar("_T")


class _Source:
    """An AssignmentSource that asks the log server."""

    def __init__(self, service: RemoteLogService) -> None:
        self._service = service
        self.deadline = Deadline.never()
        """Deadline of the call, set by the router."""
        self.token = ""
        """Token for the nodes: the log server's, if it trusts this client with it, else the client's own."""

    def all(self) -> AssignmentUpdate:
        return self.since(-1)

    def since(self, version: int) -> AssignmentUpdate:
        def ask(link: Link, deadline: Deadline) -> AssignmentUpdate:
            timeout = deadline.remaining(minimum=_LEAST)
            said = link.act(calls.ASSIGNMENTS.name, {"after": version}, timeout=timeout)
            self.token = str(said.get("token") or link.record.token)
            found = (Assignment(name, APPEND_ROLE, term, *where) for name, term, *where in said["assignments"])
            return AssignmentUpdate(int(said["version"]), bool(said["whole"]), tuple(found))

        seconds = self.deadline.remaining(minimum=_LEAST, maximum=self._service.deadline)
        return self._service.call_with_retry(ask, seconds=seconds)


class ChannelRouter:
    """The servers that one client appends through. Thread-safe."""

    def __init__(self, service: RemoteLogService) -> None:
        self._service = service
        self._source = _Source(service)
        self._assignments = AssignmentCache(self._source)
        self._asking = threading.Lock()
        self._asked = 0
        self._stale: set[str] = set()
        """PChannels whose owner must be looked up before the next append."""
        self._idle: dict[tuple[int, str], list[HostStream]] = {}
        """Open streams that no append uses, by connection and PChannel."""
        self._bundles: WeakKeyDictionary[Link, BundledAppends] = WeakKeyDictionary()
        self._watchdog = Watchdog()
        self._links: dict[str, Link] = {}
        self._guard = threading.Lock()
        """Guards connections and idle streams: two appends whose node dies both drop its connection."""
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

    def link(self, route: ChannelRoute, deadline: Deadline) -> Link:
        """Return a connection to the PChannel's current owner. Raises LogUnavailable by `deadline`."""
        if route.pchannel in self._stale:
            self.refresh(deadline)
            self._stale.discard(route.pchannel)
        while True:
            route.assignment = found = self._assignments.get(route.pchannel, APPEND_ROLE)
            if found is None:
                return self._service.link(deadline)
            try:
                return self._node(found.address, deadline)
            except ConnectionLost as error:
                if not deadline.pause(jittered(_PAUSE)):
                    raise LogUnavailable(f"the node at {found.address} does not answer: {error}") from error
                self.refresh(deadline, whole=True)

    def _node(self, address: str, deadline: Deadline) -> Link:
        link = self._links.get(address)
        if link is not None:
            return link
        server = self._service.link(deadline).record
        record = ServerRecord.remote(address, self._source.token, roots=server.roots, tls_name=server.tls_name)
        link = Link(record, self._watchdog)
        try:
            link.act(calls.PING.name, {}, timeout=deadline.remaining(minimum=_LEAST, maximum=CONNECT_SECONDS))
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

    def mark_stale(self, route: ChannelRoute) -> None:
        """Note that the server of the route's last connection does not own the PChannel."""
        if route.assignment is not None:
            self._assignments.mark_stale(route.assignment)
        self._stale.add(route.pchannel)

    def refresh(self, deadline: Deadline, *, whole: bool = False) -> None:
        """Update the assignments by `deadline`; of concurrent callers, one asks for all.

        With `whole`, fetch everything: the death of a node changes no assignment that anybody writes. While the meta
        store is down, nothing changes, and a later append asks again.

        Raises LogUnavailable.
        """
        before = self._asked
        if not self._asking.acquire(timeout=deadline.remaining(maximum=threading.TIMEOUT_MAX)):
            raise LogUnavailable("the owners of the PChannels could not be looked up in time: nothing was appended")
        try:
            if self._asked != before:
                return
            if whole:
                self._assignments.invalidate()
            self._source.deadline = deadline
            with suppress(MetaUnavailable):
                self._assignments.refresh()
            self._asked += 1
            if self._follower is None and self._assignments.known() and not self._closed.is_set():
                self._follower = threading.Thread(target=self._follow, name="assignments", daemon=True)
                self._follower.start()
        finally:
            self._asking.release()

    def _follow(self) -> None:
        """Close connections to nodes that own nothing any more.

        Callers that wait for an answer of a suspended node then continue.
        """
        while not self._closed.wait(ASSIGNMENT_POLL_SECONDS):
            try:
                self.refresh(Deadline.after(self._service.deadline))
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
            idle, self._idle = self._idle, {}
            bundles = list(self._bundles.values())
        for each in bundles:
            each.close()
        for stream in (each for streams in idle.values() for each in streams):
            stream.close()
        for link in links:
            link.close()
        self._watchdog.close()

    @contextmanager
    def stream(self, link: Link, pchannel: str, principal: str = "") -> Iterator[HostStream]:
        """Yield a stream of single appends for exclusive use.

        It is reused if the block ends normally or with an append's own error, unless it is in the name of a
        `principal`.
        """
        key = id(link), pchannel
        with self._guard:
            idle = self._idle.get(key)
            stream = idle.pop() if idle and not principal else None
        if stream is None:
            self._forget_closed()
            stream = HostStream(link, pchannel, pipelined=False, principal=principal)
        keep = False
        try:
            yield stream
            keep = True
        except MillraceError:
            keep = not stream.ended
            raise
        finally:
            if keep and not principal:
                with self._guard:
                    self._idle.setdefault(key, []).append(stream)
            else:
                stream.close()

    def bundles(self, link: Link) -> BundledAppends:
        """Return the bundles of a connection."""
        with self._guard:
            found = self._bundles.get(link)
            if found is None:
                found = self._bundles[link] = BundledAppends(link, margin=MARGIN)
            return found

    def _forget_closed(self) -> None:
        """Close the idle streams of dropped connections."""
        with self._guard:
            old = [stream for streams in self._idle.values() for stream in streams if stream.link.closed]
            self._idle = {key: streams for key, streams in self._idle.items() if streams and not streams[0].link.closed}
        for stream in old:
            stream.close()


class ChannelRoute:
    """The way of one caller's appends to one PChannel's owner; a Connector (millrace.rpc.append_pipeline)."""

    def __init__(self, router: ChannelRouter, pchannel: str, deadline: float) -> None:
        self._router = router
        self.pchannel = pchannel
        self.deadline = deadline
        self.assignment: Assignment | None = None
        """The assignment of the last connection; None if that goes to the log server."""

    def link(self, deadline: Deadline) -> Link:
        return self._router.link(self, deadline)

    def drop_link(self, link: Link) -> None:
        self._router.drop(link)

    def mark_stale(self) -> None:
        self._router.mark_stale(self)

    def append(self, values: pa.LargeBinaryArray, deadline: Deadline, *, principal: str = "") -> AppendOutcome:
        """Append entries as one atomic batch: send them once, and return the chain's decisions.

        The deployment's own servers may append in the name of a `principal`; anybody else gets PermissionDenied.
        Raises AssignmentStale, ServerStopping, RateLimited, ServerFull, EntryTooLarge and PermissionDenied if nothing
        was appended, LogUnavailable and DeadlineExceeded if the batch is in the log once or not at all, and the error
        that parked the PChannel.
        """

        def send(link: Link, deadline: Deadline) -> AppendOutcome:
            def append_alone() -> AppendOutcome:
                with self._router.stream(link, self.pchannel, principal) as stream:
                    stream.send(values, deadline=deadline)
                    return stream.receive(deadline=deadline.extended(MARGIN))

            if principal:
                return append_alone()
            return self._router.bundles(link).append(self.pchannel, values, deadline, append_alone)

        return self._once(send, deadline, f"whether this append to {self.pchannel} is in the log is unknown")

    def act(self, call: ServerCall, request: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Make a call at the PChannel's owner, once. Raises as :meth:`append`, and what the call raises."""

        def send(link: Link, deadline: Deadline) -> dict[str, Any]:
            return link.act(call.name, dict(request), timeout=deadline.remaining(minimum=_LEAST) + MARGIN)

        return self._once(send, deadline, f"whether {call.name} of {self.pchannel} took effect is unknown")

    def pipeline(self, *, appends: int, bytes: int) -> AppendPipeline[AppendOutcome]:
        """Open a pipeline, whose appends are sent in order before earlier ones are decided."""

        def stream(link: Link) -> HostStream:
            return HostStream(link, self.pchannel, pipelined=True)

        return AppendPipeline(self, stream, appends=appends, bytes=bytes, margin=MARGIN)

    def _once(self, send: Callable[[Link, Deadline], _T], deadline: Deadline, what: str) -> _T:
        try:
            return send_once(self, send, deadline=deadline, what=what)
        except AssignmentStale:
            self.mark_stale()
            raise


class HostStream(ExchangeStream):
    """A stream of appends to the append host, each answered with the chain's decision."""

    def __init__(self, link: Link, pchannel: str, *, pipelined: bool, principal: str = "") -> None:
        request: dict[str, Any] = {"extension": APPEND_ROLE, "pchannel": pchannel, "pipelined": pipelined}
        super().__init__(link, request | ({"principal": principal} if principal else {}))

    def send(self, values: pa.LargeBinaryArray, *, deadline: Deadline) -> None:
        """Send one append, which the server may take until `deadline` to decide. Raises ConnectionLost."""
        seconds = TIMEOUT.pack(deadline.remaining(minimum=0.001))
        self.request(values, seconds, deadline=deadline.extended(MARGIN))

    def receive(self, *, deadline: Deadline) -> AppendOutcome:
        """Return the next answer. Raises what that append raised, NotAccepted or ConnectionLost."""
        chunk = self.answer(deadline=deadline)
        if chunk.data is not None:
            return AppendOutcome(chunk.data)
        ack_from_bytes(chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b"")
        raise ConnectionLost("the append host sent an empty answer")
