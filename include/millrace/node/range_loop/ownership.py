"""Whose channels are: all of them this process's, or, for a node of a cluster, what it was assigned.

What may be planned stands in a file of the node's, since a planner may be another process: a hint, and no more. What holds is
asked in the driver, before a commit (:class:`ChannelOwnership`); and behind that the table's fence.
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
    """What a node owns, as the driver of its loops asks."""

    def running(self, channels: AbstractSet[str], /) -> AbstractContextManager[object]:
        """Around ranges of `channels`, from their plan to what becomes of them: who gives one up may wait for that."""
        ...

    def committing(self, channels: AbstractSet[str], /) -> AbstractContextManager[AbstractSet[str]]:
        """Around a commit: those of `channels` of which something may be committed now. Who gives one up waits for its end."""
        ...

    def holds(self, channel: str, /) -> bool:
        """Whether something of the channel may be committed this moment: for who commits several times in one go."""
        ...

    def record_commit(self, channel: str, /, *, rows: int, bytes: int, tick: int) -> None:
        """So much of the log went into the tables by one commit, which brought the channel to `tick`."""
        ...


class FullOwnership:
    """One node has all channels (the protocol Owning)."""

    def running(self, channels: AbstractSet[str], /) -> AbstractContextManager[object]:
        return nullcontext()

    def committing(self, channels: AbstractSet[str], /) -> AbstractContextManager[AbstractSet[str]]:
        return nullcontext(channels)

    def holds(self, channel: str, /) -> bool:
        return True

    def record_commit(self, channel: str, /, *, rows: int, bytes: int, tick: int) -> None:
        pass


def assigned_path(settings: Settings) -> Path:
    """The file with the channels that this node may plan."""
    return settings.node_run_path / "assigned.json"


def write_assigned(path: Path, channels: Iterable[str]) -> None:
    replace_json(path, sorted(channels))


def read_assigned(path: Path) -> frozenset[str]:
    """The channels that the file names; none where it is not there."""
    try:
        return frozenset(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return frozenset()
