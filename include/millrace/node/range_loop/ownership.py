"""Ownership of channels: a single process owns all, a node of a cluster owns those it was assigned.

The node writes the channels that it may plan to a file, because its planner may be another process. That file is a
hint.
The driver checks ownership before each commit (:class:`ChannelOwnership`), and the table's fence is the final check.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from millrace.base.files import replace_json
from millrace.base.settings import Settings


class ChannelOwnership(Protocol):
    """The channels that a node owns, as the driver of its loops asks for them."""

    def running(self, channels: AbstractSet[str], /) -> AbstractContextManager[object]:
        """Enclose the ranges of `channels` from their plan to their outcome. Giving up a channel may wait for it."""
        ...

    def committing(self, channels: AbstractSet[str], /) -> AbstractContextManager[AbstractSet[str]]:
        """Enclose a commit. Yields those of `channels` that may be committed now. Giving up a channel waits for the
        end.
        """
        ...

    def holds(self, channel: str, /) -> bool:
        """Return whether the channel may be committed now: for committers that make several commits."""
        ...

    def record_commit(self, channel: str, /, *, rows: int, bytes: int, tick: int) -> None:
        """Record that one commit took `rows` and `bytes` from the log and moved the channel to `tick`."""
        ...


class FullOwnership:
    """Owns all channels (implements ChannelOwnership)."""

    def running(self, channels: AbstractSet[str], /) -> AbstractContextManager[object]:
        return nullcontext()

    def committing(self, channels: AbstractSet[str], /) -> AbstractContextManager[AbstractSet[str]]:
        return nullcontext(channels)

    def holds(self, channel: str, /) -> bool:
        return True

    def record_commit(self, channel: str, /, *, rows: int, bytes: int, tick: int) -> None:
        pass


def assigned_path(settings: Settings) -> Path:
    """Return the file with the channels that this node may plan."""
    return settings.node_run_path / "assigned.json"


def write_assigned(path: Path, channels: Iterable[str]) -> None:
    """Write the channels that this node may plan."""
    replace_json(path, sorted(channels))


def read_assigned(path: Path) -> frozenset[str]:
    """Return the channels that the file names; none if there is no file."""
    try:
        return frozenset(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return frozenset()
