"""The append host inside the log's server process: all clients of a machine share one follower per PChannel.

    python -m millrace.log.server.main --data <folder>/log \
        --extension millrace.node.append.server:append_extension

It extends the wire protocol of the log's server (millrace.log.server.main) by the calls ``append/...`` of the registry
(millrace.rpc.calls). Every command and ticket also has `"extension": "append"`.

- DoExchange: each record batch in (column `value`; its metadata is the timeout in seconds, a little-endian double) is
  one atomic append. Each record batch of OUTCOME_SCHEMA out is its answer, in order. A failure is metadata alone, as in
  the log's own streams. On a pipelined stream, appends that arrive while the log is busy are appended together, and
  answers follow as they are decided.
- DoGet: the tail (ROW_SCHEMA; the last batch's metadata is `{"confirmed": <tick>}` or `{"evicted": <earliest>}`), the
  rows of a collection (millrace.node.append.collection_reads), messages of the ``wal`` table in pieces and the rows of
  an Import (millrace.node.append.history_reads).
- Actions: a JSON object in, one out. ``append/metrics`` answers text.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from prometheus_client import ProcessCollector
from pyarrow import flight

from millrace.access.access_log import AccessLog, ReadStream
from millrace.access.grants import LOCAL_ADMIN, Caller, Resource, ResourceKind, Role
from millrace.base.errors import InvalidArgument, LogUnavailable, PermissionDenied, TableNotFound, UnsupportedVersion
from millrace.base.metrics import NAMESPACE, Metrics
from millrace.base.settings import Settings, following
from millrace.catalog.calls import dispatch
from millrace.catalog.sqlite_file import pchannel_names
from millrace.client.consume.positions import PositionStore
from millrace.client.local_tables import applied_messages
from millrace.coord.append_port import SingleEntryAppender
from millrace.coord.broadcast.retrier import BroadcastRetrier
from millrace.coord.catalog.database import SharedStore
from millrace.coord.concurrency import ThreadRunner
from millrace.coord.coordinator import Coordinator
from millrace.log.generations.service import GenerationsService
from millrace.log.protocol import LogService
from millrace.message.wire.decode import declared_rows
from millrace.node.append.append_stream import (
    MAX_OUTCOME_WAIT,
    PipelinedStream,
    answer,
    next_append,
    next_bundle,
    submit_each,
    write_answer,
)
from millrace.node.append.authorizer import AppendAuthorizer, readable_rows, vchannel_resources
from millrace.node.append.collection_reads import CollectionReads, HostTickSource
from millrace.node.append.consumer_groups import ConsumerGroups
from millrace.node.append.flow_monitor import FlowMonitor
from millrace.node.append.history_reads import HistoryReads
from millrace.node.append.host import AppendForwarder, AppendHost, HostSettings
from millrace.node.append.pending import PendingOutcome
from millrace.node.append.task_source import HostTaskSource
from millrace.node.append.tombstones import TombstonePlacer
from millrace.node.append.work_queues import TaskPart, WorkQueues, dispatcher_name
from millrace.node.retention.log_retention import LogRetention, retention_configured
from millrace.rpc import calls
from millrace.rpc.bundles import BundledAppend, encode_answers
from millrace.rpc.calls import SERVER_CALLS, ServerCall, handlers_of, handles, server_calls
from millrace.rpc.outcome import OUTCOME_SCHEMA, AppendOutcome
from millrace.rpc.tail import TAIL_SCHEMA, Evicted, to_wire_rows
from millrace.rpc.tasks import TASKS_SCHEMA, encode_tasks
from millrace.rpc.wire import (
    APPEND_ROLE,
    DEFAULT_DEADLINE,
    NotAccepted,
    log_id,
    request_number,
    request_of,
    to_json,
)
from millrace.tables.wal.state_check import valid_state
from millrace.tables.wal.table import WalTable
from millrace.wal.state import ChannelState

MAX_TAIL_WAIT: Final = 10.0
MAX_WAITING: Final = 256
"""Limit of waiting tail readers, each in a server thread. Further ones are answered at once."""
MAX_TAKING: Final = 256
"""The same for consumers of work queues that wait for tasks."""
_CACHED_BYTES: Final = 1 << 20
"""Bytes of a tail's wire form that are kept for other readers, for each PChannel."""
_SWITCH_SECONDS: Final = 0.0005
_READS: Final = tuple(each for each in server_calls("append/") if each.ticket)

