"""Tracks the work of a log server: counts it, refuses new work while stopping, and measures idle time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import pyarrow as pa
from pyarrow import flight

from millrace.rpc.wire import NotAccepted


class Gate:
    """Counts running work, refuses more once closed, and knows how long the server has been idle.

    Work of extensions counts towards activity only: it is neither refused nor waited for here, since extensions end
    it themselves.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0
        self._elsewhere = 0
        self._closed = False
        self._quiet_since = time.monotonic()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Run one piece of work.

        Raises NotAccepted once the gate is closed.
        """
        with self._changed:
            if self._closed:
                raise NotAccepted
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._quiet_since = time.monotonic()
                self._changed.notify_all()

    def track(self, change: int) -> None:
        """Record that work of extensions began (`change` > 0) or ended (< 0)."""
        with self._changed:
            self._elsewhere += change
            self._quiet_since = time.monotonic()

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Run one piece of an extension's work."""
        self.track(1)
        try:
            yield
        finally:
            self.track(-1)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def idle_seconds(self) -> float:
        """Seconds without work; 0 while there is some."""
        with self._changed:
            return 0.0 if self._active or self._elsewhere else time.monotonic() - self._quiet_since

    def close(self, *, timeout: float) -> bool:
        """Refuse new work and wait for running work; False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._active == 0, timeout)


class TrackedStream:
    """Reader and writer of an extension's stream. A request counts as work until it is answered."""

    def __init__(
        self, gate: Gate, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter
    ) -> None:
        self._gate = gate
        self._reader = reader
        self._writer = writer
        self._changing = threading.Lock()
        self._open = 0

    def read_chunk(self) -> flight.FlightStreamChunk:
        chunk = self._reader.read_chunk()
        self._note(1)
        return chunk

    def __iter__(self) -> Self:
        return self

    __next__ = read_chunk

    def begin(self, schema: pa.Schema) -> None:
        self._writer.begin(schema)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self._note(-1)

    def write_metadata(self, metadata: pa.Buffer) -> None:
        self._writer.write_metadata(metadata)
        self._note(-1)

    def finish(self) -> None:
        """End the stream: unanswered requests no longer count as work."""
        self._note(-self._open)

    def _note(self, change: int) -> None:
        with self._changing:
            self._open += change
            self._gate.track(change)
