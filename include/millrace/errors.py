"""The one exception family of Millrace.

Every error carries a stable ``code``, whether a retry of the same call can help (``retriable``), and a message that tells
its reader what to do. Retry code asks ``error.retriable`` and lists no types.
"""

from __future__ import annotations

from typing import ClassVar


class MillraceError(Exception):
    """Root of the family; never raised itself."""

    code: ClassVar[str] = "MILLRACE"
    retriable: ClassVar[bool] = False


class InvalidArgument(MillraceError):
    """A caller passed a value that can never be right."""

    code = "INVALID_ARGUMENT"


class InvalidSettings(MillraceError):
    """A setting is missing, malformed or contradicts another."""

    code = "INVALID_SETTINGS"


class UnsafeDataFolder(MillraceError):
    """Others than its owner can write to the data folder: nothing is started on it; the message says the chmod that closes it."""

    code = "UNSAFE_DATA_FOLDER"


class Malformed(MillraceError):
    """Bytes that are not a value of the wire form (docs/wire-form.md), or a body that is not of its type."""

    code = "MALFORMED"


class StateDamaged(Malformed):
    """A PChannel's state row is not as it was committed, or its file is gone: run the operation recovery, which makes it anew."""

    code = "STATE_DAMAGED"


class UnsupportedVersion(MillraceError):
    """A wire form, chain or state of a version that this build does not know: run the build that wrote it, or a newer one."""

    code = "UNSUPPORTED_VERSION"


class UnsupportedMessageType(MillraceError):
    """A number of the chapter-4 enumeration without behaviour in Millrace, or no number of it at all."""

    code = "UNSUPPORTED_MESSAGE_TYPE"


class LogError(MillraceError):
    """Root of what a log backend raises."""

    code = "LOG"


class ChannelNotFound(LogError):
    """No such PChannel in this log: create it first."""

    code = "CHANNEL_NOT_FOUND"


class ChannelExists(LogError):
    """A PChannel (or consumer group) of this name exists already."""

    code = "CHANNEL_EXISTS"


class EntryTooLarge(LogError):
    """An entry is larger than the log takes: split the batch, or raise the limit on every host."""

    code = "ENTRY_TOO_LARGE"


class PositionTruncated(LogError):
    """Retention has removed the position that was asked for. ``earliest`` is the first position that can be read."""

    code = "POSITION_TRUNCATED"

    def __init__(self, message: str, *, earliest: tuple[int, int]) -> None:
        super().__init__(message)
        self.earliest = earliest

    def __reduce__(self) -> tuple[object, ...]:
        return (_position_truncated, (str(self), self.earliest))


def _position_truncated(message: str, earliest: tuple[int, int]) -> PositionTruncated:
    return PositionTruncated(message, earliest=earliest)


class LogRegressed(LogError):
    """The log ends before a committed position, or its last committed entry has other bytes: it lost data it acknowledged."""

    code = "LOG_REGRESSED"


class LogCorrupted(LogError):
    """A stored record fails its checksum although later records were acknowledged: restore the file, do not cut it."""

    code = "LOG_CORRUPTED"


class LogUnavailable(LogError):
    """The log (or its server) cannot be reached now."""

    code = "LOG_UNAVAILABLE"
    retriable = True


class ServerFull(LogError):
    """The log's server has as many streams of appends open as it takes; nothing of this one was read. Try again."""

    code = "SERVER_FULL"
    retriable = True


class LogBusy(LogError):
    """Another process holds this log; use it through its server."""

    code = "LOG_BUSY"
    retriable = True


class LogFenced(LogError):
    """A newer writer took this log over: this handle appends nothing any more, though it still reads. The newer one goes on."""

    code = "LOG_FENCED"


class LogRefused(LogError):
    """The brokers refused an administrative call of the log; ``status`` is their HTTP status, the message holds their reason."""

    code = "LOG_REFUSED"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return (_log_refused, (str(self), self.status))


def _log_refused(message: str, status: int) -> LogRefused:
    return LogRefused(message, status=status)


