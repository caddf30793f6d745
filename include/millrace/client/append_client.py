"""Client of the append host: results and typed rejections in milliseconds, from any process.

    with AppendClient.connect(settings.data_dir) as client:
        result = client.append("p0", encode_entry([message]), deadline=5.0).result()

The client finds the server through the data folder and starts it if none runs. It sends an append once and never
resends it. LogUnavailable means that the answer was lost: the append is in the log once or not at all. DeadlineExceeded
means that it was not decided in time. In both cases the caller may append the same bytes again if its messages carry a
producer sequence: they take effect once, and the repeat gets the first result (law 8). Never resend messages without a
producer sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.data_folder import prepare_data_folder
from millrace.base.deadline import Deadline
from millrace.base.errors import LogUnavailable, MillraceError, NotSupportedRemotely
from millrace.catalog.collection import CollectionInfo
from millrace.client.channel_router import MARGIN, ChannelRouter
from millrace.message.ids import MessageId
from millrace.rpc import calls
from millrace.rpc.append_pipeline import PIPELINE_APPENDS, PIPELINE_BYTES, AppendPipeline, Entries, as_values
from millrace.rpc.calls import ServerCall
from millrace.rpc.launch import DEFAULT_LAUNCH, ServerLaunch
from millrace.rpc.link import ConnectionLost, Link
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.selection import Selection, keys_to_text
from millrace.rpc.tail import DecidedMessages, Evicted, Mvcc, TailBatch, TimeTick, from_wire_rows
from millrace.rpc.tasks import LeasedTasks, TaskNews, WireTasks, decode_tasks
from millrace.rpc.wire import APPEND_ROLE, DEFAULT_DEADLINE, error_from_bytes
from millrace.wal.definitions import PChannelDefinitions

READ_SECONDS: Final = 600.0
"""Timeout for the transfer of a collection's rows."""


