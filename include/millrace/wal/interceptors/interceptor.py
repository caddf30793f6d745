"""The interface of an interceptor, and its optional abilities.

Each folder holds one interceptor. ``decide`` judges a run of messages from the channel state and may call ``proceed``
for the inner interceptors; ``evolve`` applies decided messages to the state. decide never modifies the state, and
recovery and rebuilds run evolve alone. Abilities are protocols of one method: the chain checks once which interceptors
have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from millrace.wal.message_run import DecidedBatch, DecidedMessage, Emission, MessageRun
from millrace.wal.state import ChannelState

Proceed = Callable[[MessageRun], None]


class Interceptor(Protocol):
    """One link of the chain."""

    name: str

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        """Judge `run` in place. `proceed` passes it to the next interceptor."""
        ...

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        """Apply decided inserts, deletes and rejections to `state` (the caller's own copy)."""
        ...

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        """Apply one accepted message of any type to `state`."""
        ...


class Timer(NamedTuple):
    """An emission that is due at a tick. Of an interceptor's timers at the same tick, the least `id` comes first."""

    deadline: int
    id: int
    emission: Emission


@runtime_checkable
class TimerSource(Protocol):
    """Emits by log time. At one tick, timers of outer interceptors come before those of inner ones."""

    def first_timer(self, state: ChannelState, tick: int) -> Timer | None:
        """Return the first of this interceptor's timers if it is due at `tick`."""
        ...


@runtime_checkable
class Emitter(Protocol):
    """Emits messages before a judged run. Emissions of outer interceptors come before those of inner ones."""

    def emissions(self, state: ChannelState, run: MessageRun) -> Iterable[Emission]:
        """Return the messages before the first message of `run`, in order. The state is the one before the run."""
        ...


@runtime_checkable
class Stamper(Protocol):
    """Writes columns of a judged run, after everything that precedes it is in the state."""

    def stamp(self, state: ChannelState, run: MessageRun) -> None:
        """Fill the columns of `run` that this interceptor owns."""
        ...


@runtime_checkable
class DeferredEmitter(Protocol):
    """Emits messages that waited for a change of the state."""

    def ready_emission(self, state: ChannelState) -> Emission | None:
        """Return the next emission that waits for nothing more. Called until it returns None."""
        ...
