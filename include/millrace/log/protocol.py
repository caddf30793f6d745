"""The contract of a log backend: four small methods; everything else is built on them once.

A log is one PChannel: an ordered, durable sequence of opaque entries (docs/wire-form.md defines their content). A
backend keeps these promises; tests/conformance/ checks each of them on every backend:

- An entry is durable (survives kill -9 and power loss, as far as its medium can) when `append` returns its id.
- Ids strictly increase in log order and are never reused, not even after a restart.
- The log gives every entry a physical append stamp in Unix milliseconds. Stamps of the embedded log never decrease; a
  broker's go back when its clock does. So only ids order entries (the chain's tick is the greater of last + 1 and the
  stamp).
- `read` returns entries in order and without a gap. The same position always gives the same entries, or
  PositionTruncated.
- After an ambiguous error, the embedded log has the batch once or not at all. A broker may have a prefix of the
  batch, in order and once, and may add it a moment later. A producer sequence makes a repeat of the messages harmless
  (law 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeGuard, TypeVar, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import LogCorrupted, LogUnavailable
from millrace.message.ids import LogId
from millrace.message.log_entries import LogDescription, LogEntries, StampFloor, VerifyReport


class Log(Protocol):
    """One PChannel's log. Thread-safe: several threads may append and read concurrently."""

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        """Append `values` as one atomic batch, in order; return their ids when all are durable.

        The ids are LogIds if they are consecutive.
        Raises EntryTooLarge (nothing was appended), LogUnavailable (ambiguous).
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
        """Return entries with position <= id < end, about `max_bytes` of them but at least one if there is one.

        The size counts the values and ENTRY_BYTES for each entry, so that a run of empty entries is bounded too.
        If there is none yet, waits up to `timeout` seconds and may return an empty run.
        Raises PositionTruncated if `position` is before the earliest retained entry.
        """
        ...

    def truncate(self, position: LogId) -> int:
        """Discard everything before `position`, which must be <= end; return the bytes freed.

        The embedded log frees whole files at once. A broker frees files later, and those do not count.
        Raises InvalidArgument beyond the end.
        """
        ...

    def describe(self) -> LogDescription:
        """Return the log's begin, end and size."""
        ...

    def end(self) -> LogId:
        """Return the position after the last entry: `describe().end`, cheaper on a broker."""
        ...

    def close(self) -> None:
        """Release the handle's resources. Idempotent."""
        ...


class LocalLog(Log, Protocol):
    """A log that lies in this process: what was appended is readable at once, and wakes the reads that wait for it."""

    def wake(self) -> None:
        """Have the reads that wait for entries return without any."""
        ...


def is_local(log: Log) -> TypeGuard[LocalLog]:
    """Return whether the log lies in this process."""
    return bool(getattr(log, "is_local", False))


@runtime_checkable
class Switchable(Protocol):
    """A log that can continue in another backend (millrace.log.generations.service)."""

    def record_end(self, end: LogId) -> bool:
        """Record that the log of its generation ends at `end`, as the chain found. Idempotent.

        Returns False if no next generation is known yet.
        """
        ...


@runtime_checkable
class StampPromising(Protocol):
    """A log that stamps its entries by a clock of its own."""

    def stamp_floor(self) -> StampFloor | None:
        """Return what it promises now, or None. The promise outlives the process and a power loss."""
        ...


def stamp_floor(log: Log) -> StampFloor | None:
    """Return what a log promises about the stamps of entries to come; None if it promises nothing, as brokers do."""
    return log.stamp_floor() if isinstance(log, StampPromising) else None


class LogService(Protocol):
    """A backend: creates, opens, lists and drops the logs of one deployment."""

    def create(self, pchannel: str) -> None:
        """Create an empty log.

        Raises ChannelExists.
        """
        ...

    def open(self, pchannel: str) -> Log:
        """Return a handle on an existing log.

        Raises ChannelNotFound.
        """
        ...

    def names(self) -> list[str]:
        """Return the deployment's PChannels, sorted."""
        ...

    def drop(self, pchannel: str) -> None:
        """Drop a log with all its entries.

        Raises ChannelNotFound.
        """
        ...

    def groups(self) -> list[str]:
        """Return the deployment's consumer groups, sorted. A group exists from its first move until it is dropped."""
        ...

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """Return a group's position in a log; None if it never moved there.

        The position may have been truncated since; reading there says so. A log that was dropped and recreated has
        none.
        Raises ChannelNotFound.
        """
        ...

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """Move a group to a position, forward or back, durably. The first move creates the group. Idempotent.

        Raises ChannelNotFound, InvalidArgument, LogUnavailable (ambiguous).
        """
        ...

    def hold_group(self, group: str, pchannel: str, holder: str, *, seconds: float) -> None:
        """Take or renew the lease on a group's channel, for `holder` alone; with 0 seconds, give it back.

        Leases exist among the consumers that use one process's service or server.
        Raises GroupBusy while another holder has it, InvalidArgument.
        """
        ...

    def drop_group(self, group: str) -> None:
        """Remove a group with all its positions. No effect if it does not exist."""
        ...

    def close(self) -> None:
        """Close the service and its handles. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LogCore(Protocol):
    """Shared state of all handles of one log."""

    def read(self, position: LogId, *, end: LogId | None, max_bytes: int, timeout: float) -> LogEntries: ...

    def truncate(self, position: LogId) -> int: ...

    def describe(self) -> LogDescription: ...


CoreT = TypeVar("CoreT", bound=LogCore)


class LogHandle(Generic[CoreT]):
    """The Log protocol except `append`, which each backend implements. Closing a handle leaves other handles of the log
    open.
    """

    def __init__(self, core: CoreT) -> None:
        self._core: CoreT | None = core

    def read(
        self, position: LogId, *, end: LogId | None = None, max_bytes: int = 64 << 20, timeout: float = 0.0
    ) -> LogEntries:
        """See :meth:`Log.read`.

        Also raises LogCorrupted if stored entries are damaged or missing.
        """
        return self._open().read(position, end=end, max_bytes=max_bytes, timeout=timeout)

    def truncate(self, position: LogId) -> int:
        """See :meth:`Log.truncate`."""
        return self._open().truncate(position)

    def describe(self) -> LogDescription:
        """See :meth:`Log.describe`."""
        return self._open().describe()

    def end(self) -> LogId:
        """See :meth:`Log.end`."""
        return self._open().describe().end

    def close(self) -> None:
        """See :meth:`Log.close`."""
        self._core = None

    def _open(self) -> CoreT:
        if self._core is None:
            raise LogUnavailable("this handle is closed: open the log again")
        return self._core


def verify_by_reading(log: Log) -> VerifyReport:
    """Read a log from beginning to end and report the first error. The log must be contiguous.

    Raises what a read raises, except LogCorrupted, which is the finding.
    """
    described = log.describe()
    position, entries, size, records = described.begin, 0, 0, 0
    while position < described.end:
        try:
            run = log.read(position, end=described.end)
        except LogCorrupted as error:
            return VerifyReport(records, entries, size, position, str(error))
        position = run.next
        if not run.batch.num_rows:
            break  # the end; the backend has proven that no entry is missing before it
        records += 1
        entries += run.batch.num_rows
        size += pc.sum(pc.binary_length(run.batch.column("value"))).as_py()
    if position < described.end:
        return VerifyReport(records, entries, size, position, f"the log ends at {position}, before {described.end}")
    return VerifyReport(records, entries, size, None, "every batch's checksum holds, and nothing is missing")
