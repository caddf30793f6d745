r"""The append host inside the log's server process: all clients of a machine share one follower per PChannel.

    python -m millrace.log.server.main.main --data <folder>/log \
        --extension millrace.node.append.server:append_extension

It extends the wire protocol of the log's server (millrace.log.server.main.main). Every command and ticket also has
`"extension": "append"`.

- DoExchange, command `{"pchannel", "pipelined": <bool>}`: each record batch in (column `value`; its metadata is the
  timeout in
  seconds, a little-endian double) is one atomic append. Each record batch of OUTCOME_SCHEMA out is its answer, in
  order. A
  failure is metadata alone, as in the log's own streams. On a pipelined stream, appends that arrive while the log is
  busy
  are appended together, and answers follow as they are decided.
- DoGet, ticket `{"tail": <pchannel>, "after": <tick>, "timeout", "max_bytes"}`: messages (ROW_SCHEMA). The last batch's
  metadata is `{"confirmed": <tick>}` or `{"evicted": <earliest>}`.
- DoGet, ticket `{"read": <collection>, ...}`: its rows (millrace.node.append.collection_reads).
- DoGet, tickets `{"history": <pchannel>}` and `{"imported": <pchannel>}`: messages of the ``wal`` table in pieces, and
  the rows
  of an Import (millrace.node.append.history_reads).
- Action append/metrics: the host's metrics in the Prometheus text format.
- Action append/flow: the state of flow control.
- Action append/catalog `{"call", "arguments"}`: the catalog and DDL (millrace.catalog.calls).
- Action append/assignments `{"after"}`: the owners of PChannels, if nodes take the appends (AppendPlacement).
- Actions append/tick `{"pchannel", "deadline", "persist"}` and append/confirm `{"pchannel", "tick", "deadline"}`.
- Action append/definitions `{"pchannel", "collection_id", "deadline"}` (millrace.wal.definitions).
- Actions append/describe and append/restart `{"pchannel"}`; append/mvcc `{"vchannel"}`.
- Actions append/history `{"pchannel", "confirmed_at"}` and append/checkpointed `{"pchannel", "collection_id"}`
  (millrace.node.append.history_reads).
- Actions append/group and append/drop_group (millrace.node.append.consumer_groups).
- Action append/tombstone (millrace.node.append.tombstones).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
from prometheus_client import ProcessCollector
from pyarrow import flight

from millrace.access.grants import LOCAL_ADMIN, Caller, Resource, ResourceKind, Role
from millrace.base.errors import InvalidArgument, LogUnavailable, PermissionDenied, TableNotFound
from millrace.base.metrics import NAMESPACE, Metrics
from millrace.base.settings import Settings
from millrace.catalog.calls import dispatch
from millrace.catalog.sqlite_file import pchannel_names
from millrace.client.consume.positions import PositionStore
from millrace.coord.append_port import SingleEntryAppender
from millrace.coord.broadcast_retrier import BroadcastRetrier
from millrace.coord.concurrency import ThreadRunner
from millrace.coord.coordinator import Coordinator
from millrace.coord.coordinator_db import SharedStore
from millrace.log.generations.service import GenerationsService
from millrace.log.protocol import LogService
from millrace.node.append.append_stream import (
    MAX_OUTCOME_WAIT,
    PipelinedStream,
    next_append,
    result_or_failure,
    write_answer,
)
from millrace.node.append.authorizer import AppendAuthorizer, readable_rows, vchannel_resources
from millrace.node.append.collection_reads import CollectionReads
from millrace.node.append.consumer_groups import ConsumerGroups
from millrace.node.append.flow_monitor import FlowMonitor
from millrace.node.append.history_reads import HistoryReads
from millrace.node.append.host import AppendForwarder, AppendHost, HostSettings
from millrace.node.append.pending import PendingOutcome
from millrace.node.append.tombstones import TombstonePlacer
from millrace.node.retention.log_retention import LogRetention, retention_configured
from millrace.rpc.outcome import OUTCOME_SCHEMA
from millrace.rpc.tail import TAIL_SCHEMA, Evicted, to_wire_rows
from millrace.rpc.wire import (
    APPEND_ROLE,
    DEFAULT_DEADLINE,
    NotAccepted,
    from_json,
    log_id,
    request_number,
    to_json,
)
from millrace.tables.wal.state_check import valid_state
from millrace.tables.wal.table import WalTable
from millrace.wal.state import ChannelState

MAX_TAIL_WAIT: Final = 10.0
MAX_WAITING: Final = 256
"""Limit of waiting tail readers, each in a server thread. Further ones are answered at once."""
_SWITCH_SECONDS: Final = 0.0005


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
    """What the log's server of a deployment knows of its nodes."""

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
        placement: AppendPlacement | None = None,
        resources: ExitStack | None = None,
    ) -> None:
        """Serve `host` with the given helpers.

        `behind` is closed after the host, because it waits for answers of the host.
        """
        self._behind = ExitStack() if resources is None else resources
        self._histories = histories
        self._streams = {} if reads is None else {"read": reads.stream}
        if histories is not None:
            self._streams |= {"history": histories.stream, "imported": histories.imported}
        self._groups = groups
        self._placing = placement
        self._host = host
        self._catalog = catalog
        self._tombstones = tombstones
        self._retention = retention
        self._flow = flow
        self._closing = False
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def do_exchange(
        self,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        caller: Caller,
    ) -> None:
        command = from_json(descriptor.command or b"")
        pchannel = _pchannel(command)
        door = AppendAuthorizer(caller, self._collection_of)
        writer.begin(OUTCOME_SCHEMA)
        if command.get("pipelined"):
            PipelinedStream(partial(self.submit, pchannel, door=door), reader, writer).serve()
            return
        while (request := next_append(reader)) is not None:
            values, timeout = request
            write_answer(writer, result_or_failure(partial(self.submit_one, pchannel, values, door)), timeout)

    def submit_one(self, pchannel: str, values: pa.LargeBinaryArray, door: AppendAuthorizer) -> PendingOutcome:
        """Append one batch. Raises NotAccepted while the server stops."""
        return self.submit(pchannel, [values], door)[0]

    def submit(
        self, pchannel: str, appends: Sequence[pa.LargeBinaryArray], door: AppendAuthorizer
    ) -> list[PendingOutcome]:
        """Append several batches as one. Returns the pending outcome of each.

        Raises NotAccepted while the server stops, AssignmentStale if a node owns the PChannel, RateLimited, and errors of
        the
        authorizer.
        """
        if self._closing:
            raise NotAccepted
        if self._flow is not None:
            self._flow.admit(appends)
        try:
            if self._placing is None:
                return self._host.submit_all(pchannel, appends, authorize=door.authorize)
            with self._placing.appending(pchannel):
                return self._host.submit_all(pchannel, appends, authorize=door.authorize)
        except PermissionDenied:
            if len(appends) == 1:  # of several, each is submitted again
                self.denied(f"{APPEND_ROLE}/do_exchange")
            raise

    def _collection_of(self, vchannel: str) -> str | None:
        return None if self._catalog is None else self._catalog.collection_of(vchannel)

    def do_get(self, ticket: flight.Ticket, caller: Caller) -> flight.FlightDataStream:
        request = from_json(ticket.ticket)
        for key in self._streams.keys() & request.keys():
            with self._open():
                try:
                    return self._streams[key](request, caller)
                except PermissionDenied:
                    self.denied(f"{APPEND_ROLE}/do_get")
                    raise
        pchannel = _pchannel(request, "tail")
        timeout = min(request_number(request, "timeout", 0.0), MAX_TAIL_WAIT)
        after, max_bytes = int(request_number(request, "after", 0)), int(request_number(request, "max_bytes", 8 << 20))
        with self._open():
            can_wait = self._waiting.acquire(blocking=False)
            try:
                found = self._host.tail(pchannel, after, timeout=timeout if can_wait else 0.0, max_bytes=max_bytes)
            finally:
                if can_wait:
                    self._waiting.release()
        if isinstance(found, Evicted):
            return _rows([], {"evicted": found.earliest})
        shown = found.batches
        if not caller.principal.has_role((Role.READ,), (Resource(ResourceKind.PCHANNEL, pchannel),)):
            shown = [readable_rows(batch, caller, self._collection_of) for batch in shown]
        return _rows(shown, {"confirmed": found.confirmed_tick})

    def do_action(self, action: flight.Action, caller: Caller) -> Sequence[bytes]:
        if action.type == f"{APPEND_ROLE}/metrics":
            return [self._host.metrics.render() if self._host.metrics is not None else b""]
        if action.type == f"{APPEND_ROLE}/flow":
            return [to_json({} if self._flow is None else self._flow.control.describe())]
        request = from_json(action.body.to_pybytes())
        if action.type == f"{APPEND_ROLE}/catalog" and self._catalog is not None:
            arguments = request.get("arguments") or {}
            if not isinstance(arguments, dict):
                raise InvalidArgument("'arguments' of the request must be a JSON object")
            with self._open():
                return [to_json(dispatch(self._catalog, str(request.get("call")), arguments, caller))]
        if action.type == f"{APPEND_ROLE}/mvcc":
            vchannel = _pchannel(request, "vchannel")
            caller.principal.require_role((Role.READ,), vchannel_resources(vchannel, self._collection_of), action.type)
            with self._open():
                return [to_json(self._host.mvcc(vchannel)._asdict())]
        if action.type == f"{APPEND_ROLE}/assignments":
            if self._placing is None:
                return [to_json({"version": 0, "whole": True, "assignments": []})]
            with self._open():
                return [to_json(self._placing.assignments(after=_version(request), trusted=caller is LOCAL_ADMIN))]
        if action.type == f"{APPEND_ROLE}/group" and self._groups is not None:
            with self._open():
                return [to_json(self._groups.handle(request))]
        if action.type == f"{APPEND_ROLE}/drop_group" and self._groups is not None:
            with self._open():
                self._groups.drop(request)
                return [to_json({})]
        pchannel = _pchannel(request)
        deadline = min(request_number(request, "deadline", DEFAULT_DEADLINE), MAX_OUTCOME_WAIT)
        answer: dict[str, Any] = {}
        with self._open():
            match action.type.partition("/")[2]:
                case "tick":
                    answer["tick"] = self._tick(pchannel, request, deadline)
                case "confirm":
                    answer["tick"] = self._host.confirm(
                        pchannel, int(request_number(request, "tick", 0)), deadline=deadline
                    )
                case "describe":
                    answer = self._host.describe(pchannel)
                case "definitions":
                    wanted = (
                        None
                        if request.get("collection_id") is None
                        else int(request_number(request, "collection_id", 0))
                    )
                    answer = self._host.definitions(pchannel, wanted, deadline=deadline).to_json()
                case "history" if self._histories is not None:
                    answer = self._histories.describe(pchannel, request)
                case "checkpointed" if self._histories is not None:
                    answer = self._histories.checkpointed(pchannel, request, caller)
                case "restart":
                    self._host.restart(pchannel)
                case "tombstone" if self._tombstones is not None:
                    answer = self._tombstone(pchannel, request, caller)
                case name:
                    raise InvalidArgument(f"the append host knows no action {name!r}")
        return [to_json(answer)]

    def _tick(self, pchannel: str, request: dict[str, Any], deadline: float) -> int:
        """Append a time tick, or only read the current one (`persist` false).

        The log's server forwards the call to the PChannel's owner. A forwarded call, and any call at a node, is refused
        as stale if
        this process is not the owner: two servers that each take the other for the owner would otherwise call each
        other forever.
        """
        persist, forwarded = request.get("persist", True) is not False, request.get("forwarded") is True
        if not persist or self._placing is None or (self._host.forwards and not forwarded):
            return self._host.tick(pchannel, persist=persist, deadline=deadline)
        with self._placing.appending(pchannel):
            return self._host.tick(pchannel, deadline=deadline, forward=False)

    def _tombstone(self, pchannel: str, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        assert self._tombstones is not None
        entry, sha256 = log_id(request.get("entry")), request.get("sha256")
        if sha256 is None:
            return self._tombstones.inspect(pchannel, entry)
        said = {name: str(request.get(name, "")) for name in ("author", "reason")}
        if caller is not LOCAL_ADMIN:
            said["author"] = caller.principal.name  # the token's owner, whatever the request says
        return self._tombstones.place(pchannel, entry, sha256=str(sha256), **said).to_json()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Enclose a call that may be repeated elsewhere. While the server stops, it is answered "not taken"."""
        if self._closing:
            raise NotAccepted
        try:
            yield
        except LogUnavailable:
            if self._closing:
                raise NotAccepted from None
            raise

    def check(self, pchannel: str, values: pa.LargeBinaryArray, *, alone: bool) -> None:
        if self._host.check(pchannel, values, counted=alone) and self._placing is not None:
            with self._placing.appending(pchannel):
                pass  # appends past the host also go to the log of the PChannel's owner

    def truncated(self, pchannel: str, freed: int) -> None:
        if self._host.metrics is not None:
            self._host.metrics.truncated_bytes_total.labels(pchannel).inc(freed)

    def denied(self, call: str) -> None:
        if self._host.metrics is not None:
            self._host.metrics.log_denied_calls_total.labels(call).inc()

    def close(self) -> None:
        self._closing = True
        # Close the host before helpers that may wait for its decisions: a term that is being opened ends with it.
        for helper in (self._retention, self._flow, self._groups, self._host, self._placing):
            if helper is not None:
                helper.close()
        self._behind.close()
        if self._catalog is not None:
            self._catalog.close()


def append_extension(
    service: LogService,
    folder: Path,
    *,
    cluster: Callable[[Settings], ClusterPlacement] | None = None,
    positions: Callable[[Settings], PositionStore] | None = None,
    shared: Callable[[Settings], SharedStore | None] = lambda settings: None,
) -> AppendExtension:
    """Make the extension of a log server's process. It follows from the newest state in the ``wal`` table.

    `cluster` makes the placement of appends, in a deployment whose nodes may take them. `positions` opens the positions
    of
    consumer groups. `shared` opens the store of which the catalog is a copy.
    """
    settings = replace(Settings.load(), data_dir=folder.absolute().parent)
    wal = settings.wal_uri
    # The chain works in many short steps. With the default of 5 ms, a thread that waits for an answer would be
    # scheduled late.
    sys.setswitchinterval(_SWITCH_SECONDS)
    placing = None if cluster is None else cluster(settings)
    metrics = Metrics()
    ProcessCollector(namespace=f"{NAMESPACE}_log_server", registry=metrics.registry)
    host = AppendHost(
        service,
        committed_state_loader(wal, service),
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
    behind = ExitStack()
    together = behind.enter_context(ThreadRunner("broadcast"))
    append = SingleEntryAppender(host, settings.append_deadline)
    catalog = Coordinator(settings, log=service, append=append, shared=shared(settings), run_all=together)
    if placing is not None:
        placing.start(catalog.open_term)
    completing = BroadcastRetrier(catalog)
    behind.callback(completing.close)
    completing.start()
    tombstones = TombstonePlacer(host, service, wal) if isinstance(service, GenerationsService) else None
    if tombstones is not None:
        threading.Thread(target=tombstones.resume, name="resume-tombstones", daemon=True).start()
    return AppendExtension(
        host,
        retention=retention,
        flow=flow,
        catalog=catalog,
        resources=behind,
        tombstones=tombstones,
        reads=CollectionReads(settings, catalog, host, service),
        histories=HistoryReads(settings, catalog, host),
        groups=ConsumerGroups(
            settings.data_dir,
            partial(pchannel_names, settings.data_dir),
            positions=None if positions is None else partial(positions, settings),
        ),
        placement=placing,
    )


def committed_state_loader(wal: object, service: LogService) -> Callable[[str], ChannelState]:
    """Return `load_state` for the ``wal`` table at `wal`. A PChannel without a committed state starts at its log's
    beginning.

    If the newest state is damaged, an older one is used: the log of `service` leads to the same answers.
    """

    def load(pchannel: str) -> ChannelState:
        try:
            table = WalTable.open(wal)
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


def _version(request: dict[str, Any]) -> int:
    value = request.get("after", -1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument("'after' of the request must be a version, a whole number")
    return value


def _rows(batches: Sequence[pa.RecordBatch], last: dict[str, Any]) -> flight.GeneratorStream:
    """Return rows as a stream. Small batches are merged, since each has two dozen columns on the wire."""
    plain = [to_wire_rows(batch) for batch in batches]
    if len(plain) > 1:
        plain = pa.Table.from_batches(plain).combine_chunks().to_batches()

    def pieces() -> Iterator[tuple[pa.RecordBatch, bytes]]:
        for batch in plain[:-1]:
            yield batch, b"{}"
        yield (plain[-1] if plain else _EMPTY), to_json(last)

    return flight.GeneratorStream(TAIL_SCHEMA, pieces())


_EMPTY: Final = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in TAIL_SCHEMA], schema=TAIL_SCHEMA)
