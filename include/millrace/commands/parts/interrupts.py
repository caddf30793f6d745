"""Ctrl-C and SIGTERM always end a command, silently, at the first signal: exit code 130 or 143.

The signal's handler raises :class:`Interrupted` in the main thread, so that the command ends in order: it prints
its summary and closes connections. That alone is not enough. The exception is lost in a finaliser or in a callback
of a C library, and it is late while the command waits in such a library. So a thread also receives the signal,
through the file descriptor that Python's C handler writes to, and ends the process if the command has not ended
within `grace` seconds. A second signal ends it at once. Nothing is lost: what matters is durable in another
process, or was not acknowledged.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, Final, NoReturn

GRACE_SECONDS: Final = 2.0
"""Seconds that a command has to end in order after the first signal."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asks the command to end.

    Neither an Exception nor a KeyboardInterrupt, so that only millrace.__main__ catches it.
    """


class InterruptHandler:
    """Handles the signals of this process from :meth:`install` on. One per process, made in the main thread."""

    def __init__(self, *, grace: float = GRACE_SECONDS) -> None:
        self.signal: int | None = None
        """The first signal received."""
        self._grace = grace
        self._settled = False

    def install(self) -> None:
        """Handle SIGINT and SIGTERM, even if they were ignored, as a shell does for background processes."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(receiver,), name="interrupts", daemon=True).start()
        unraisable, in_thread = sys.unraisablehook, threading.excepthook

        def quiet_unraisable(found: Any) -> None:
            if self.signal is None:
                unraisable(found)

        def quiet_in_thread(found: Any) -> None:
            if self.signal is None:
                in_thread(found)

        # Errors in finalisers and in threads whose connection closed are consequences of the signal: do not print them.
        sys.unraisablehook, threading.excepthook = quiet_unraisable, quiet_in_thread
        for number in _SIGNALS:
            signal.signal(number, self._arrived)

    def stop_raising(self) -> None:
        """Make further signals end the process at once instead of raising: the command has ended."""
        self._settled = True

    def exit(self) -> NoReturn:
        """Flush the output and end the process with the signal's exit code."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # the reader has gone
        self._exit()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        first, self.signal = self.signal is None, self.signal or number
        if self._settled or not first:
            self._exit()
        raise Interrupted

    def _watch(self, receiver: socket.socket) -> None:
        while (number := receiver.recv(1)[0]) not in _SIGNALS:
            pass  # other signals that have a handler, such as SIGCHLD, arrive here too
        threading.Event().wait(self._grace)
        self.signal = self.signal or number
        self._exit()

    def _exit(self) -> NoReturn:
        assert self.signal is not None
        # Not sys.exit, which waits for threads and runs finalisers that may print errors.
        os._exit(128 + self.signal)
