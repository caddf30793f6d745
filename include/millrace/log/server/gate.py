"""What work is under way in a log server: counted, refused once it stops, and timed where there is none."""

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
    """Counts the work under way, refuses more once closed, and knows how long there was none.

    Work of extensions counts while it lasts, but is neither refused nor waited for here: they end it themselves.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0
        self._elsewhere = 0
        self._closed = False
        self._quiet_since = time.monotonic()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Do one piece of work inside. Raises NotTaken once the gate is closed."""
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
        """So many pieces of work of extensions began (or, below 0, ended)."""
        with self._changed:
            self._elsewhere += change
            self._quiet_since = time.monotonic()

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """One piece of an extension's work is done inside."""
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
        """Refuse further work and wait for what is under way; False where that took longer than `timeout` seconds."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._active == 0, timeout)


class TrackedStream:
    """An extension's stream, as its reader and as its writer: a request counts as work until it is answered."""

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
        """The stream is over: what it never answered is no work any more."""
        self._note(-self._open)

    def _note(self, change: int) -> None:
        with self._changing:
            self._open += change
            self._gate.track(change)
