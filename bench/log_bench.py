"""The embedded log against the disk it stands on: ratios to a baseline interleaved in the same run.

The baseline is what a naive appender gets: write + fdatasync of a growing file, in the same pattern (the same bytes per
sync); O_DIRECT on a growing file stands beside it. MB are 10**6 payload bytes. Every function takes a directory on the
disk to be measured, leaves it empty, and returns plain data.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import EARLIEST, LogId

MIB = 1 << 20


@dataclass(frozen=True)
class Ratio:
    """A subject against its baseline over interleaved pairs: medians, and the spread of the pairs' ratios."""

    name: str
    unit: str
    pairs: int
    subject: float
    baseline: float
    ratio: float
    ratio_min: float
    ratio_max: float


def batch_of(message_bytes: int, batch_bytes: int) -> pa.LargeBinaryArray:
    """Return one batch of random messages, `batch_bytes` in sum."""
    count = max(1, batch_bytes // message_bytes)
    data = os.urandom(count * message_bytes)
    return pa.array([data[i * message_bytes : (i + 1) * message_bytes] for i in range(count)], pa.large_binary())


def plain_append(directory: Path, *, batch_bytes: int, total: int) -> float:
    """Return the MB/s of write + fdatasync of a growing file."""
    data = os.urandom(batch_bytes)
    path = directory / "plain"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        start = time.perf_counter()
        for _ in range(total // batch_bytes):
            os.write(fd, data)
            os.fdatasync(fd)
        return total / (time.perf_counter() - start) / 1e6
    finally:
        os.close(fd)
        path.unlink()


def direct_append(directory: Path, *, batch_bytes: int, total: int) -> float:
    """Return the MB/s of the same with O_DIRECT, from one aligned buffer."""
    path = directory / "direct"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        with mmap.mmap(-1, batch_bytes) as data:
            data[:] = os.urandom(batch_bytes)
            start = time.perf_counter()
            for _ in range(total // batch_bytes):
                os.write(fd, data)
                os.fdatasync(fd)
            return total / (time.perf_counter() - start) / 1e6
    finally:
        os.close(fd)
        path.unlink()


def log_append(directory: Path, *, message_bytes: int, batch_bytes: int, total: int, keep: int = 0) -> float:
    """Return MB/s of synced appends of batches to the log.

    With `keep`, everything but about the last `keep` bytes is truncated along the way, so that files are recycled as in
    a log's steady state; the first `total` / 4 bytes then are a warm-up.
    """
    batch = batch_of(message_bytes, batch_bytes)
    data = directory / "log"
    try:
        with RocksMQ(data) as service:
            service.create("bench")
            log = service.open("bench")
            ends: list[LogId] = []
            if keep:
                for _ in range(total // 4 // batch_bytes):
                    ends.append(log.append(batch)[-1])
                    _trim(log, ends, keep // batch_bytes)
            start = time.perf_counter()
            for _ in range(total // batch_bytes):
                last = log.append(batch)[-1]
                if keep:
                    ends.append(last)
                    _trim(log, ends, keep // batch_bytes)
            return total / (time.perf_counter() - start) / 1e6
    finally:
        shutil.rmtree(data)


def _trim(log: object, ends: list[LogId], keep: int) -> None:
    if len(ends) >= 2 * keep:
        log.truncate(ends[-keep])  # type: ignore[attr-defined]
        del ends[:-keep]


def log_read(directory: Path, *, message_bytes: int, batch_bytes: int, total: int, max_bytes: int = 8 * MIB) -> float:
    """Return MB/s of reading the log from its beginning with verified checksums, right after the write (page cache)."""
    batch = batch_of(message_bytes, batch_bytes)
    data = directory / "log"
    try:
        with RocksMQ(data) as service:
            service.create("bench")
            log = service.open("bench")
            for _ in range(total // batch_bytes):
                log.append(batch)
            position, rows, start = EARLIEST, 0, time.perf_counter()
            while True:
                run = log.read(position, max_bytes=max_bytes)
                if not run.batch.num_rows:
                    break
                rows += run.batch.num_rows
                position = run.next
            elapsed = time.perf_counter() - start
            assert rows == (total // batch_bytes) * len(batch)
            return rows * message_bytes / elapsed / 1e6
    finally:
        shutil.rmtree(data)


def plain_single(directory: Path, *, message_bytes: int, appends: int) -> list[float]:
    """Return the seconds of each write + fdatasync of one message at the end of a growing file."""
    data = os.urandom(message_bytes)
    path = directory / "plain"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:

        def append() -> None:
            os.write(fd, data)
            os.fdatasync(fd)

        return _timed(append, appends)
    finally:
        os.close(fd)
        path.unlink()


def log_single(directory: Path, *, message_bytes: int, appends: int) -> list[float]:
    """Return the seconds of each synced append of one message to the log."""
    values = [os.urandom(message_bytes)]
    data = directory / "log"
    try:
        with RocksMQ(data, settings=RocksMQSettings()) as service:
            service.create("bench")
            log = service.open("bench")
            log.append(values)
            return _timed(lambda: log.append(values), appends)
    finally:
        shutil.rmtree(data)


def _timed(call: Callable[[], object], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def pairs(name: str, unit: str, subject: Callable[[], float], baseline: Callable[[], float], count: int) -> Ratio:
    """Run `baseline` and `subject` in turn, `count` times, and compare."""
    baselines, subjects = [], []
    for _ in range(count):
        baselines.append(baseline())
        subjects.append(subject())
    ratios = [mine / theirs for mine, theirs in zip(subjects, baselines, strict=True)]
    subject_median, baseline_median, ratio = (
        round(statistics.median(values), 4) for values in (subjects, baselines, ratios)
    )
    return Ratio(
        name, unit, count, subject_median, baseline_median, ratio, round(min(ratios), 4), round(max(ratios), 4)
    )


def run(directory: Path, *, total: int = 4 << 30, count: int = 7, single: int = 2000) -> list[Ratio]:
    """Return all measurements, against write + fdatasync of a growing file; reading has the fixed baseline 500 MB/s."""
    results = []
    for message_bytes in (1 << 10, 64 << 10):
        for batch_bytes in (256 << 10, MIB):
            label = f"{message_bytes >> 10} KiB messages, {batch_bytes >> 10} KiB a commit"
            shape = {"message_bytes": message_bytes, "batch_bytes": batch_bytes, "total": total}
            plain = {"batch_bytes": batch_bytes, "total": total}
            less = {"message_bytes": message_bytes, "batch_bytes": batch_bytes, "total": total // 4}
            plain_less = {"batch_bytes": batch_bytes, "total": total // 4}
            results += [
                pairs(
                    f"append, {label}",
                    "MB/s",
                    partial(log_append, directory, **shape),
                    partial(plain_append, directory, **plain),
                    count,
                ),
                pairs(
                    f"append recycled, {label}",
                    "MB/s",
                    partial(log_append, directory, keep=256 * MIB, **less),
                    partial(plain_append, directory, **plain_less),
                    count,
                ),
                pairs(
                    f"append recycled vs O_DIRECT, {label}",
                    "MB/s",
                    partial(log_append, directory, keep=256 * MIB, **less),
                    partial(direct_append, directory, **plain_less),
                    count,
                ),
                pairs(
                    f"read, {label}",
                    "MB/s",
                    partial(log_read, directory, **less),
                    lambda: 500.0,
                    max(1, count // 2),
                ),
            ]
    results.append(
        pairs(
            "one synced append of 1 KiB, p50",
            "ms",
            lambda: statistics.median(log_single(directory, message_bytes=1 << 10, appends=single)) * 1e3,
            lambda: statistics.median(plain_single(directory, message_bytes=1 << 10, appends=single)) * 1e3,
            count,
        )
    )
    return results


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    small = {"total": int(sys.argv[2]) * MIB, "count": int(sys.argv[3])} if len(sys.argv) > 3 else {}
    for result in run(target, **small):
        print(json.dumps(asdict(result)))
