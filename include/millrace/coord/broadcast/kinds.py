"""Kinds of message broadcasts: each with a check before it is stored, and a callback when every VChannel has it.

Other packages register kinds as entry points. Their code is not trusted with the ledger: whatever it raises becomes a
typed error, and a callback runs in no transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millrace.base.bounded_call import BoundedCalls
from millrace.base.entry_points import load_entry_points
from millrace.base.errors import BroadcastRefused, CallbackFailed, InvalidArgument, MillraceError
from millrace.catalog.broadcast import MESSAGE_KIND, check_kind_name, message_from_json
from millrace.coord.broadcast.task import MESSAGES, BroadcastTask
from millrace.coord.ddl.kinds import DDL_KINDS
from millrace.message.model import MutableMessage

GROUP: Final = "millrace.broadcast_kinds"
"""The group of entry points; each is a :class:`BroadcastKind`."""
DATA: Final = "data"
"""Key of a task's change: what the caller passes to the callbacks."""

CHECK_SECONDS: Final = 5.0
"""Time that a check may take. It runs in the ledger's transaction, so all DDL waits for it."""
CALLBACK_SECONDS: Final = 30.0
"""Time that a callback may take before its broadcast is left open and others go on."""
_MAX_CALLS: Final = 64
"""Callbacks, and checks, that run at a time in a process, those that exceeded their time included."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubmittedBroadcast:
    """A broadcast as its kind's callbacks see it."""

    id: int
    """Id of the broadcast. Of two broadcasts to one VChannel, the later one has the greater id."""
    kind: str
    principal: str
    """Principal that submitted it."""
    data: Mapping[str, Any]
    messages: tuple[MutableMessage, ...]
    ticks: Mapping[str, int]
    """Time tick of each VChannel's message; empty before the messages are sent."""


def _nothing(broadcast: SubmittedBroadcast) -> None:
    """Do nothing: the callback of a kind that has none."""


@dataclass(frozen=True, slots=True)
class BroadcastKind:
    """A kind of broadcast. The log's server runs its callbacks."""

    name: str
    check: Callable[[SubmittedBroadcast], None] = _nothing
    """Raises to refuse a broadcast before anything is stored. No other broadcast to its VChannels is open meanwhile.

    It must be quick: it runs in the ledger's transaction, and may be called again for the same broadcast. One that has
    not returned after 5 s refuses the broadcast.
    """
    on_acknowledged: Callable[[SubmittedBroadcast], None] = _nothing
    """Runs when every VChannel has its message, at least once, and before a later broadcast to any of its VChannels is
    stored. If it raises, the broadcast stays open and the callback runs again. If it has not returned after 30 s, the
    broadcast stays open until it has.

    After a crash it can run in two processes, so make it idempotent by `id`: skip an id that is not greater than the
    newest one that is done.
    """


_PLAIN: Final = BroadcastKind(MESSAGE_KIND)


def find_kind(name: str) -> BroadcastKind:
    """Return a kind of message broadcast. Raises InvalidArgument if no installed package has it, InvalidSettings."""
    if name == MESSAGE_KIND:
        return _PLAIN
    others = {each.name: each for each in load_entry_points(GROUP, BroadcastKind)}
    for each in others:
        check_kind_name(each)
    if name in DDL_KINDS or name not in others:
        known = ", ".join(sorted({MESSAGE_KIND, *others} - set(DDL_KINDS)))
        raise InvalidArgument(
            f"unknown kind of broadcast {name!r}; known are {known}. Install the package that has it where the log's"
            " server runs, and restart the server"
        )
    return others[name]


def broadcast_of(task: BroadcastTask) -> SubmittedBroadcast:
    """Return a message broadcast, as the callbacks of its kind see it."""
    messages = tuple(message_from_json(each) for each in task.change[MESSAGES])
    return SubmittedBroadcast(task.id, task.kind, task.principal, task.change[DATA], messages, dict(task.ticks))


class KindCalls:
    """Runs the checks and callbacks of a process's kinds, each for a limited time. Thread-safe."""

    def __init__(self) -> None:
        # Apart: checks that never return must not keep callbacks from being called.
        self._checks = BoundedCalls("broadcast-check", most=_MAX_CALLS)
        self._callbacks = BoundedCalls("broadcast-callback", most=_MAX_CALLS)

    def check(self, kind: BroadcastKind, task: BroadcastTask) -> None:
        """Run the check of a kind. Raises BroadcastRefused if it raises anything, or takes too long."""
        if kind.check is _nothing:
            return
        submitted = broadcast_of(task)
        try:
            self._checks.run(lambda: kind.check(submitted), CHECK_SECONDS)
        except Exception as error:  # whatever another package's code raises
            said = f"{error.code}: {error}" if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
            raise BroadcastRefused(f"the check of {kind.name} refused it, and nothing was sent: {said}") from error

    def callback(self, kind: BroadcastKind, task: BroadcastTask) -> None:
        """Run the acknowledge callback of a kind, or wait for the one of this task that still runs.

        Raises CallbackFailed if it raises anything, or takes too long.
        """
        if kind.on_acknowledged is _nothing:
            return
        submitted = broadcast_of(task)
        try:
            self._callbacks.run(lambda: kind.on_acknowledged(submitted), CALLBACK_SECONDS, key=task.id)
        except TimeoutError as error:
            raise CallbackFailed(
                f"every VChannel has the broadcast {task.id}, but the callback of {kind.name} is not done, and is"
                f" looked at again every 10 s: {error}"
            ) from error
        except Exception as error:  # whatever another package's code raises
            _log.warning("the callback of the broadcast %d (%s) failed", task.id, kind.name, exc_info=True)
            raise CallbackFailed(
                f"every VChannel has the broadcast {task.id}, but the callback of {kind.name} failed and is called"
                f" again every 10 s: {type(error).__name__}: {error}"
            ) from error
