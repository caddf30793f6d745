"""The interceptor chain: redo → lock → timetick (with the transaction manager beside it) → shard.

Each folder holds one interceptor of the same shape. ``decide`` judges a run of messages from the channel state and may call
``proceed`` for what lies further in; ``evolve`` makes decided messages part of the state. decide never changes the state;
recovery and rebuilds run evolve alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millrace.wal.run import Decided, Row, Run
from millrace.wal.state import ChannelState

Proceed = Callable[[Run], None]


class Interceptor(Protocol):
    """One link of the chain."""

    name: str

    def decide(self, state: ChannelState, run: Run, proceed: Proceed) -> None:
        """Judge `run` in place; `proceed` hands it to the next link."""
        ...

    def evolve(self, state: ChannelState, rows: Decided) -> None:
        """Take decided inserts, deletes and rejections into `state` (the caller's own copy)."""
        ...

    def evolve_one(self, state: ChannelState, row: Row) -> None:
        """Take one accepted message of any type into `state`."""
        ...
