"""A stream's hold on the channels of its groups, so that two streams of one group never deliver the same messages.

A stream takes the lease of each channel before it reads it, and renews it in a thread. A stream that was away for
longer than its lease finds out before it delivers or acknowledges anything: it takes the lease again, or raises
GroupBusy if another consumer has it.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import GroupBusy, InvalidArgument, MillraceError
from millrace.client.consume.membership import CLOCK_DRIFT, boot_clock
from millrace.log.protocol import LogService

_POLL: Final = 0.1
_log: Final = logging.getLogger(__name__)


class GroupHold:
    """The leases of one stream. Thread-safe."""

    def __init__(self, service: LogService, *, seconds: float, clock: Callable[[], float] = boot_clock) -> None:
        """Hold nothing yet. A lease lasts `seconds`; 0: this stream takes no leases.

        `clock` counts the time for which the machine is suspended, in which the server gives the lease to another.
        """
        self._service = service
        self._seconds = seconds
        self._clock = clock
        self._holder = f"{os.uname().nodename[:64]}:{os.getpid()}:{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._until: dict[tuple[str, str], float] = {}
        """Time at which each lease, by group and channel, ends if it is not renewed."""
        self._lost: GroupBusy | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, group: str, channel: str) -> None:
        """Take a channel's lease. Waits for one that is not renewed, such as that of a process that was killed.

        Raises GroupBusy if another consumer renews it, or still has it after twice the time of a lease.
        """
        if not self._seconds:
            return
        first: int | None = None
        deadline = Deadline.after(2 * self._seconds + _POLL)
        while True:
            try:
                self._hold(group, channel)
                break
            except GroupBusy as error:
                first = error.renewals if first is None else first
                if error.renewals > first or deadline.expired():
                    raise
                self._closed.wait(min(_POLL, self._seconds / 4))
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="group-hold", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Return if this stream has the leases of its channels. Raises GroupBusy if another consumer has one."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            now = self._clock()
            late = [key for key, until in self._until.items() if until <= now]
        for group, channel in late:  # this process was paused, or the server away
            self._retake(group, channel)
            with self._lock:
                if self._lost is not None:
                    raise self._lost

    def _hold(self, group: str, channel: str) -> None:
        # Before the call: the lease begins at the server no earlier than this.
        begun = self._clock()
        try:
            self._service.hold_group(group, channel, self._holder, seconds=self._seconds)
        except InvalidArgument as error:
            if "unknown call" not in str(error):
                raise
            _log.warning("the log's server is of an earlier build: several consumers of %s are not refused", group)
            self._seconds = 0.0
            return
        with self._lock:
            self._until[group, channel] = begun + self._seconds * (1 - CLOCK_DRIFT)

    def _retake(self, group: str, channel: str) -> None:
        try:
            self._hold(group, channel)
        except GroupBusy as error:
            with self._lock:
                self._lost = error

    def _renew(self) -> None:
        while not self._closed.wait(self._seconds / 3 if self._seconds else None):
            with self._lock:
                held = [] if self._lost is not None else list(self._until)
            for group, channel in held:
                with suppress(MillraceError):  # `check` tries again once the lease has ended
                    self._retake(group, channel)

    def close(self) -> None:
        """Give the leases back, so that another consumer need not wait. Idempotent."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._seconds)
        with self._lock:
            held, self._until = list(self._until), {}
        for group, channel in held:
            with suppress(MillraceError):  # it ends by itself
                self._service.hold_group(group, channel, self._holder, seconds=0.0)
