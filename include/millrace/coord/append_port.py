"""The append host as the coordinator needs it, and an adapter from a real host or its client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.rpc.outcome import AppendOutcome
from millrace.wal.definitions import PChannelDefinitions


class AppendPort(Protocol):
    """The calls that the coordinator makes to an append host."""

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        """Append one entry that holds one message; return its time tick.

        A repeat returns the tick of the first append. The entry gets the stamp of `principal`, if any.
        Raises AppendRejected.
        """
        ...

    def judge(self, pchannel: str, entry: bytes) -> int:
        """Judge an entry as if it came next, without appending it; return the last tick of the PChannel.

        Raises AppendRejected if the chain would reject it.
        """
        ...

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        """Return the collections that the chain has on `pchannel`, with the full definition of one of them.

        The chain has judged every entry that the log holds at the time of the call.
        """
        ...


class AppendCalls(Protocol):
    """The calls of an append host, or of a client of one, that the adapter uses."""

    def append(
        self, pchannel: str, entries: Sequence[bytes], *, deadline: float, principal: str = ""
    ) -> AppendOutcome: ...

    def judge(self, pchannel: str, entry: bytes, *, deadline: float) -> tuple[AppendOutcome, int]: ...

    def definitions(self, pchannel: str, collection_id: int | None, *, deadline: float) -> PChannelDefinitions: ...


class SingleEntryAppender:
    """Adapt an append host to AppendPort, with one deadline for every call."""

    def __init__(self, append: AppendCalls, deadline: float) -> None:
        self._append = append
        self._deadline = deadline

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        outcome = self._append.append(pchannel, [entry], deadline=self._deadline, principal=principal)
        return outcome.result().time_tick

    def judge(self, pchannel: str, entry: bytes) -> int:
        outcome, last_tick = self._append.judge(pchannel, entry, deadline=self._deadline)
        outcome.result()
        return last_tick

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        return self._append.definitions(pchannel, collection_id, deadline=self._deadline)
