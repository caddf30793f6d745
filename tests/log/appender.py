"""A child process for the kill tests: appends from several threads for ever and says on stdout what was acknowledged.

Lines: ``A <thread> <number> <first id> <count>`` once a batch is acknowledged, ``T <id>`` once a truncation returned.
Each line is one write, so a killed child leaves no line that it did not mean.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import LogId
from tests.log.crash_images import CHANNEL, SETTINGS

THREADS = 4


def values(run: int, thread: int, number: int) -> list[bytes]:
    """What a thread's batch holds: told by its name, of many sizes."""
    name = b"%d.%d.%d." % (run, thread, number)
    return [name + b"%d" % index + b"\n" * (number * 131 % 3_000) for index in range(1 + number % 5)]


def main(directory: Path, run: int) -> None:
    service = RocksMQ(directory, settings=SETTINGS)
    if CHANNEL not in service.names():
        service.create(CHANNEL)
    log = service.open(CHANNEL)

    def work(thread: int) -> None:
        number = 0
        while True:
            batch = values(run, thread, number)
            ids = log.append(batch)
            os.write(1, b"A %d %d %d %d\n" % (thread, number, ids[0].entry, len(ids)))
            if thread == 0 and number % 40 == 39:
                log.truncate(LogId(0, ids[0].entry))
                os.write(1, b"T %d\n" % ids[0].entry)
            number += 1

    for thread in range(THREADS):
        threading.Thread(target=work, args=(thread,)).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
