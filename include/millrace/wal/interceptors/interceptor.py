"""What an interceptor is, and what it may be able to do besides.

Each folder holds one interceptor of the same shape. ``decide`` judges a run of messages from the channel state and may call
``proceed`` for what lies further in; ``evolve`` makes decided messages part of the state. decide never changes the state;
recovery and rebuilds run evolve alone. The abilities are protocols of one method: the chain asks once which links have
them, and then only those.
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
        """Judge `run` in place; `proceed` hands it to the next link."""
        ...

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        """Take decided inserts, deletes and rejections into `state` (the caller's own copy)."""
        ...

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        """Take one accepted message of any type into `state`."""
        ...


class Timer(NamedTuple):
    """An emission that falls due at a tick; of one link's timers of the same tick the least `id` comes first."""

    deadline: int
    id: int
    emission: Emission


@runtime_checkable
class TimerSource(Protocol):
    """Emits by log time. At one tick an outer link's timers come before an inner one's."""

    def timers(self, state: ChannelState, tick: int) -> Iterable[Timer]:
        """Its timers; at `tick`, of which the state says that some timer's deadline has come."""
        ...


@runtime_checkable
class Emitter(Protocol):
    """Emits messages before a run that was judged. What outer links emit comes before what inner ones do."""

    def emissions(self, state: ChannelState, run: MessageRun) -> Iterable[Emission]:
        """What comes before the first message of `run`, in order. The state is that before the run."""
        ...


@runtime_checkable
class Stamper(Protocol):
    """Writes into a judged run what its messages get, once everything that comes before them is in the state."""

    def stamp(self, state: ChannelState, run: MessageRun) -> None:
        """Fill columns of `run` that it stands for."""
        ...


@runtime_checkable
class DeferredEmitter(Protocol):
    """Emits what waited for the state to change."""

    def ready_emission(self, state: ChannelState) -> Emission | None:
        """The next emission that waits for nothing more; asked again until there is none."""
        ...
