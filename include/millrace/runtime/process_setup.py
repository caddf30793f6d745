"""Set up a long-running process: file mode mask, logging, signals and priority."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from millrace.base.data_folder import restrict_umask

NICE: Final = 10
"""Leaves about a tenth of the CPU time that other processes want, and all that they do not."""

_AUTOGROUP: Final = Path("/proc/self/autogroup")


def set_up_service() -> threading.Event:
    """Restrict the umask to this user, log to stderr, and return the event of :func:`stop_on_signals`."""
    restrict_umask()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return stop_on_signals()


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set from now on. Call it in the main thread."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def lower_priority() -> None:
    """Lower the priority of this process and its children, and of its session if this process leads one.

    Linux usually groups processes by session (``sched_autogroup_enabled``; sched(7)), and a nice value then ranks
    only the processes of one session. Each launched job leads a session, so its group needs a nice value too.
    A session that another process leads (a terminal's) is left alone.
    """
    os.nice(NICE)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without autogroups needs no more than the nice value above
            _AUTOGROUP.write_text(str(NICE))


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread, on Linux, where threads have a nice value of their own."""
    if sys.platform == "linux":
        with suppress(OSError):  # it has a lower one already
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
