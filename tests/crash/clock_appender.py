"""A child process for the clock's crash tests.

Appends to two channels for ever, under a wall clock and a boot that a file says.

Lines: ``A <channel> <id> <value> <held> <floor>`` once an append is acknowledged, each one write. No later stamp of
the channel is before the floor. The file ``host`` holds the
boot's name and the wall clock's error in seconds; the clock looks at it each time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.stamp_clock import StampClock
from tests.log.crash_images import SETTINGS

CHANNELS = ("a", "b")


def open_log(folder: Path) -> RocksMQ:
    """The log in `folder`, under the clock of its host."""

    def wall() -> int:
        return time.time_ns() + round(float((folder / "host").read_text().split()[1]) * 1e9)

    boot = (folder / "host").read_text().split()[0]
    clock = StampClock(folder / "clock.json", wall=wall, boot=boot)
    return RocksMQ(folder / "log", settings=SETTINGS, clock=clock)


def main(folder: Path, run: int) -> None:
    service = open_log(folder)
    clock = service.clock
    assert clock is not None
    for channel in CHANNELS:
        if channel not in service.names():
            service.create(channel)

    def work(channel: str) -> None:
        number = 0
        while True:
            value = b"%s.%d.%d" % (channel.encode(), run, number)
            (entry,) = service.produce(channel, [value])
            held = clock.view().held_since_ms is not None
            floor = service.open(channel).stamp_floor()
            assert floor is not None
            os.write(1, b"A %s %d %s %d %d\n" % (channel.encode(), entry, value, held, floor.ms))
            number += 1

    for channel in CHANNELS:
        threading.Thread(target=work, args=(channel,)).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
