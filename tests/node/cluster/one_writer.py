"""A log with one writer, as Pulsar's is: the embedded one, of which each process has a view.

Who opens it and appends takes it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from millrace.base.errors import LogFenced
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId


class Writers:
    """Who holds each PChannel: shared by all views."""

    def __init__(self) -> None:
        self.holds: dict[str, object] = {}


class View:
    """The protocol LogService, for one process; `service` outlives it."""

    def __init__(self, service: LogService, writers: Writers) -> None:
        self._service = service
        self._writers = writers

    def open(self, pchannel: str) -> Log:
        return OneWriterLog(self._service.open(pchannel), pchannel, self._writers)  # type: ignore[return-value]

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


class OneWriterLog:
    """The protocol Log: its first append takes the log from whoever had it; fenced once, it is so for ever."""

    def __init__(self, log: Log, pchannel: str, writers: Writers) -> None:
        self._log = log
        self._pchannel = pchannel
        self._writers = writers
        self._began = False

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        if not self._began:
            self._began = True
            self._writers.holds[self._pchannel] = self
        if self._writers.holds[self._pchannel] is not self:
            raise LogFenced(f"a newer writer has {self._pchannel}")
        return self._log.append(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)
