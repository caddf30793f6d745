"""Ctrl-C and SIGTERM end a command for certain, and without a word: exit code 130 or 143, at the first signal.

The signal's handler raises :class:`Interrupted` where the command is, so that it ends in order: the summary is told,
connections close. That alone is not certain. What the handler raises is lost where it strikes a finaliser or a callback
of a C library, and it is late where the command waits in such a library. Therefore a thread hears of the signal too,
through the file descriptor that Python's own C handler writes to, and ends the process where the command has not within
`grace` seconds. A second signal ends it at once. Ending so loses nothing: whatever a command has to keep, another
process has durably, or it was not acknowledged.
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
"""Seconds that a command has to end in order."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asks the command to end.

    No Exception and no KeyboardInterrupt: nobody but millrace.__main__ takes it.
    """


class InterruptHandler:
    """The signals of this process, from :meth:`install` on. One object a process, made in its main thread."""

    def __init__(self, *, grace: float = GRACE_SECONDS) -> None:
        self.signal: int | None = None
        """The first that came."""
        self._grace = grace
        self._settled = False

    def install(self) -> None:
        """Take SIGINT and SIGTERM, also where they were ignored (a shell does that to what it starts in the
        background)."""
        heard, told = socket.socketpair()
        told.setblocking(False)
        signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(heard,), name="interrupts", daemon=True).start()
        unraisable, in_thread = sys.unraisablehook, threading.excepthook

        def quiet_unraisable(found: Any) -> None:
            if self.signal is None:
                unraisable(found)

        def quiet_in_thread(found: Any) -> None:
            if self.signal is None:
                in_thread(found)

        # A finaliser that was struck, a thread whose connection is closed under it: no news to somebody who ends the command.
        sys.unraisablehook, threading.excepthook = quiet_unraisable, quiet_in_thread
        for number in _SIGNALS:
            signal.signal(number, self._arrived)

    def stop_raising(self) -> None:
        """The command has ended: from now on a signal ends the process where it is, instead of raising."""
        self._settled = True

    def exit(self) -> NoReturn:
        """End the process as the signal says. What was printed goes out, if somebody takes it in time."""
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

    def _watch(self, heard: socket.socket) -> None:
        while (number := heard.recv(1)[0]) not in _SIGNALS:
            pass  # SIGCHLD and the like come this way too, where somebody handles them
        threading.Event().wait(self._grace)
        self.signal = self.signal or number
        self._exit()

    def _exit(self) -> NoReturn:
        assert self.signal is not None
        # Not sys.exit: the interpreter would wait for threads, and finalisers could yet complain.
        os._exit(128 + self.signal)
