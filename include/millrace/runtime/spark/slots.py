"""Slots that bound how many operations run Spark at once. The others queue, first in, first out.

Each queued or running operation holds a ticket: a locked, numbered file in ``run/places``. The kernel releases the lock
of a killed process, so its slot is free at once. An operation runs when fewer tickets precede its own than there are
slots. The slots are shared by Airflow, the command line and every other way to start a job on this machine. An
operation that turns out to need no Spark takes no slot.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.runtime.launch.folder import read_json
from millrace.runtime.progress import Progress

POLL_SECONDS: Final = 0.5
"""Seconds between two polls of a queued operation."""
DURATION_SAMPLES: Final = 5
"""Newest runs of a job from which its duration is estimated."""
DURATIONS_FILE: Final = "lengths"
JOBS_AHEAD: Final = "before"
"""Progress figure of a queued operation: the number of operations ahead of it."""
EXPECTED_START: Final = "expected_start"
"""Progress figure of a queued operation: its expected start in Unix seconds, if known."""
_NAME: Final = "{:020d}.json"


@dataclass(frozen=True, slots=True)
class Ticket:
    """An operation that holds a slot or waits for one."""

    job: str
    pid: int
    since: float
    """Start of the run or of the wait, in Unix seconds."""
    running: bool


@contextmanager
def spark_slot(settings: Settings, job: str, progress: Progress, *, poll: float = POLL_SECONDS) -> Iterator[None]:
    """Hold a slot while the block runs. Reports the queue position and the expected start through `progress`."""
    folder = settings.run_path / "places"
    folder.mkdir(parents=True, exist_ok=True)
    number, handle = _take(folder, job)
    try:
        while (before := _before(folder, number)) and len(before) >= settings.spark_slots:
            now = time.time()
            starts = expected_start(before, median_durations(folder), settings.spark_slots, now=now)
            when = "" if starts is None else f", expected to begin in about {_duration_text(starts - now)}"
            progress.update(
                f"waiting for a slot: {len(before)} before it ({', '.join(each.job for each in before)}){when}",
                **{JOBS_AHEAD: len(before), **({} if starts is None else {EXPECTED_START: starts})},
            )
            time.sleep(poll)
        begun = time.time()
        _write(handle, Ticket(job, os.getpid(), begun, running=True))
        yield
        _record_duration(folder, job, time.time() - begun)
    finally:
        with suppress(FileNotFoundError):
            (folder / _NAME.format(number)).unlink()
        os.close(handle)


def expected_start(before: Sequence[Ticket], typical: Mapping[str, float], places: int, *, now: float) -> float | None:
    """Estimate the Unix time (at least `now`) at which the operation after `before` starts.

    None if a duration is unknown.

    A queued ticket takes the first slot that becomes free. It may start out of turn: a holder may have ended since the
    last poll, and processes with other settings may have started earlier.
    """
    if any(each.job not in typical for each in before):
        return None
    ends = sorted(max(now, each.since + typical[each.job]) for each in before if each.running)
    free = [now] * max(0, places - len(ends)) + ends[max(0, len(ends) - places) :]
    heapq.heapify(free)
    for each in before:
        if not each.running:
            heapq.heapreplace(free, free[0] + typical[each.job])
    return free[0]


def median_durations(folder: Path) -> dict[str, float]:
    """Return the median duration in seconds of the newest runs, by job."""
    return {job: statistics.median(each) for job, each in _durations(folder).items()}


def _record_duration(folder: Path, job: str, seconds: float) -> None:
    """Record how long a job held its slot; the newest DURATION_SAMPLES of each job are kept."""
    with _exclusive(folder):
        lengths = _durations(folder)
        replace_json(
            folder / DURATIONS_FILE, {**lengths, job: [*lengths.get(job, []), round(seconds, 3)][-DURATION_SAMPLES:]}
        )


def _durations(folder: Path) -> dict[str, list[float]]:
    found = read_json(folder / DURATIONS_FILE) or {}
    return {str(job): [float(each) for each in lengths] for job, lengths in found.items() if lengths}


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    guard = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def _take(folder: Path, job: str) -> tuple[int, int]:
    """Take a ticket after all others; return its number and the open file that holds its lock."""
    with _exclusive(folder):
        number = max((each for each, _ in _live(folder)), default=0) + 1
        draft = (
            folder / f".{os.getpid()}.draft"
        )  # written and locked under another name first: a ticket without a lock counts as left by a killed process
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        _write(handle, Ticket(job, os.getpid(), time.time(), running=False))
        draft.replace(folder / _NAME.format(number))
        return number, handle


def _write(handle: int, ticket: Ticket) -> None:
    data = json.dumps(asdict(ticket)).encode()
    os.pwrite(handle, data + b" " * 8, 0)
    os.ftruncate(handle, len(data))


def _before(folder: Path, number: int) -> list[Ticket]:
    return [ticket for each, ticket in _live(folder) if each < number]


def _live(folder: Path) -> Iterator[tuple[int, Ticket]]:
    """Yield the tickets of live processes in order, and remove those of killed ones."""
    for path in sorted(folder.glob("*.json")):
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield int(path.stem), _read(handle)
        else:
            with suppress(FileNotFoundError):
                path.unlink()
        finally:
            os.close(handle)


def _read(handle: int) -> Ticket:
    try:
        return Ticket(**json.loads(os.pread(handle, 4096, 0)))
    except (ValueError, TypeError):  # it is being written
        return Ticket("?", 0, 0.0, running=False)


def _duration_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