_Part = TypeVar("_Part")


class AppendPlacement(Protocol):
    """Tells where the appends of each PChannel go, in a cluster whose nodes take them."""

    def appending(self, pchannel: str) -> AbstractContextManager[None]:
        """Append to the PChannel inside. Raises AssignmentStale if this process does not own it."""
        ...

    def assignments(self, *, after: int, trusted: bool) -> dict[str, Any]:
        """Return the owners of PChannels (millrace.rpc.assignments.Update as JSON) after the version `after`; all if it
        is negative.

        A `trusted` caller also gets the token that nodes accept.
        """
        ...

    def close(self) -> None: ...


class ClusterPlacement(AppendPlacement, AppendForwarder, Protocol):
    """A server's knowledge of the deployment's nodes."""

    def start(self, open_term: Callable[[str], object]) -> None:
        """Start to take PChannels back from nodes that are gone, each by a term that `open_term` opens."""
        ...


class AppendExtension:
    """Serves `host` (implements Extension of millrace.log.server.flight)."""

    name = APPEND_ROLE

    def __init__(
        self,
        host: AppendHost,
        *,
        retention: LogRetention | None = None,
        flow: FlowMonitor | None = None,
        catalog: Coordinator | None = None,
        tombstones: TombstonePlacer | None = None,
        reads: CollectionReads | None = None,
        histories: HistoryReads | None = None,
        groups: ConsumerGroups | None = None,
        queues: WorkQueues | None = None,
        placement: AppendPlacement | None = None,
        resources: ExitStack | None = None,
    ) -> None:
        """Serve `host` with the given helpers.

        `resources` are closed after the host, because they wait for answers of the host.
        """
        self._handlers = handlers_of(self, server_calls("append/"))
        self._resources = ExitStack() if resources is None else resources
        self._histories = histories
        self._reads = reads
        self._groups = groups
        self._queues = queues
        self._placing = placement
        self._host = host
        self._catalog = catalog
        self._tombstones = tombstones
        self._retention = retention
        self._flow = flow
        self._closing = False
        self._access_log: AccessLog | None = None
        self._encoded: dict[str, tuple[Sequence[pa.RecordBatch], Sequence[pa.RecordBatch]]] = {}
        """Newest batches of each PChannel that a reader took, and their wire form."""
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._taking = threading.BoundedSemaphore(MAX_TAKING)

    @handles(calls.APPEND)
    def do_exchange(
        self,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        caller: Caller,
    ) -> None:
        command = request_of(descriptor.command or b"")
        door = AppendAuthorizer(caller, self._collection_of, principal=command.get("principal"))
        if command.get("bundles"):
            writer.begin(OUTCOME_SCHEMA)
            while (bundle := next_bundle(reader)) is not None:
                rows, metadata = encode_answers(self._bundled(bundle, door))
                writer.write_with_metadata(rows, pa.py_buffer(metadata))
            return
        pchannel = _pchannel(command)
        writer.begin(OUTCOME_SCHEMA)
        if command.get("pipelined"):
            PipelinedStream(partial(self.submit, pchannel, door=door), reader, writer).serve()
            return
        while (request := next_append(reader)) is not None:
            values, timeout = request
            write_answer(writer, answer(partial(self.decide, pchannel, values, door, timeout=timeout)))

    def _bundled(self, bundle: Sequence[BundledAppend], door: AppendAuthorizer) -> list[AppendOutcome | bytes]:
        """Append a bundle, the appends of each PChannel as one, before waiting for any decision."""
        channels: dict[str, list[int]] = {}
        for place, each in enumerate(bundle):
            channels.setdefault(each.pchannel, []).append(place)
        submitted: dict[int, PendingOutcome | bytes] = {}
        for pchannel, places in channels.items():
            appends = [bundle[place].values for place in places]
            submitted.update(zip(places, submit_each(partial(self.submit, pchannel, door=door), appends), strict=True))

        def decided(place: int) -> AppendOutcome | bytes:
            pending, seconds = submitted[place], bundle[place].deadline.remaining()
            return pending if isinstance(pending, bytes) else answer(partial(pending.outcome, timeout=seconds))

        return [decided(place) for place in range(len(bundle))]

    def decide(
        self, pchannel: str, values: pa.LargeBinaryArray, door: AppendAuthorizer, *, timeout: float
    ) -> AppendOutcome:
        """Append one batch and return its decisions. Raises as :meth:`submit`, and DeadlineExceeded."""
        with self._accepting(pchannel, [values], door):
            return self._host.decide(
                pchannel, values, deadline=timeout, authorize=door.authorize, principal=door.principal
            )

    def submit(
        self, pchannel: str, appends: Sequence[pa.LargeBinaryArray], door: AppendAuthorizer
    ) -> list[PendingOutcome]:
        """Append several batches as one. Returns the pending outcome of each.

        Raises NotAccepted while the server stops, AssignmentStale if a node owns the PChannel,
        RateLimited, and errors of the authorizer.
        """
        with self._accepting(pchannel, appends, door):
            return self._host.submit_all(pchannel, appends, authorize=door.authorize, principal=door.principal)

    @contextmanager
    def _accepting(
        self, pchannel: str, appends: Sequence[pa.LargeBinaryArray], door: AppendAuthorizer
    ) -> Iterator[None]:
        """Enclose appends. Raises NotAccepted, RateLimited or AssignmentStale before."""
        if self._closing:
            raise NotAccepted
        if self._flow is not None:
            self._flow.admit(appends)
        try:
            with ExitStack() as inside:
                if self._access_log is not None:
                    measure, alone = partial(_measure, appends), len(appends) == 1
                    inside.enter_context(
                        self._access_log.writing(door.principal, calls.APPEND.name, pchannel, measure, alone=alone)
                    )
                if self._placing is not None:
                    inside.enter_context(self._placing.appending(pchannel))
                yield
        except PermissionDenied:
            if len(appends) == 1:  # of several, each is submitted again
                self.denied(calls.APPEND.name)
            raise

    def _collection_of(self, vchannel: str) -> str | None:
        return None if self._catalog is None else self._catalog.collection_of(vchannel)

    def do_get(self, ticket: flight.Ticket, caller: Caller) -> ReadStream:
        request = request_of(ticket.ticket)
        call = next((each for each in _READS if each.ticket in request), None)
        if call is None:
            raise InvalidArgument("the ticket names no read of the append host")
        with self._open():
            try:
                found: ReadStream = self._handlers[call.key](request, caller)
            except PermissionDenied:
                self.denied(call.name)
                raise

        # A client of an older build takes the columns that it knows alone.
        asked = request.get("principals") or request.get("columns") is not None
        return found if asked or "principal" not in found.schema.names else _without_principals(found)

    @handles(calls.TAIL)
    def _tail(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        pchannel = _pchannel(request, "tail")
        timeout = min(request_number(request, "timeout", 0.0), MAX_TAIL_WAIT)
        after, max_bytes = int(request_number(request, "after", 0)), int(request_number(request, "max_bytes", 8 << 20))
        can_wait = self._waiting.acquire(blocking=False)
        try:
            found = self._host.tail(pchannel, after, timeout=timeout if can_wait else 0.0, max_bytes=max_bytes)
        finally:
            if can_wait:
                self._waiting.release()
        if isinstance(found, Evicted):
            return _rows([], {"evicted": found.earliest})
        last = {"confirmed": found.confirmed_tick}
        if caller.principal.has_role((Role.READ,), (Resource(ResourceKind.PCHANNEL, pchannel),)):
            return _rows(self._wire_rows(pchannel, found.batches), last)
        return _rows(
            merged_wire_rows([readable_rows(batch, caller, self._collection_of) for batch in found.batches]), last
        )

    @handles(calls.DECIDED)
    def _decided(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        after = request.get("decided")
        if not isinstance(after, dict) or not after:
            raise InvalidArgument(
                "'decided' of the request must be an object: by PChannel, the tick after which to read"
            )
        found = self._host.decided(
            int(request_number(request, "collection_id", 0)),
            {name: int(request_number(after, name, 0)) for name in after},
            at=None if request.get("at") is None else int(request_number(request, "at", 0)),
            max_bytes=int(request_number(request, "max_bytes", 8 << 20)),
            deadline=_deadline(request),
        )
        pieces = []
        for name, batches in found.messages.items():
            if not caller.principal.has_role((Role.READ,), (Resource(ResourceKind.PCHANNEL, name),)):
                batches = [readable_rows(batch, caller, self._collection_of) for batch in batches]
            pieces += [(batch, to_json({"pchannel": name})) for batch in merged_wire_rows(batches)]
        schema = TAIL_SCHEMA if pieces else pa.schema([])  # usually there is nothing new: two dozen columns of nothing
        last = calls.DECIDED.checked({"ticks": found.ticks, "complete": found.complete})
        pieces.append((pa.RecordBatch.from_pylist([], schema), to_json(last)))
        return ReadStream(schema, iter(pieces))

    def _wire_rows(self, pchannel: str, batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
        """Return merged_wire_rows of batches of the tail, which are made once for the readers that take the same."""
        known = self._encoded.get(pchannel)
        if known is not None and len(known[0]) == len(batches) and all(map(operator.is_, known[0], batches)):
            return known[1]
        made = merged_wire_rows(batches)
        if sum(batch.nbytes for batch in made) <= _CACHED_BYTES:
            self._encoded[pchannel] = batches, made
        return made

    @handles(calls.READ_COLLECTION)
    def _read_collection(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        return _served(self._reads, calls.READ_COLLECTION).stream(request, caller)

    @handles(calls.READ_WAL)
    def _read_wal(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        return _served(self._histories, calls.READ_WAL).stream(request, caller)

    @handles(calls.READ_IMPORT)
    def _read_import(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        return _served(self._histories, calls.READ_IMPORT).imported(request, caller)

    def do_action(self, action: flight.Action, caller: Caller) -> Sequence[bytes]:
        call = SERVER_CALLS.get(action.type)
        if call is None or call.is_stream or call.key not in self._handlers:
            raise InvalidArgument(f"the append host knows no action {action.type!r}")
        body = action.body.to_pybytes()
        with self._open():
            answer = self._handlers[call.key](request_of(body) if call.request else {}, caller)
        return [answer if isinstance(answer, bytes) else to_json(call.checked(answer))]

    @handles(calls.METRICS)
    def _metrics(self, request: dict[str, Any], caller: Caller) -> bytes:
        return self._host.metrics.render() if self._host.metrics is not None else b""

    @handles(calls.FLOW)
    def _describe_flow(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        return {} if self._flow is None else self._flow.control.describe()

    @handles(calls.CATALOG)
    def _call_catalog(self, request: dict[str, Any], caller: Caller) -> bytes:
        arguments = request.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise InvalidArgument("'arguments' of the request must be a JSON object")
        return to_json(dispatch(_served(self._catalog, calls.CATALOG), str(request.get("call")), arguments, caller))

    @handles(calls.MVCC)
    def _mvcc(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        vchannel = _pchannel(request, "vchannel")
        resources = vchannel_resources(vchannel, self._collection_of)
        caller.principal.require_role((Role.READ,), resources, calls.MVCC.name)
        return self._host.mvcc(vchannel)._asdict()

    @handles(calls.ASSIGNMENTS)
    def _assignments(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        if self._placing is None:
            return {"version": 0, "whole": True, "assignments": []}
        return self._placing.assignments(after=_version(request), trusted=caller is LOCAL_ADMIN)

    @handles(calls.GROUP)
    def _group(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        return _served(self._groups, calls.GROUP).handle(request)

    @handles(calls.GROUP_HEARTBEATS)
    def _group_heartbeats(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        groups = _served(self._groups, calls.GROUP_HEARTBEATS)

        def require(group: str) -> None:
            resources = (Resource(ResourceKind.GROUP, group),)
            caller.principal.require_role((Role.READ,), resources, "a member of a consumer group")

        return {"answers": groups.heartbeats(request.get("members"), require)}

    @handles(calls.TAKE_TASKS)
    def _take_tasks(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        queues, lanes = _served(self._queues, calls.TAKE_TASKS), request.get("lanes")
        everything = caller.principal.has_role((Role.READ,), ())  # else each lane's collection is looked up
        for lane in lanes if isinstance(lanes, list) and not everything else ():
            resources = vchannel_resources(str(lane), self._collection_of)
            caller.principal.require_role((Role.READ,), resources, "a consumer of a work queue")
        can_wait = self._taking.acquire(blocking=False)
        try:
            found = queues.take(request, caller=caller.principal.name, may_wait=can_wait)
        finally:
            if can_wait:
                self._taking.release()
        pieces = [*wire_tasks(found.parts)]
        last = {"number": found.number, "lanes": found.lanes, "reason": found.reason}
        if found.session:
            last["session"] = found.session
        pieces.append((_NO_TASKS, to_json(calls.TAKE_TASKS.checked(last))))
        return ReadStream(TASKS_SCHEMA, iter(pieces))

    @handles(calls.TASK_NEWS)
    def _task_news(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        queues = _served(self._queues, calls.TASK_NEWS)
        can_wait = self._taking.acquire(blocking=False)
        try:
            return queues.news(request, caller=caller.principal.name, may_wait=can_wait)._asdict()
        finally:
            if can_wait:
                self._taking.release()

    @handles(calls.SETTLE_TASKS)
    def _settle_tasks(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        return _served(self._queues, calls.SETTLE_TASKS).handle(request, caller=caller.principal.name)

    @handles(calls.DROP_CONSUMER_GROUP)
    def _drop_group(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        _served(self._groups, calls.DROP_CONSUMER_GROUP).drop(request)
        if self._queues is not None:
            self._queues.forget(str(request["group"]))
        return {}

    @handles(calls.RESET_CONSUMER_GROUP)
    def _reset_group(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        return _served(self._groups, calls.RESET_CONSUMER_GROUP).reset(request)

    @handles(calls.CONSUMER_GROUPS)
    def _describe_groups(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        found = _served(self._groups, calls.CONSUMER_GROUPS).describe()
        queues = {} if self._queues is None else self._queues.describe()
        for each in found["groups"]:
            if each["mode"] == "queue":
                each["queue"] = queues.get(each["group"])
        return found

    @handles(calls.CONFIRM)
    def _confirm(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        pchannel, tick = _pchannel(request), int(request_number(request, "tick", 0))
        return {"tick": self._host.confirm(pchannel, tick, deadline=_deadline(request))}

    @handles(calls.DESCRIBE_HOST)
    def _describe(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        return self._host.describe(_pchannel(request))

    @handles(calls.DESCRIBE_HOSTS)
    def _describe_all(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        return {"channels": self._host.describe_all()}

    @handles(calls.DEFINITIONS)
    def _definitions(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        named = request.get("collection_id") is not None
        wanted = int(request_number(request, "collection_id", 0)) if named else None
        return self._host.definitions(_pchannel(request), wanted, deadline=_deadline(request)).to_json()

    @handles(calls.DESCRIBE_WAL)
    def _describe_wal(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        return _served(self._histories, calls.DESCRIBE_WAL).describe(_pchannel(request), request)

    @handles(calls.DESCRIBE_CHECKPOINT)
    def _describe_checkpoint(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        histories = _served(self._histories, calls.DESCRIBE_CHECKPOINT)
        return histories.checkpointed(_pchannel(request), request, caller)

    @handles(calls.RESTART)
    def _restart(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        self._host.restart(_pchannel(request))
        return {}

    @handles(calls.TICK)
    def _tick(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """Append a time tick, or only read the current one (`persist` false).

        The log's server forwards the call to the PChannel's owner. A forwarded call, and any call at a node, is refused
        as stale if this process is not the owner: two servers that each take the other for the owner would otherwise
        call each other forever.
        """
        pchannel, deadline = _pchannel(request), _deadline(request)
        persist, forwarded = request.get("persist", True) is not False, request.get("forwarded") is True
        tick, source = (int(request_number(request, name, 0)) for name in ("tick", "source_id"))
        made = partial(self._host.time_tick, pchannel, tick=tick, source_id=source, deadline=deadline)
        if not persist or self._placing is None or (self._host.forwards and not forwarded):
            found = made(persist=persist)
        else:
            with self._placing.appending(pchannel):
                found = made(forward=False)
        answer = found._asdict()
        return {"tick": answer.pop("time_tick"), **answer}

    @handles(calls.TOMBSTONE)
    def _tombstone(self, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        tombstones, pchannel = _served(self._tombstones, calls.TOMBSTONE), _pchannel(request)
        entry, sha256 = log_id(request.get("entry")), request.get("sha256")
        if sha256 is None:
            return tombstones.inspect(pchannel, entry)
        said = {name: str(request.get(name, "")) for name in ("author", "reason")}
        if caller is not LOCAL_ADMIN:
            said["author"] = caller.principal.name  # the token's owner, whatever the request says
        return tombstones.place(pchannel, entry, sha256=str(sha256), **said).to_json()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Enclose a call that its client may repeat on another server. Raises NotAccepted while the server stops."""
        if self._closing:
            raise NotAccepted
        try:
            yield
        except LogUnavailable:
            if self._closing:
                raise NotAccepted from None
            raise

    def admit(self, pchannel: str, values: pa.LargeBinaryArray, caller: Caller, *, alone: bool) -> pa.LargeBinaryArray:
        stamped = self._host.stamp(pchannel, values, caller.principal.name, counted=alone)
        if stamped is None:
            return values
        if self._placing is not None:
            with self._placing.appending(pchannel):
                pass  # appends past the host also go to the log of the PChannel's owner
        return stamped

    def truncated(self, pchannel: str, freed: int) -> None:
        if self._host.metrics is not None:
            self._host.metrics.truncated_bytes_total.labels(pchannel).inc(freed)

    def use_access_log(self, access_log: AccessLog) -> None:
        self._access_log = access_log
        metrics = self._host.metrics
        if metrics is not None:
            access_log.on_line = lambda result: metrics.access_log_lines_total.labels(result).inc()

    def denied(self, call: str) -> None:
        if self._host.metrics is not None:
            self._host.metrics.log_denied_calls_total.labels(call).inc()

    def close(self) -> None:
        self._closing = True
        # Close the host before helpers that may wait for its decisions: a term that is being opened ends with it.
        for helper in (self._retention, self._flow, self._queues, self._groups, self._host, self._placing):
            if helper is not None:
                helper.close()
        self._resources.close()
        if self._catalog is not None:
            self._catalog.close()


def append_extension(
    service: LogService,
    folder: Path,
    *,
    cluster: Callable[[Settings], ClusterPlacement] | None = None,
    positions: Callable[[Settings], PositionStore] | None = None,
    shared: Callable[[Settings], SharedStore | None] = lambda settings: None,
    follow: Callable[[Settings], AbstractContextManager[None]] = lambda settings: nullcontext(),
) -> AppendExtension:
    """Make the extension of a log server's process. It follows from the newest state in the ``wal`` table.

    `cluster` makes the placement of appends, in a deployment whose nodes may take them. `positions` opens the positions
    of consumer groups. `shared` opens the store that the catalog is copied from. `follow` keeps this machine's copies
    of the meta store up to date.
    """
    # The server reads the tables for long, wherever they are moved, and writes none.
    settings = following(replace(Settings.load(), data_dir=folder.absolute().parent))
    # The chain works in many short steps. With the default of 5 ms, a thread that waits for an answer would be
    # scheduled late.
    sys.setswitchinterval(_SWITCH_SECONDS)
    placing = None if cluster is None else cluster(settings)
    metrics = Metrics()
    ProcessCollector(namespace=f"{NAMESPACE}_log_server", registry=metrics.registry)
    host = AppendHost(
        service,
        committed_state_loader(lambda: settings.wal_uri, service),
        pchannels=partial(pchannel_names, settings.data_dir),
        settings=HostSettings(tick_interval=settings.tick_interval),
        metrics=metrics,
        owners=placing,
    )
    retention = None
    if retention_configured(settings):
        retention = LogRetention(settings, service, metrics=host.metrics)
        retention.start()
    flow = FlowMonitor(settings, host, service, metrics=host.metrics)
    flow.start()
    resources = ExitStack()
    run_all = resources.enter_context(ThreadRunner("broadcast"))
    resources.enter_context(follow(settings))
    append = SingleEntryAppender(host, settings.append_deadline)
    catalog = Coordinator(
        settings,
        log=service,
        append=append,
        shared=shared(settings),
        run_all=run_all,
        applied=partial(applied_messages, settings, HostTickSource(host, service)),
    )
    if placing is not None:
        placing.start(catalog.open_term)
    completing = BroadcastRetrier(catalog)
    completing.export(metrics)
    resources.callback(completing.close)
    completing.start()
    tombstones = (
        TombstonePlacer(host, service, lambda: settings.wal_uri) if isinstance(service, GenerationsService) else None
    )
    if tombstones is not None:
        threading.Thread(target=tombstones.resume, name="resume-tombstones", daemon=True).start()
    groups = ConsumerGroups(
        settings.data_dir,
        partial(pchannel_names, settings.data_dir),
        positions=None if positions is None else partial(positions, settings),
        metrics=metrics,
    )
    queues = WorkQueues(
        groups,
        HostTaskSource(settings, catalog, host, service),
        name=dispatcher_name(settings.data_dir),
        metrics=metrics,
    )
    return AppendExtension(
        host,
        retention=retention,
        flow=flow,
        catalog=catalog,
        resources=resources,
        tombstones=tombstones,
        reads=CollectionReads(settings, catalog, host, service),
        histories=HistoryReads(settings, catalog, host),
        groups=groups,
        queues=queues,
        placement=placing,
    )


def committed_state_loader(wal: object, service: LogService) -> Callable[[str], ChannelState]:
    """Return `load_state` for the ``wal`` table at `wal`, a URI or a function that returns it. A PChannel without a
    committed state starts at its log's beginning.

    If the newest state is damaged, an older one is used: the log of `service` leads to the same answers.
    """

    def load(pchannel: str) -> ChannelState:
        try:
            table = WalTable.open(wal() if callable(wal) else wal)
        except TableNotFound:
            return ChannelState.new(pchannel)
        log = service.open(pchannel)
        try:
            return valid_state(table, log, pchannel)
        finally:
            log.close()

    return load


# --- requests and answers -------------------------------------------------------------------------------------------


def _pchannel(request: dict[str, Any], key: str = "pchannel") -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"the request needs {key!r}, the name of a PChannel")
    return value


def _without_principals(stream: ReadStream) -> ReadStream:
    def pieces() -> Iterator[tuple[pa.RecordBatch, bytes]]:
        with closing(stream.pieces) if isinstance(stream.pieces, Generator) else nullcontext():
            for batch, metadata in stream.pieces:
                yield batch.drop_columns(["principal"]), metadata

    place = stream.schema.get_field_index("principal")
    return ReadStream(stream.schema.remove(place), pieces())


def _measure(appends: Sequence[pa.LargeBinaryArray]) -> tuple[int, int]:
    """Return the rows and bytes of appends, for the access log."""
    size = sum(int(values.nbytes) for values in appends)
    try:
        return sum(map(declared_rows, appends)), size
    except UnsupportedVersion:
        return 0, size


def _deadline(request: dict[str, Any]) -> float:
    return min(request_number(request, "deadline", DEFAULT_DEADLINE), MAX_OUTCOME_WAIT)


def _served(part: _Part | None, call: ServerCall) -> _Part:
    """Return the part of the server that answers `call`. Raises InvalidArgument if this server has none."""
    if part is None:
        raise InvalidArgument(f"the append host knows no action {call.key!r}: call the log's server, not a node")
    return part


def _version(request: dict[str, Any]) -> int:
    value = request.get("after", -1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument("'after' of the request must be a version, a whole number")
    return value


def merged_wire_rows(batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """Return rows in their wire form. Batches are merged, since each has two dozen columns on the wire."""
    if not batches:
        return []
    return [to_wire_rows(batches[0] if len(batches) == 1 else pa.concat_batches(batches))]


def wire_tasks(parts: Sequence[TaskPart]) -> list[tuple[pa.RecordBatch, bytes]]:
    """Return leased tasks in their wire form, together those of one schema."""
    groups: list[list[TaskPart]] = []
    for part in parts:
        same = next((group for group in groups if group[0].rows.schema.equals(part.rows.schema)), None)
        if same is None:
            groups.append([part])
        else:
            same.append(part)
    found = []
    for group in groups:
        batches = [part.rows for part in group]
        columns = [np.concatenate([column(part) for part in group]).tolist() for column in _NAMES]
        lanes = [(part.lane, part.rows.num_rows) for part in group]
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        found.append(encode_tasks(rows, lanes, *columns))
    return found


_NAMES: Final[tuple[Callable[[TaskPart], Any], ...]] = (
    lambda part: part.names.ticks,
    lambda part: part.names.ordinals,
    lambda part: part.names.deliveries,
)
_NO_TASKS: Final = pa.RecordBatch.from_pylist([], TASKS_SCHEMA)


def _rows(batches: Sequence[pa.RecordBatch], last: dict[str, Any]) -> ReadStream:
    """Return rows in their wire form as a stream, with `last` as metadata of the last batch."""

    def pieces() -> Iterator[tuple[pa.RecordBatch, bytes]]:
        for batch in batches[:-1]:
            yield batch, b"{}"
        yield (batches[-1] if batches else _EMPTY), to_json(last)

    return ReadStream(TAIL_SCHEMA, pieces())


_EMPTY: Final = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in TAIL_SCHEMA], schema=TAIL_SCHEMA)
