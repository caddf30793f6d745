"""SIGKILL of a process that stamps under a wall clock that leaps, at seeded moments and between keeping and appending.

Whatever the next process finds, the clock ahead, back or right, on the same boot or another: stamps never go back, no
leap that was held is believed, log time goes on, and nothing that was acknowledged is lost.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.base.failpoint import VARIABLE
from millrace.message.ids import LOGICAL_BITS, LogId
from tests.crash.clock_appender import CHANNELS, open_log

REPOSITORY = Path(__file__).parents[2]
DAY, HOUR = 86_400.0, 3_600.0
SLACK_MS = 2_000
"""What two looks at clocks by two processes may differ by on a busy machine."""


class Rig:
    """One host with its log, and what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot, self.error = "first", 0.0
        self.acknowledged: dict[str, dict[int, bytes]] = {channel: {} for channel in CHANNELS}
        self.floors = dict.fromkeys(CHANNELS, 0)
        self.runs = 0
        self.set_clock(0.0)

    def set_clock(self, error: float) -> None:
        """Set the wall clock, at once for whoever looks."""
        self.error = error
        draft = self.folder / "host.new"
        draft.write_text(f"{self.boot} {error}")
        draft.replace(self.folder / "host")

    def reboot(self) -> None:
        self.boot += "'"
        self.set_clock(self.error)

    def start(self, *, failpoint: str = "") -> subprocess.Popen[bytes]:
        self.runs += 1
        path = f"{REPOSITORY / 'include'}{os.pathsep}{REPOSITORY}"
        command = [sys.executable, "-m", "tests.crash.clock_appender", str(self.folder), str(self.runs)]
        environment = os.environ | {"PYTHONPATH": path, VARIABLE: failpoint}
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=REPOSITORY)

    def take(self, child: subprocess.Popen[bytes], lines: int | None, *, held: bool | None = None) -> int:
        """Note so many acknowledgements (None: until the child is dead), and go on until one says
        that a leap is `held`, or is not.
        """
        assert child.stdout is not None
        taken = 0
        for line in child.stdout:
            if not line.endswith(b"\n"):
                break
            _, channel, entry, value, said, floor = line.split()
            known = self.acknowledged[channel.decode()]
            assert int(entry) >> LOGICAL_BITS >= self.floors[channel.decode()], "a promise holds, across processes too"
            self.floors[channel.decode()] = int(floor)
            assert int(entry) > max(known, default=-1), "in a channel ids increase, across processes too"
            known[int(entry)] = value
            taken += 1
            if lines is not None and taken >= lines and held in (None, said == b"1"):
                break
        return taken

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        self.take(child, None)
        child.wait(30)
        assert child.stdout is not None
        child.stdout.close()

    def check(self) -> None:
        """What the log holds: all that was acknowledged, at stamps that never decrease and are no leap's."""
        with open_log(self.folder) as service:
            for channel in CHANNELS:
                log = service.open(channel)
                found: dict[int, bytes] = {}
                stamps: list[int] = []
                position = LogId(0, 0)
                while (run := log.read(position)).batch.num_rows:
                    stamps += run.batch.column("physical_ms").to_pylist()
                    ids, values = run.batch.column("entry").to_pylist(), run.batch.column("value").to_pylist()
                    found.update(zip(ids, values, strict=True))
                    position = run.next
                assert self.acknowledged[channel].items() <= found.items()
                assert stamps == sorted(stamps)
                assert stamps[-1] <= time.time() * 1000 + SLACK_MS, "a leap of a day was never believed"

    def last_stamp(self) -> int:
        return max(max(known, default=0) for known in self.acknowledged.values()) >> LOGICAL_BITS


@pytest.mark.slow
@pytest.mark.parametrize("visit", [2, 3])
def test_a_process_that_dies_between_keeping_and_appending_is_gone_on_from(tmp_path: Path, visit: int) -> None:
    """The second time that something is kept a leap begins, the third time it ends."""
    rig = Rig(tmp_path)
    child = rig.start(failpoint=f"clock.kept@{visit}")
    rig.take(child, 20)
    rig.set_clock(DAY)
    if visit == 3:
        rig.take(child, 20, held=True)
        rig.set_clock(0.0)
    rig.take(child, None)
    assert child.wait(30) == -9
    rig.set_clock(DAY)
    child = rig.start()
    rig.take(child, 20)
    rig.kill(child)
    rig.check()


@pytest.mark.parametrize("visit", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_process_promised_before_it_died_holds_though_the_clock_was_set_back(tmp_path: Path, visit: int) -> None:
    rig = Rig(tmp_path)
    child = rig.start(failpoint=f"clock.promised@{visit}")
    rig.take(child, None)
    assert child.wait(30) == -9
    rig.set_clock(-HOUR)
    if visit == 3:
        rig.reboot()
    child = rig.start()
    rig.take(child, 20)
    rig.kill(child)
    rig.check()


@pytest.mark.slow
def test_stamps_keep_their_order_through_leaps_boots_and_kills(tmp_path: Path) -> None:
    dice, rig = random.Random(16), Rig(tmp_path)
    for turn in range(8):
        child = rig.start()
        if rig.take(child, dice.randrange(5, 60)) == 0:
            raise AssertionError(f"the child died: {child.wait(30)}")
        for error in dice.sample([0.0, DAY, -HOUR, 40 * DAY], 2):
            rig.set_clock(error)
            rig.take(child, dice.randrange(5, 60), held=error > 0)
        rig.kill(child)
        rig.check()
        if turn % 2:
            rig.reboot()  # a leap that is held stays so
    rig.set_clock(-HOUR)
    child = rig.start()
    rig.take(child, 5)
    before, begun = rig.last_stamp(), time.monotonic()
    while time.monotonic() < begun + 2.0:
        rig.take(child, 5)
    rig.kill(child)
    assert rig.last_stamp() - before >= 950, "log time goes on at half speed"
    rig.check()