class AppendRejected(MillraceError):
    """The chain judged a message and rejected it; ``reason`` is a name of :class:`millrace.wal.reasons.Reason`."""

    code = "APPEND_REJECTED"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_append_rejected, (str(self), self.reason))


def _append_rejected(message: str, reason: str) -> AppendRejected:
    return AppendRejected(message, reason=reason)


class ProducerFenced(AppendRejected):
    """A newer producer of this id took over: this one appends nothing any more. Close it; the newer one goes on."""

    code = "PRODUCER_FENCED"

    def __init__(self, message: str, *, reason: str = "PRODUCER_FENCED") -> None:
        super().__init__(message, reason=reason)

    def __reduce__(self) -> tuple[object, ...]:
        return (ProducerFenced, (str(self),))


class AppendUnresolved(LogUnavailable):
    """The log could not be asked what became of an append: it is in the log once, or not at all. Do not send its rows again:
    the producer holds them and repeats them, with the sequences they have, before its next append, or on ``settle()``."""

    code = "APPEND_UNRESOLVED"
    retriable = False


class BufferFull(MillraceError):
    """A producer's buffer held as much as it may until the deadline: nothing of this append was taken. Append again later."""

    code = "BUFFER_FULL"
    retriable = True


class SpoolFull(MillraceError):
    """The log cannot be reached and the spool holds as much as it may: nothing of this append was taken. Wait, or enlarge it."""

    code = "SPOOL_FULL"
    retriable = True


class SpoolBusy(MillraceError):
    """Another process holds this spool: one spool belongs to one producer at a time."""

    code = "SPOOL_BUSY"


class SpoolCorrupted(MillraceError):
    """A whole record of the spool fails its checksum: it was damaged on the disk. Keep the folder, and look what is in it."""

    code = "SPOOL_CORRUPTED"


class TransactionLost(AppendRejected):
    """A transaction ended before its commit (its lease or lifetime ran out, or DDL or a flush came): nothing of it is visible.
    Begin a new one with the same rows."""

    code = "TRANSACTION_LOST"

    def __reduce__(self) -> tuple[object, ...]:
        return (_transaction_lost, (str(self), self.reason))


def _transaction_lost(message: str, reason: str) -> TransactionLost:
    return TransactionLost(message, reason=reason)


class GroupBusy(MillraceError):
    """Another consumer of this group reads this channel: a group has one consumer a channel at a time."""

    code = "GROUP_BUSY"


class ChannelParked(MillraceError):
    """An entry of this PChannel cannot be processed; the PChannel waits for a person, the others go on."""

    code = "CHANNEL_PARKED"


class CommitFenced(MillraceError):
    """Another committer moved the PChannel since this range was planned: drop the files, plan anew."""

    code = "COMMIT_FENCED"
    retriable = True


class TableUnavailable(MillraceError):
    """A range cannot be written or read now, for want of room or storage; nothing of it was committed."""

    code = "TABLE_UNAVAILABLE"
    retriable = True


class TableDamaged(MillraceError, OSError):
    """A file of a table is missing or does not read: the operation recovery makes it anew, from the log or the WAL.

    `missing`: it is not there. Where a reader has held an old version of the table for long, VACUUM may have taken it.
    """

    code = "TABLE_DAMAGED"

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[object, ...]:
        return (_table_damaged, (str(self), self.missing))


def _table_damaged(message: str, missing: bool) -> TableDamaged:
    return TableDamaged(message, missing=missing)


class WalGap(MillraceError):
    """The chain of previous ticks in the WAL is broken: rows of a range are missing."""

    code = "WAL_GAP"


class StagedFileDamaged(MillraceError):
    """A staged file that an Import names is missing, altered, or is not what the message says; the message names it, and
    says what to do."""

    code = "STAGED_FILE_DAMAGED"


class TickNotReached(MillraceError):
    """A read at a time tick that not every channel of the collection has confirmed yet."""

    code = "TICK_NOT_REACHED"
    retriable = True


class TickTooOld(MillraceError):
    """A read before the oldest state that can still be rebuilt; the message names that tick."""

    code = "TICK_TOO_OLD"


