"""What the coordinator needs of an append host, and how a host, or a client of one, gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.rpc.outcome import AppendOutcome
from millrace.wal.definitions import PChannelDefinitions


class AppendPort(Protocol):
    """What the coordinator needs of an append host."""

    def append_one(self, pchannel: str, entry: bytes) -> int:
        """Append one entry with one message; its time tick (a repeat's: the first one's), or AppendRejected."""
        ...

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        """What the chain has on `pchannel` once it has judged all that the log holds now, in full of one collection."""
        ...


class AppendCalls(Protocol):
    """An append host, or a client of one."""

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float) -> AppendOutcome: ...

    def definitions(self, pchannel: str, collection_id: int | None, *, deadline: float) -> PChannelDefinitions: ...


class SingleEntryAppender:
    """An append host as the coordinator sees it (the protocol Appending)."""

    def __init__(self, append: AppendCalls, deadline: float) -> None:
        self._append = append
        self._deadline = deadline

    def append_one(self, pchannel: str, entry: bytes) -> int:
        return self._append.append(pchannel, [entry], deadline=self._deadline).result().time_tick

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        return self._append.definitions(pchannel, collection_id, deadline=self._deadline)
