"""Logs over several generations for the conformance suite.

One that a closed empty one precedes, one that switches as it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from millrace.base.errors import ChannelExists
from millrace.base.log_backends import EMBEDDED
from millrace.log.generations.log import GenerationLog
from millrace.log.generations.service import GenerationsService
from millrace.log.protocol import LogService
from millrace.message.ids import LogId

OpenBackend = Callable[[str], LogService]
EVERY = 7
MOST = 4
"""A log of the second kind is switched before each seventh append, until it is in its fourth generation."""


def behind_an_empty_generation(directory: Path, open_backend: OpenBackend) -> GenerationsService:
    """A deployment that was switched before it had any PChannel."""
    service = GenerationsService(directory, open_backend=open_backend)
    if service.file.generations.newest == 0:
        service.file.change(lambda list_: list_.with_next(EMBEDDED, {}).with_closed(0))
    return service


class Switching(GenerationsService):
    """A deployment whose logs are switched under way."""

    def __init__(self, directory: Path, *, open_backend: OpenBackend) -> None:
        super().__init__(directory, open_backend=open_backend)
        self.appending = threading.RLock()
        self.appends: dict[str, int] = {}

    def open(self, pchannel: str) -> GenerationLog:
        log = super().open(pchannel)
        log.__class__ = SwitchingLog
        return log

    def switch(self, pchannel: str) -> None:
        """Let `pchannel` go on in the next generation, without an AlterWAL entry.

        A list of entries is compared here.
        """
        span = self.span(pchannel)
        number = span.current
        if self.file.generations.newest == number:
            self.file.change(lambda list_: list_.with_next(EMBEDDED, {}))
        try:
            self.backend(number + 1).create(pchannel)
        except ChannelExists:
            pass
        log = self.backend(number).open(pchannel)
        self.file.change(lambda list_: list_.with_end(number, pchannel, log.describe().end))
        log.close()


class SwitchingLog(GenerationLog):
    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> list[LogId]:
        service = self._service
        assert isinstance(service, Switching)
        with service.appending:
            count = service.appends[self.pchannel] = service.appends.get(self.pchannel, 0) + bool(len(values))
            if len(values) and count % EVERY == 0 and service.span(self.pchannel).current < MOST - 1:
                service.switch(self.pchannel)
            return super().append(values)
