"""SIGKILL of a process that appends and truncates.

Every acknowledged batch is there afterwards, in order, whole, once.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.log.rocksmq.service import RocksMQ
from tests.log.appender import THREADS, values
from tests.log.crash_images import CHANNEL, SETTINGS, Entry, begin, read

REPOSITORY = Path(__file__).parents[2]


def kill_after(directory: Path, run: int, lines: int) -> list[bytes]:
    """Start the child, kill it once it has said `lines` lines, and return all that it said."""
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'include'}{os.pathsep}{REPOSITORY}"}
    command = [sys.executable, "-m", "tests.log.appender", str(directory), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=REPOSITORY) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        said += child.stdout.readlines()
    assert all(line.endswith(b"\n") for line in said)
    return said


def check(
    run: int, said: list[bytes], found: list[Entry], first: int, known: dict[int, bytes], last: int
) -> tuple[int, dict[int, bytes]]:
    """The log holds all that was acknowledged from its beginning on, and nothing doubled or half."""
    by_id = {entry_id.entry: value for entry_id, value in found}
    assert list(by_id) == sorted(by_id)
    assert len(by_id) == len(found)
    truncations = [int(line.split()[1]) for line in said if line.startswith(b"T")]
    if truncations:  # the one after may have taken effect without being told
        assert first >= max(truncations)
    acknowledged = dict(known)
    reached = dict.fromkeys(range(THREADS), -1)
    for line in said:
        if line.startswith(b"A"):
            thread, number, base, count = map(int, line.split()[1:])
            assert base > last
            batch = values(run, thread, number)
            assert count == len(batch)
            assert number == reached[thread] + 1
            reached[thread] = number
            acknowledged.update({base + index: value for index, value in enumerate(batch)})
    assert {entry: value for entry, value in acknowledged.items() if entry >= first}.items() <= by_id.items()
    # What is there without having been acknowledged in time are whole batches, at most the next one of each thread.
    extra: dict[bytes, list[bytes]] = {}
    for entry in sorted(by_id.keys() - acknowledged.keys()):
        name = b".".join(by_id[entry].split(b".")[:3])
        extra.setdefault(name, []).append(by_id[entry])
    for name, batch in extra.items():
        told_run, thread, number = map(int, name.split(b"."))
        assert (told_run, number) == (run, reached[thread] + 1)
        assert batch == values(run, thread, number)
    return max(by_id), by_id


@pytest.mark.slow
def test_every_acknowledged_batch_survives_sigkill_after_sigkill(tmp_path: Path) -> None:
    dice = random.Random(7)
    known: dict[int, bytes] = {}
    last = -1
    for run in range(3):
        said = kill_after(tmp_path / "data", run, dice.randrange(100, 500))
        with RocksMQ(tmp_path / "data", settings=SETTINGS) as service:
            log = service.open(CHANNEL)
            first = begin(log)
            last, known = check(run, said, read(log, first), first.entry, known, last)
            assert log.verify().first_bad is None