class AppendClient(Closeable):
    """A connection to the append host of one data folder, for calls, catalog calls and reads. Thread-safe.

    It sends an append once, through the route to the PChannel's owner.
    """

    def __init__(self, service: RemoteLogService) -> None:
        self.service = service
        self.router = ChannelRouter(service)
        """Routes each PChannel's appends to the node that owns it."""

    @classmethod
    def connect(
        cls,
        data_dir: str | Path,
        *,
        start: bool = True,
        now: bool = True,
        deadline: float = DEFAULT_DEADLINE,
        idle_timeout: float | None = None,
        launch: ServerLaunch = DEFAULT_LAUNCH,
    ) -> Self:
        """Connect to the log in `<data_dir>/log`.

        With `start`, start the server if none runs, as `launch` says; `launch` must include the append host. Without
        `now`, the first call that needs the server looks for it.

        Raises LogUnavailable if no server runs and `start` is False, or the error that kept the server from starting.
        Raises UnsafeDataFolder.
        """
        if idle_timeout is not None:
            launch = replace(launch, idle_timeout=idle_timeout)
        if start:
            prepare_data_folder(Path(data_dir))
        folder = Path(data_dir) / "log"
        if not now:
            return cls(RemoteLogService(folder.absolute(), start=start, deadline=deadline, launch=launch))
        return cls(RemoteLogService.connect(folder, start=start, deadline=deadline, launch=launch))

    def call(self, call: ServerCall, request: Mapping[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        """Make a call of the registry (millrace.rpc.calls) within `seconds` (default: the deadline of `connect`)."""
        limit = self.service.deadline if seconds is None else seconds
        return self.service.call(call, request, seconds=limit, margin=MARGIN)

    def append(
        self,
        pchannel: str,
        entries: Entries,
        *,
        deadline: float | None = None,
    ) -> AppendOutcome:
        """Append entries as one atomic batch and return the chain's decision about each message.

        `deadline` is in seconds (default: that of `connect`).

        Raises LogUnavailable and DeadlineExceeded, both ambiguous (see the module's docstring).
        Raises ChannelNotFound, EntryTooLarge, or the error that parked the PChannel.
        """
        seconds = self.service.deadline if deadline is None else deadline
        return self.router.route(pchannel).append(as_values(entries), Deadline.after(seconds))

    def append_stream(
        self,
        pchannel: str,
        *,
        appends: int = PIPELINE_APPENDS,
        bytes: int = PIPELINE_BYTES,
        deadline: float | None = None,
    ) -> AppendPipeline[AppendOutcome]:
        """Open a pipeline for one producer's appends, which are sent in order before earlier ones are decided.

        At most `appends` appends or `bytes` bytes are in flight. `deadline` bounds the wait for each answer, in seconds
        (default: that of `connect`). The caller resends what failed as ambiguous, in order and with the same sequences.
        """
        return self.router.route(pchannel, deadline=deadline).pipeline(appends=appends, bytes=bytes)

    def tick(self, pchannel: str, *, persist: bool = True, deadline: float = DEFAULT_DEADLINE) -> int:
        """Append a time tick and return a tick up to which every earlier append is decided.

        Without `persist`, append nothing.
        """
        request = {"pchannel": pchannel, "deadline": deadline, "persist": persist}
        return int(self.call(calls.TICK, request, seconds=deadline)["tick"])

    def time_tick(
        self,
        pchannel: str,
        *,
        tick: int = 0,
        persist: bool = True,
        source_id: int = 0,
        deadline: float = DEFAULT_DEADLINE,
    ) -> TimeTick:
        """Make a time tick, of exactly `tick` if given; see :meth:`millrace.node.append.host.AppendHost.time_tick`."""
        request = {"pchannel": pchannel, "deadline": deadline, "persist": persist, "tick": tick, "source_id": source_id}
        found = self.call(calls.TICK, request, seconds=deadline)
        if "last_confirmed" not in found:  # a server of an earlier build: starting at the beginning misses nothing
            begin = MessageId(0, 0, 0, 0)
            return TimeTick(int(found["tick"]), begin, begin, persist)
        confirmed, own = (MessageId(*found[name]) for name in ("last_confirmed", "id"))
        return TimeTick(int(found["tick"]), confirmed, own, bool(found["persisted"]), int(found["term"]))

    def mvcc(self, vchannel: str) -> Mvcc:
        """Return the tick up to which a VChannel is readable now.

        Raises InvalidArgument, ChannelNotFound, or the error that parked its PChannel.
        """
        return Mvcc(**self.call(calls.MVCC, {"vchannel": vchannel}))

    def confirm(self, pchannel: str, tick: int, *, deadline: float = DEFAULT_DEADLINE) -> int:
        """Wait until everything up to `tick` is decided and return the confirmed tick.

        Raises DeadlineExceeded.
        """
        request = {"pchannel": pchannel, "tick": tick, "deadline": deadline}
        return int(self.call(calls.CONFIRM, request, seconds=deadline)["tick"])

    def describe(self, pchannel: str) -> dict[str, Any]:
        """Describe the append host's state for a PChannel: position, last_tick, term, parked."""
        return self.call(calls.DESCRIBE_HOST, {"pchannel": pchannel})

    def describe_all(self) -> dict[str, dict[str, Any]]:
        """Describe the append host's state and the log of every PChannel, in one call: see
        :meth:`millrace.node.append.host.AppendHost.describe_all`.
        """
        found: dict[str, dict[str, Any]] = self.call(calls.DESCRIBE_HOSTS, {})["channels"]
        return found

    def definitions(
        self, pchannel: str, collection_id: int | None, *, deadline: float = DEFAULT_DEADLINE
    ) -> PChannelDefinitions:
        """Return the chain's definitions of collections on a PChannel.

        See :meth:`millrace.node.append.host.AppendHost.definitions`.
        """
        request = {"pchannel": pchannel, "collection_id": collection_id, "deadline": deadline}
        return PChannelDefinitions.from_json(self.call(calls.DEFINITIONS, request, seconds=deadline))

    def catalog(self, call: str, arguments: Mapping[str, Any], *, repeat: bool) -> dict[str, Any]:
        """Call the catalog on the host (millrace.catalog.calls).

        A call that changes something must have `repeat` False: if its answer is lost, it raises LogUnavailable, and the
        change may have taken effect. Raises what the call raises.
        """
        request, seconds = {"call": call, "arguments": dict(arguments)}, self.service.deadline

        def act(link: Link, deadline: Deadline) -> dict[str, Any]:
            return link.act(calls.CATALOG.name, request, timeout=seconds)

        if repeat:
            return self.service.call_with_retry(act, seconds=seconds)
        return self.service.call_once(act, seconds=seconds, what=f"whether {call} took effect is unknown")

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> TailBatch | Evicted:
        """Return the messages after `after_tick` from the host's buffer.

        Waits up to `timeout` seconds (at most 10) for a message.
        """
        request = {
            "extension": APPEND_ROLE,
            "tail": pchannel,
            "after": after_tick,
            "timeout": timeout,
            "max_bytes": max_bytes,
            "principals": True,
        }
        batches, metadata = self.service.call_with_retry(
            lambda link, deadline: link.get(request, timeout=timeout + self.service.deadline),
            seconds=self.service.deadline + timeout,
        )
        if "evicted" in metadata:
            return Evicted(int(metadata["evicted"]))
        return TailBatch([from_wire_rows(batch) for batch in batches if batch.num_rows], int(metadata["confirmed"]))

    def decided(
        self, collection_id: int, after: Mapping[str, int], *, at: int | None, max_bytes: int
    ) -> DecidedMessages:
        """Return what a read of a collection takes from its PChannels' tails, in one call: see
        :meth:`millrace.node.append.host.AppendHost.decided`.

        Raises InvalidArgument if the server runs an older build.
        """
        seconds = self.service.deadline
        request = {
            "extension": APPEND_ROLE,
            "decided": dict(after),
            "collection_id": collection_id,
            "at": at,
            "max_bytes": max_bytes,
            "deadline": seconds,
        }

        def act(link: Link, deadline: Deadline) -> tuple[list[tuple[pa.RecordBatch, dict[str, Any]]], dict[str, Any]]:
            _, parts = link.parts(request, timeout=seconds + MARGIN)
            found = [(batch, said or {}) for batch, said in parts]
            return found[:-1], found[-1][1]

        parts, last = self.service.call_with_retry(act, seconds=seconds)
        messages: dict[str, list[pa.RecordBatch]] = {name: [] for name in after}
        for batch, said in parts:
            messages[said["pchannel"]].append(from_wire_rows(batch))
        return DecidedMessages(last["ticks"], messages, last["complete"])

    def take_tasks(self, request: dict[str, Any], *, seconds: float) -> LeasedTasks:
        """Lease tasks of a work queue; see :meth:`millrace.node.append.work_queues.WorkQueues.take`."""
        asked = {"extension": APPEND_ROLE, **request}

        def act(link: Link, deadline: Deadline) -> tuple[list[WireTasks], dict[str, Any]]:
            _, parts = link.parts(asked, timeout=seconds + MARGIN)
            found = [(batch, said or {}) for batch, said in parts]
            return [decode_tasks(batch, said) for batch, said in found[:-1]], found[-1][1]

        tasks, last = self.service.call_with_retry(act, seconds=seconds)
        session = int(last.get("session", 0))  # a server of an earlier build knows no sessions
        return LeasedTasks(int(last["number"]), tasks, int(last["lanes"]), str(last["reason"]), session)

    def task_news(self, request: dict[str, Any], *, seconds: float) -> TaskNews:
        """Wait for tasks of all consumers of a session: :meth:`millrace.node.append.work_queues.WorkQueues.news`."""
        found = self.call(calls.TASK_NEWS, request, seconds=seconds)
        ready = [(str(group), str(consumer)) for group, consumer in found["ready"]]
        return TaskNews(int(found["number"]), int(found["session"]), ready)

    def settle_tasks(self, request: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Acknowledge, renew and release tasks; see :meth:`millrace.node.append.work_queues.WorkQueues.handle`."""
        return self.call(calls.SETTLE_TASKS, request, seconds=seconds)

    def group_heartbeats(
        self, members: Sequence[dict[str, Any]], *, seconds: float
    ) -> Sequence[dict[str, Any] | MillraceError]:
        """Renew memberships: :meth:`millrace.node.append.consumer_groups.ConsumerGroups.heartbeats`.

        Raises InvalidArgument if the server runs an older build.
        """
        answers = self.call(calls.GROUP_HEARTBEATS, {"members": list(members)}, seconds=seconds)["answers"]
        return [error_from_bytes(each["error"].encode()) if "error" in each else each for each in answers]

    def read(
        self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection
    ) -> pa.RecordBatchReader:
        """Stream the selected rows of a collection at a tick, or as of now, from the server's tables.

        The server waits up to `seconds` (at most 60) for its tables to reach the tick. Closing or dropping the reader
        ends the server's work.

        Raises what the server's read raises, ServerFull, LogUnavailable.
        """
        request = self._reading(collection, at, seconds) | selection.to_json()
        return self._rows(request, seconds, "selected" if selection.to_json() else "")

    def get(
        self,
        collection: CollectionInfo,
        keys: pa.RecordBatch,
        *,
        at: int | None,
        seconds: float,
        columns: Sequence[str] | None,
    ) -> pa.RecordBatchReader:
        """Stream the rows of primary keys, given as the key's fields in order, as :meth:`read` does."""
        selection = Selection(columns=None if columns is None else tuple(columns))
        request = self._reading(collection, at, seconds) | selection.to_json() | {"keys": keys_to_text(keys)}
        return self._rows(request, seconds, "keyed")

    def history(
        self,
        collection: CollectionInfo,
        keys: pa.RecordBatch,
        *,
        after: int | None,
        until: int | None,
        seconds: float,
        columns: Sequence[str] | None,
    ) -> pa.RecordBatchReader:
        """Stream the changes of the rows of primary keys, given as the key's fields in order."""
        selection = Selection(columns=None if columns is None else tuple(columns))
        request = self._reading(collection, until, seconds) | selection.to_json() | {"keys": keys_to_text(keys)}
        return self._rows(request | {"changes": True, "after": after}, seconds, "changes")

    def _rows(self, request: dict[str, Any], seconds: float, answers: str) -> pa.RecordBatchReader:
        schema, parts = self.service.call_with_retry(
            lambda link, deadline: link.parts(request, timeout=seconds + READ_SECONDS), seconds=seconds + READ_SECONDS
        )
        return pa.RecordBatchReader.from_batches(schema, _complete_batches(parts, answers))

    def count(self, collection: CollectionInfo, *, at: int | None, seconds: float, where: str | None) -> int:
        """Count the rows that :meth:`read` would return."""
        request = self._reading(collection, at, seconds) | {"where": where, "count": True}
        _, metadata = self.service.call_with_retry(
            lambda link, deadline: link.get(request, timeout=seconds + READ_SECONDS), seconds=seconds + READ_SECONDS
        )
        if "counted" not in metadata:
            raise NotSupportedRemotely(_OLDER)
        return int(metadata["counted"])

    def _reading(self, collection: CollectionInfo, at: int | None, seconds: float) -> dict[str, Any]:
        return {"extension": APPEND_ROLE, "read": collection.name, "at": at, "deadline": seconds}

    def close(self) -> None:
        """Close the connection; the server keeps running. Idempotent."""
        self.router.close()
        self.service.close()


_OLDER: Final = "the server runs an older build, which only returns whole collections: select from the result of `read`"


def _complete_batches(
    parts: Iterator[tuple[pa.RecordBatch, dict[str, Any] | None]], answers: str
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an answer. `answers` is what a server says that understood the request.

    Raises LogUnavailable if the answer breaks off, NotSupportedRemotely if an older server ignored the selection.
    """
    rows, announced = 0, None
    try:
        for batch, metadata in parts:
            if answers and not (metadata or {}).get(answers):
                raise NotSupportedRemotely(_OLDER)
            rows, announced = rows + batch.num_rows, (metadata or {}).get("rows")
            if batch.num_rows:
                yield batch
    except ConnectionLost as error:
        raise LogUnavailable(f"the server's answer broke off after {rows:,} rows ({error}): read again") from error
    if rows != announced:
        raise LogUnavailable(f"the server's answer broke off after {rows:,} rows: read again")
