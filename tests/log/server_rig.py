"""A log server in the test's own process, over a log in memory that counts its appends and can be held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
from pyarrow import flight

from millrace.access.access_log import AccessLog, ReadStream
from millrace.access.grants import Caller, Role
from millrace.access.permissions import Scope
from millrace.base.errors import (
    AppendRejected,
    ChannelExists,
    ChannelNotFound,
    EntryTooLarge,
    PositionTruncated,
)
from millrace.log.server.connections import ConnectionLimits
from millrace.log.server.flight import LogServer, ReadLimits
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogDescription, LogEntries
from millrace.rpc.calls import SERVER_CALLS, ServerCall
from millrace.rpc.discovery import ServerRecord, write_record
from millrace.rpc.link import Link, Watchdog
from millrace.rpc.remote_log import RemoteLog, RemoteLogService

LARGEST = 1 << 20
PATIENCE = 20.0


class MemoryLog:
    """A log that counts its appends and can be held up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: list[bytes] = []
        self._begin = 0
        self.append_sizes: list[int] = []
        self.may_append = threading.Event()
        self.may_append.set()
        self.arrived = threading.Semaphore(0)
        self.failure: Exception | None = None

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> list[LogId]:
        plain = values.to_pylist() if isinstance(values, pa.Array) else list(values)
        self.arrived.release()
        assert self.may_append.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        if any(len(value) > LARGEST for value in plain):
            raise EntryTooLarge("split it")
        with self._changed:
            first = len(self._values)
            self._values += plain
            self.append_sizes.append(len(plain))
            self._changed.notify_all()
        return [LogId(0, first + offset) for offset in range(len(plain))]

    def read(
        self, position: LogId, *, end: LogId | None = None, max_bytes: int = 64 << 20, timeout: float = 0.0
    ) -> LogEntries:
        with self._changed:
            if position < LogId(0, self._begin):
                raise PositionTruncated("retention took it", earliest=LogId(0, self._begin))
            self._changed.wait_for(lambda: len(self._values) > position.entry, timeout)
            stop = len(self._values) if end is None else min(end.entry, len(self._values))
            rows, size = [], 0
            for entry in range(position.entry, stop):
                size += len(self._values[entry])
                if rows and size > max_bytes:
                    break
                rows.append({"ledger": 0, "entry": entry, "physical_ms": 1, "value": self._values[entry]})
            batch = pa.RecordBatch.from_pylist(rows, schema=ENTRY_SCHEMA)
            return LogEntries(batch, LogId(0, position.entry + len(rows)))

    def truncate(self, position: LogId) -> int:
        freed = sum(map(len, self._values[self._begin : position.entry]))
        self._begin = position.entry
        return freed

    def describe(self) -> LogDescription:
        return LogDescription(LogId(0, self._begin), LogId(0, len(self._values)), sum(map(len, self._values)))

    def end(self) -> LogId:
        return self.describe().end

    def close(self) -> None:
        pass


class MemoryService:
    def __init__(self) -> None:
        self.logs: dict[str, MemoryLog] = {}
        self.closed = False

    def create(self, pchannel: str) -> None:
        if pchannel in self.logs:
            raise ChannelExists(pchannel)
        self.logs[pchannel] = MemoryLog()

    def open(self, pchannel: str) -> MemoryLog:
        if pchannel not in self.logs:
            raise ChannelNotFound(pchannel)
        return self.logs[pchannel]

    def names(self) -> list[str]:
        return sorted(self.logs)

    def drop(self, pchannel: str) -> None:
        if self.logs.pop(pchannel, None) is None:
            raise ChannelNotFound(pchannel)

    def denied(self, call: str) -> None:
        return None

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


ECHOED = {
    name: ServerCall(name=name, roles=(Role.ADMIN,), scope=Scope.EVERYTHING)
    for name in ("echo/do_exchange", "echo/do_get", "echo/back", "echo/refuse")
}


class EchoExtension:
    name = "echo"

    def __init__(self) -> None:
        self.closed = False
        self.freed: list[tuple[str, int]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def do_exchange(
        self,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        caller: Caller,
    ) -> None:
        for chunk in reader:
            assert self.may_answer.wait(PATIENCE)
            writer.write_metadata(chunk.app_metadata)

    def do_get(self, ticket: flight.Ticket, caller: Caller) -> ReadStream:
        batch = pa.RecordBatch.from_pydict({"ticket": [ticket.ticket]})
        return ReadStream(batch.schema, iter([(batch, b"")]))

    def do_action(self, action: flight.Action, caller: Caller) -> Sequence[bytes]:
        assert self.may_answer.wait(PATIENCE)
        if action.type == "echo/refuse":
            raise AppendRejected("not today", reason="TOO_LARGE")
        return [action.body.to_pybytes()]

    def admit(self, pchannel: str, values: pa.LargeBinaryArray, caller: Caller, *, alone: bool) -> pa.LargeBinaryArray:
        return values

    def use_access_log(self, access_log: AccessLog) -> None:
        pass

    def truncated(self, pchannel: str, freed: int) -> None:
        self.freed.append((pchannel, freed))

    def close(self) -> None:
        self.closed = True


class Rig:
    """A server in this process and a client of it."""

    def __init__(
        self,
        folder: Path,
        limits: ReadLimits | None = None,
        deadline: float = PATIENCE,
        connections: ConnectionLimits | None = None,
    ) -> None:
        self.engine = MemoryService()
        self.extension = EchoExtension()
        self.record = ServerRecord.of_this_process("")
        self.server = LogServer(
            self.engine,
            tokens=[self.record.token],
            registry=SERVER_CALLS | ECHOED,
            extensions=[self.extension],
            limits=limits or ReadLimits(),
            connections=connections,
        )
        self.record = replace(self.record, address=self.server.address)
        self.published = write_record(folder, self.record)
        self.service = RemoteLogService.connect(folder, start=False, deadline=deadline)

    def log(self, pchannel: str = "p0") -> tuple[RemoteLog, MemoryLog]:
        self.service.create(pchannel)
        return self.service.open(pchannel), self.engine.logs[pchannel]

    @contextmanager
    def link(self, record: ServerRecord | None = None) -> Iterator[Link]:
        watchdog = Watchdog()
        link = Link(record or self.record, watchdog)
        try:
            yield link
        finally:
            link.close()
            watchdog.close()

    def close(self) -> None:
        self.service.close()
        if not self.engine.closed:
            self.server.close(timeout=1.0)
        self.server.wait()


def values_of(entries: LogEntries) -> list[bytes]:
    found: list[bytes] = entries.batch.column("value").to_pylist()
    return found
