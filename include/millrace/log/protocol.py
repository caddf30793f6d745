"""What a log backend promises: four small methods, with everything rich built on top once.

One log is one PChannel: an ordered, durable sequence of opaque entries (docs/wire-form.md says what Millrace puts in
them). A backend keeps these promises; tests/conformance/ checks each of them on every backend:

- An entry is durable (survives kill -9 and power loss, as far as its medium can) when `append` returns its id.
- Ids strictly increase in log order and are never given twice, across restarts too.
- Every entry has a physical append stamp in Unix milliseconds, given by the log. The embedded log's never decrease; a
  broker's go back when its clock does, so only ids order entries (the chain's tick is the greater of last + 1 and the stamp).
- `read` returns entries in order, without a gap; the same position gives the same entries for ever, or PositionTruncated.
- An append that failed with an ambiguous error is in the log once or not at all, as one atomic batch. That is the embedded
  log's promise; a broker may leave a prefix of the batch, in order and once, and may do so a moment later. Messages with a
  producer sequence make the repeat harmless (law 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import pyarrow as pa

from millrace.message.ids import LogId
from millrace.message.log_entries import LogDescription, LogEntries


class Log(Protocol):
    """One PChannel's log. Thread-safe: several threads may append and read at once."""

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        """Append `values` as one atomic batch, in order; their ids (LogIds where they are consecutive), once all are durable.

        Raises EntryTooLarge (nothing is appended), LogUnavailable (ambiguous).
        """
        ...

    def read(
        self,
        position: LogId,
        *,
        end: LogId | None = None,
        max_bytes: int = 64 << 20,
        timeout: float = 0.0,
    ) -> LogEntries:
        """Entries with position <= id < end, at most about `max_bytes` (but at least one entry, if there is one).

        That counts the bytes of the values and ENTRY_BYTES for each entry, so that a run of empty ones is bounded too.

        Where there is none yet, waits up to `timeout` seconds and may return an empty run. Raises PositionTruncated where
        `position` lies before the earliest entry that retention left.
        """
        ...

    def truncate(self, position: LogId) -> int:
        """Give up everything before `position` (which must be <= end); returns the bytes freed.

        The embedded log's whole files go at once; a broker frees its own later, and those are not in the answer.
        Raises InvalidArgument beyond the end.
        """
        ...

    def describe(self) -> LogDescription:
        """Where the log stands now."""
        ...

    def end(self) -> LogId:
        """The position behind the last entry: `describe().end`, for less where a broker has to be asked for the rest."""
        ...

    def close(self) -> None:
        """Release what this handle holds. Idempotent."""
        ...


@runtime_checkable
class Switchable(Protocol):
    """A log that may go on in another backend (millrace.log.generations.service)."""

    def record_end(self, end: LogId) -> bool:
        """Keep that the log of its generation ends at `end`, as the chain found; False where no next one is known yet.

        Idempotent.
        """
        ...


class LogService(Protocol):
    """A backend: makes, opens, lists and destroys the logs of one deployment."""

    def create(self, pchannel: str) -> None:
        """Make an empty log; raises ChannelExists."""
        ...

    def open(self, pchannel: str) -> Log:
        """A handle on an existing log; raises ChannelNotFound."""
        ...

    def names(self) -> list[str]:
        """The PChannels of this deployment, sorted."""
        ...

    def drop(self, pchannel: str) -> None:
        """Destroy a log with all its entries; raises ChannelNotFound."""
        ...

    def groups(self) -> list[str]:
        """The consumer groups of this deployment, sorted. A group exists from its first move until it is dropped."""
        ...

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """Where a group stands in a log; None where it never moved there. Raises ChannelNotFound (the log is not there).

        The position may have been truncated since: reading there says so. A log that was dropped and made again has none.
        """
        ...

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """Move a group to a position, forth or back; it is durable when this returns. The first move makes the group.

        Repeating it is harmless. Raises ChannelNotFound (the log is not there), InvalidArgument, LogUnavailable (it may
        have moved).
        """
        ...

    def drop_group(self, group: str) -> None:
        """Forget a group with all its positions; nothing where there is none of that name."""
        ...

    def close(self) -> None:
        """Close the service and its handles. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