class CollectionNotFound(MillraceError):
    """No collection of this name or id."""

    code = "COLLECTION_NOT_FOUND"


class CollectionExists(MillraceError):
    """A collection of this name exists with another definition."""

    code = "COLLECTION_EXISTS"


class CatalogDiverged(MillraceError):
    """The chain has another definition of a collection than the catalog, in a way that the catalog cannot follow."""

    code = "CATALOG_DIVERGED"


class DeadlineExceeded(MillraceError):
    """A bounded wait ran out. The effect of the call is unknown unless the message says otherwise."""

    code = "DEADLINE_EXCEEDED"
    retriable = True


class RateLimited(MillraceError):
    """The host takes no more row changes now, or not so many; nothing was appended. Try again in ``retry_after`` seconds."""

    code = "RATE_LIMITED"
    retriable = True

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return (_rate_limited, (str(self), self.retry_after))


def _rate_limited(message: str, retry_after: float) -> RateLimited:
    return RateLimited(message, retry_after=retry_after)


class StreamClosed(MillraceError):
    """A message stream that was closed, before the call or while it waited: make another."""

    code = "STREAM_CLOSED"


class PackTooLarge(MillraceError):
    """A time-tick stream holds more than it may while it waits for ticks: have ticks sent more often, or raise
    ``max_pack_bytes``; the stream's positions are where they were."""

    code = "PACK_TOO_LARGE"


class MessagesRefused(MillraceError):
    """A pack came with messages that cannot be delivered, late or malformed; ``pack`` has them, and the good ones."""

    code = "MESSAGES_REFUSED"

    def __init__(self, message: str, *, pack: object) -> None:
        super().__init__(message)
        self.pack = pack

    def __reduce__(self) -> tuple[object, ...]:
        return (_messages_refused, (str(self), self.pack))


def _messages_refused(message: str, pack: object) -> MessagesRefused:
    return MessagesRefused(message, pack=pack)


class InvalidSuite(MillraceError):
    """A users' expectation suite that cannot be used: the message names the file, the expectation and what is wrong."""

    code = "INVALID_SUITE"


class QualityBlocked(MillraceError):
    """A critical expectation stands failed, so that nothing is removed; ``blocks`` are the ids to mend or to release."""

    code = "QUALITY_BLOCKED"

    def __init__(self, message: str, *, blocks: tuple[str, ...]) -> None:
        super().__init__(message)
        self.blocks = blocks

    def __reduce__(self) -> tuple[object, ...]:
        return (_quality_blocked, (str(self), self.blocks))


def _quality_blocked(message: str, blocks: tuple[str, ...]) -> QualityBlocked:
    return QualityBlocked(message, blocks=blocks)


class RunNotFound(MillraceError):
    """No run of an operation with this id: it was never started, or its folder was cleaned away."""

    code = "RUN_NOT_FOUND"


class AirflowUnavailable(MillraceError):
    """Airflow's API cannot be reached, or answered with an error; ``status`` is the HTTP status where it answered."""

    code = "AIRFLOW_UNAVAILABLE"
    retriable = True

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return (_airflow_unavailable, (str(self), self.status))


def _airflow_unavailable(message: str, status: int | None) -> AirflowUnavailable:
    return AirflowUnavailable(message, status=status)


class RepairImpossible(MillraceError):
    """What is damaged cannot be computed again from what is left; the message says what to restore."""

    code = "REPAIR_IMPOSSIBLE"


class BackupBusy(MillraceError):
    """Another backup is being made, or what a backup needs to stand still is being given up right now: try again."""

    code = "BACKUP_BUSY"
    retriable = True


class BackupNotFound(MillraceError):
    """There is no whole backup here: one without a manifest was never finished."""

    code = "BACKUP_NOT_FOUND"


class BackupDamaged(MillraceError):
    """A backup lacks a file, has one with other bytes than when it was made, or names what lies outside: restore another backup."""

    code = "BACKUP_DAMAGED"


class BackupRefused(MillraceError):
    """What is asked for would not give a consistent deployment; nothing was done, and the message says what is possible."""

    code = "BACKUP_REFUSED"
