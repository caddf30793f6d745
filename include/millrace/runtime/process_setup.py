"""How a process begins that serves until it is told to stop."""

from __future__ import annotations

import logging
import signal
import threading

from millrace.base.data_folder import restrict_umask


def set_up_service() -> threading.Event:
    """Keep what it writes to this user, log to stderr; :func:`stop_on_signals`."""
    restrict_umask()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return stop_on_signals()


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on. To be called in the main thread."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
