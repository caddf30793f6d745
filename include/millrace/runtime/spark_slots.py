"""Places for operations that start Spark: so many at once as the machine bears; the others wait in turn, and say where they stand.

Each waiting or running operation has a ticket: a numbered file in ``run/places`` that its process holds locked, so that one
that was killed leaves its place at once. Who has fewer tickets before it than there are places goes on. It holds for Airflow,
the command line and any other way to start a job on this machine; an operation that turns out to need no Spark takes no place.
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
"""Pause between two looks of one that waits."""
DURATION_SAMPLES: Final = 5
"""Runs of a job by which its length is guessed."""
DURATIONS_FILE: Final = "lengths"
JOBS_AHEAD: Final = "before"
"""Figure of the progress of one that waits: how many are before it."""
EXPECTED_START: Final = "expected_start"
"""Figure of the progress of one that waits: when it may begin (Unix seconds), where that is known."""
_NAME: Final = "{:020d}.json"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One operation that has a place, or waits for one."""

    job: str
    pid: int
    since: float
    """Unix seconds: when it began to run, or to wait."""
    running: bool


@contextmanager
def spark_slot(settings: Settings, job: str, progress: Progress, *, poll: float = POLL_SECONDS) -> Iterator[None]:
    """A place, for as long as the block runs. Says through `progress` how many are before it, and when it may begin."""
    folder = settings.run_path / "places"
    folder.mkdir(parents=True, exist_ok=True)
    number, handle = _take(folder, job)
    try:
        while (before := _before(folder, number)) and len(before) >= settings.spark_slots:
            now = time.time()
            starts = expected_start(before, median_durations(folder), settings.spark_slots, now=now)
            when = "" if starts is None else f", expected to begin in about {_words(starts - now)}"
            progress.update(
                f"waiting for a place: {len(before)} before it ({', '.join(each.job for each in before)}){when}",
                **{JOBS_AHEAD: len(before), **({} if starts is None else {EXPECTED_START: starts})},
            )
            time.sleep(poll)
        begun = time.time()
        _write(handle, Ticket(job, os.getpid(), begun, running=True))
        yield
        _took(folder, job, time.time() - begun)
    finally:
        with suppress(FileNotFoundError):
            (folder / _NAME.format(number)).unlink()
        os.close(handle)


def expected_start(before: Sequence[Ticket], typical: Mapping[str, float], places: int, *, now: float) -> float | None:
    """When the one after `before` may begin (Unix seconds, not before `now`), if each takes as long as its job did; None: not known.

    A ticket that does not run yet takes the place that is free first, wherever it stands: a holder that has just ended is gone
    while the next one has not looked yet, and processes with other settings may have begun out of turn.
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
    """By job the median of how long it last had its place."""
    return {job: statistics.median(each) for job, each in _lengths(folder).items()}


def _took(folder: Path, job: str, seconds: float) -> None:
    """Keep how long a job had its place, the newest RUNS of each."""
    with _alone(folder):
        lengths = _lengths(folder)
        replace_json(
            folder / DURATIONS_FILE, {**lengths, job: [*lengths.get(job, []), round(seconds, 3)][-DURATION_SAMPLES:]}
        )


def _lengths(folder: Path) -> dict[str, list[float]]:
    found = read_json(folder / DURATIONS_FILE) or {}
    return {str(job): [float(each) for each in lengths] for job, lengths in found.items() if lengths}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    guard = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def _take(folder: Path, job: str) -> tuple[int, int]:
    """A ticket behind all that are there; its number, and the handle that holds it."""
    with _alone(folder):
        number = max((each for each, _ in _live(folder)), default=0) + 1
        draft = folder / f".{os.getpid()}.draft"  # nobody sees a ticket that is not held yet
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
    """The tickets whose process lives, in their order; what a killed one left goes."""
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


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
