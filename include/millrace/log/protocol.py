"""What a log backend promises: four small methods, with everything rich built on top once.

One log is one PChannel: an ordered, durable sequence of opaque entries (docs/wire-form.md says what Millrace puts in
them). A backend keeps these promises; tests/conformance/ checks each of them on every backend:

- An entry is durable (survives kill -9 and power loss, as far as its medium can) when `append` returns its id.
- Ids strictly increase in log order and are never given twice, across restarts too.
- Every entry has a physical append stamp in Unix milliseconds, given by the log; stamps never decrease in log order.
- `read` returns entries in order, without a gap; the same position gives the same entries for ever, or PositionTruncated.
- An append that failed with an ambiguous error is in the log once or not at all, as one atomic batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

import pyarrow as pa

from millrace.message.ids import LogId

ENTRY_SCHEMA: Final = pa.schema(
    [
        pa.field("ledger", pa.int64(), nullable=False),
        pa.field("entry", pa.int64(), nullable=False),
        pa.field("physical_ms", pa.int64(), nullable=False),
        pa.field("value", pa.large_binary(), nullable=False),
    ]
)
"""Columns of a run of log entries: id, append stamp (Unix ms), bytes."""

DEFAULT_MAX_ENTRY_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class LogEntries:
    """A run of entries in log order (ENTRY_SCHEMA) and the position right behind it, whether or not it is empty."""

    batch: pa.RecordBatch
    next: LogId


@dataclass(frozen=True, slots=True)
class LogDescription:
    """Where a log stands. ``begin`` is the earliest position that can be read, ``end`` the one behind its last entry."""

    begin: LogId
    end: LogId
    bytes: int


class Log(Protocol):
    """One PChannel's log. Thread-safe: several threads may append and read at once."""

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> list[LogId]:
        """Append `values` as one atomic batch, in order; their ids, once all are durable.

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
        """Entries with position <= id < end, at most about `max_bytes` of values (but at least one entry, if there is one).

        Where there is none yet, waits up to `timeout` seconds and may return an empty run. Raises PositionTruncated where
        `position` lies before the earliest entry that retention left.
        """
        ...

    def truncate(self, position: LogId) -> int:
        """Give up everything before `position` (which must be <= end); returns the bytes freed. Whole files go at once."""
        ...

    def describe(self) -> LogDescription:
        """Where the log stands now."""
        ...

    def close(self) -> None:
        """Release what this handle holds. Idempotent."""
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

    def close(self) -> None:
        """Close the service and its handles. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
