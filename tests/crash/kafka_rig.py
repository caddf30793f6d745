"""Appenders and readers of a log that write down what they were told, outside of the system."""

from __future__ import annotations

import threading
import time

from millrace.base.errors import LogUnavailable
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST, LogId

Entry = tuple[LogId, bytes]


class Appender(threading.Thread):
    """Appends batches of numbered values until it is stopped; an append that failed is not repeated."""

    def __init__(self, service: LogService, pchannel: str, name: int) -> None:
        super().__init__(daemon=True)
        self._log = service.open(pchannel)
        self._name = name
        self._stop_asked = threading.Event()
        self.acknowledged: list[Entry] = []
        self.ambiguous: list[list[bytes]] = []

    def run(self) -> None:
        number = 0
        while not self._stop_asked.is_set():
            values = [b"%d.%d.%d" % (self._name, number, index) + b"x" * 200 for index in range(1 + number % 7)]
            number += 1
            try:
                self.acknowledged += zip(self._log.append(values), values, strict=True)
            except LogUnavailable:
                self.ambiguous.append(values)

    def stop(self, *, deadline: float) -> None:
        self._stop_asked.set()
        self.join(deadline)
        assert not self.is_alive()


class Follower(threading.Thread):
    """Reads a log from its beginning as it grows; waits out a broker that is away."""

    def __init__(self, service: LogService, pchannel: str, *, max_bytes: int) -> None:
        super().__init__(daemon=True)
        self._log = service.open(pchannel)
        self._max_bytes = max_bytes
        self.seen: list[Entry] = []
        self.failure: BaseException | None = None
        self.target: LogId | None = None

    def run(self) -> None:
        position = EARLIEST
        try:
            while self.target is None or position < self.target:
                try:
                    run = self._log.read(position, max_bytes=self._max_bytes, timeout=0.2)
                except LogUnavailable:
                    continue
                rows = run.batch.to_pylist()
                self.seen += [(LogId(row["ledger"], row["entry"]), row["value"]) for row in rows]
                position = run.next
        except BaseException as error:
            self.failure = error

    def finish(self, target: LogId, *, deadline: float) -> list[Entry]:
        """Everything up to `target`, once it has read that far."""
        self.target = target
        self.join(deadline)
        assert self.failure is None, self.failure
        assert not self.is_alive()
        return self.seen


def wait_for(appenders: list[Appender], count: int, *, deadline: float) -> None:
    """Wait until each appender has so many more acknowledgements than now."""
    before = [len(appender.acknowledged) for appender in appenders]
    until = time.monotonic() + deadline
    for appender, start in zip(appenders, before, strict=True):
        while len(appender.acknowledged) < start + count:
            assert time.monotonic() < until, "the log does not take appends again"
            assert appender.is_alive()
            threading.Event().wait(0.01)
