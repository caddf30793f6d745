"""A table of a real database and its capture, for both databases; kills of engines; and flows that run meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from millrace.base.settings import Settings
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.records import Record, is_truncation
from millrace.flows.registry import Source as Declared
from millrace.flows.registry import feeder_of, reader_of, source_of
from millrace.flows.sources.capture.feeder import Feeder
from millrace.flows.sources.capture.spool import Spool, Standing
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.source import Limits, task_of
from tests.waiting import until

LIMITS: Final = Limits(500, 1 << 20, 0.1)


class CapturedShop(ABC):
    """The table ``items`` of a database of its own, and its capture. Not started."""

    declared: Any
    settings: Settings
    group: str
    lane: str
    table: str

    @abstractmethod
    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own; return the rows of the last one."""

    @abstractmethod
    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the table, by key, if all of its columns are numbers and texts."""

    @property
    def folder(self) -> Path:
        """Of the spool."""
        return spool_folder(self.settings, self.group)

    @contextmanager
    def captured(self) -> Iterator[Feeder]:
        feeder = feeder_of(self.declared, self.settings, group=self.group)
        assert isinstance(feeder, Feeder)
        try:
            yield feeder
        finally:
            feeder.close()

    def standing(self) -> Standing:
        with Spool(self.folder) as spool:
            return spool.standing()

    def records(self, start: int = 0) -> list[Record]:
        """All records that readers see from `start` on, read in batches."""
        return records_of(self.declared, self.settings, self.group, self.lane, start=start)

    def replayed(self) -> dict[str, dict[str, Any]]:
        """The rows that the records come to, by key."""
        return replayed(self.records())

    def reaches(self) -> None:
        """Wait until the records come to the table's rows."""
        until(lambda: self.replayed() == self.rows(), f"the lane has the table's {len(self.rows())} rows", seconds=60)


def records_of(
    declared: Declared, settings: Settings, group: str, topic: str, *, start: int | None = None
) -> list[Record]:
    """Return the records of a lane that readers see from `start` on, or from the first that is kept."""
    source = source_of(declared, settings, group=group)
    reader = reader_of(declared, settings, group=group, topic=topic, partition=0)
    try:
        place, found = source.ends()[task_of(topic, 0)], list[Record]()
        start = place.low if start is None else start
        while start < place.high:
            for batch in reader.batches(start, place.high, LIMITS):
                assert batch.start == start < batch.end
                found += batch.records or ()
                start = batch.end
        return found
    finally:
        source.close()
        reader.close()


def replayed(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return the rows that records come to, by key."""
    rows: dict[str, dict[str, Any]] = {}
    for each in records:
        key = (each.key or b"").decode()
        if is_truncation(each):
            rows.clear()
        elif each.value is None:
            rows.pop(key, None)
        else:
            rows[key] = json.loads(each.value)
    return rows


def kill_engine(feeder: Feeder) -> None:
    """Kill the engine of a feeder."""
    until(lambda: feeder.engine_pid, "an engine runs", seconds=60)
    pid = feeder.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def engines() -> list[psutil.Process]:
    """The engines that this process has started and that run."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # one that was killed is a zombie
            if "millrace.CaptureEngine" in each.cmdline():
                found.append(each)
    return found


def kill_engines() -> None:
    """Kill the engines of flows that this process runs."""
    until(engines, "an engine runs", seconds=60)
    for each in engines():
        each.kill()


@contextmanager
def working(definition: FlowRun) -> Iterator[Callable[[], bool]]:
    """Run a flow in a thread; yield a check that raises what ended it."""
    stop, raised = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            run(definition, stop=stop)
        except BaseException as error:
            raised.append(error)

    def check() -> bool:
        if raised:
            raise raised[0]
        return True

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield check
    finally:
        stop.set()
        worker.join(60)
    assert not worker.is_alive()
    check()


def texts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return rows as texts in one order, to compare those of a collection with those of its table."""
    return sorted(({key: str(row[key]) for key in sorted(row)} for row in rows), key=str)
