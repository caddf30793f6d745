"""The one exception family of Millrace.

Every error carries a stable ``code``, whether a retry of the same call can help (``retriable``), and a message that tells
its reader what to do. Retry code asks ``error.retriable`` and lists no types.
"""

from __future__ import annotations

import os
import re
from typing import ClassVar


class MillraceError(Exception):
    """Root of the family; never raised itself. An error's code is its class's name unless the class says another."""

    code: ClassVar[str] = "MILLRACE"
    retriable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "code" not in cls.__dict__:
            cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross processes whole, whatever their constructors ask for."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[MillraceError], args: tuple[object, ...], facts: dict[str, object]) -> MillraceError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class InvalidArgument(MillraceError):
    """A caller passed a value that can never be right."""


class Closed(MillraceError):
    """A call to a producer, an appender or a consumer that was closed: make another."""


class CheckViolated(InvalidArgument):
    """Rows make a check of their collection false, or say another value than a computed field has: nothing of the call was sent."""


class NotSupportedRemotely(MillraceError):
    """The server is of an older build and cannot do this: update it, or do it with a client of the data folder, on its host."""


class InvalidSettings(MillraceError):
    """A setting is missing, malformed or contradicts another."""


class FileRefused(MillraceError):
    """The operating system refuses a file or folder: a right is missing, the disk is full or read-only, a name is too long."""

    @classmethod
    def from_os_error(cls, error: OSError) -> FileRefused:
        """The same in a sentence."""
        named = [repr(os.fsdecode(each)) for each in (error.filename, error.filename2) if isinstance(each, str | bytes)]
        return cls(
            f"{' and '.join(named) or 'a file'}: {error.strerror}; look at its name, its owner and mode, and the free space"
        )


class UnsafeDataFolder(MillraceError):
    """Others than its owner can write to the data folder: nothing is started on it; the message says the chmod that closes it."""


class PermissionDenied(MillraceError):
    """The caller's token lacks a role that the call needs, or holds no more; nothing was done. The message says which role on what."""


class TokenFileRefused(MillraceError):
    """The file of tokens is damaged, or others than its owner may read it or write to it: nobody gets in by it."""


class Malformed(MillraceError):
    """Bytes that are not a value of the wire form (docs/wire-form.md), or a body that is not of its type."""


class StateDamaged(Malformed):
    """A PChannel's state row is not as it was committed, or its file is gone: run the operation recovery, which makes it anew."""


class UnsupportedVersion(MillraceError):
    """A wire form, chain or state of a version that this build does not know: run the build that wrote it, or a newer one."""


class UnsupportedMessageType(MillraceError):
    """A number of the chapter-4 enumeration without behaviour in Millrace, or no number of it at all."""


class LogError(MillraceError):
    """Root of what a log backend raises."""

    code = "LOG"


class ChannelNotFound(LogError):
    """No such PChannel in this log: create it first."""


class ChannelExists(LogError):
    """A PChannel (or consumer group) of this name exists already."""


class EntryTooLarge(LogError):
    """An entry is larger than the log takes: split the batch, or raise the limit on every host."""


class PositionTruncated(LogError):
    """Retention has removed the position that was asked for. ``earliest`` is the first position that can be read."""

    def __init__(self, message: str, *, earliest: tuple[int, int]) -> None:
        super().__init__(message)
        self.earliest = earliest


class LogRegressed(LogError):
    """The log ends before a committed position, or its last committed entry has other bytes: it lost data it acknowledged."""


class LogCorrupted(LogError):
    """A stored record fails its checksum although later records were acknowledged: restore the file, do not cut it."""


class LogUnavailable(LogError):
    """The log (or its server) cannot be reached now."""

    retriable = True


class ServerFull(LogError):
    """The log's server has as many streams of appends open as it takes; nothing of this one was read. Try again."""

    retriable = True


class LogBusy(LogError):
    """Another process holds this log; use it through its server."""

    retriable = True


class DataFolderCopied(LogError):
    """The data folder is a copy of one that is in use: it names processes of the original. The message says what to do with it."""


class LogFenced(LogError):
    """A newer writer took this log over: this handle appends nothing any more, though it still reads. The newer one goes on."""


class LogRefused(LogError):
    """The brokers refused an administrative call of the log; ``status`` is their HTTP status, the message holds their reason."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class AppendRejected(MillraceError):
    """The chain judged a message and rejected it; ``reason`` is a name of :class:`millrace.wal.reasons.Reason`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class AppendDenied(AppendRejected, PermissionDenied):
    """The producer's token does not allow these messages: the server took none of their entry."""

    def __init__(self, message: str, *, reason: str = "PERMISSION_DENIED") -> None:
        super().__init__(message, reason=reason)


class ProducerFenced(AppendRejected):
    """A newer producer of this id took over: this one appends nothing any more. Close it; the newer one goes on."""

    def __init__(self, message: str, *, reason: str = "PRODUCER_FENCED") -> None:
        super().__init__(message, reason=reason)


class AppendUnresolved(LogUnavailable):
    """The log could not be asked what became of an append: it is in the log once, or not at all. Do not send its rows again:
    the producer holds them and repeats them, with the sequences they have, before its next append, or on ``settle()``."""

    retriable = False


class BufferFull(MillraceError):
    """A producer's buffer held as much as it may until the deadline: nothing of this append was taken. Append again later."""

    retriable = True


class SpoolFull(MillraceError):
    """The log cannot be reached and the spool holds as much as it may: nothing of this append was taken. Wait, or enlarge it."""

    retriable = True


class SpoolBusy(MillraceError):
    """Another process holds this spool: one spool belongs to one producer at a time."""


class SpoolCorrupted(MillraceError):
    """A whole record of the spool fails its checksum: it was damaged on the disk. Keep the folder, and look what is in it."""


class TransactionLost(AppendRejected):
    """A transaction ended before its commit (its lease or lifetime ran out, or DDL or a flush came): nothing of it is visible.
    Begin a new one with the same rows."""


class GroupBusy(MillraceError):
    """Another consumer of this group reads this channel: a group has one consumer a channel at a time."""


class PositionsBusy(MillraceError):
    """Another process holds the file of consumers' positions for longer than a caller waits; nothing was done. Try again."""

    retriable = True


class MetaUnavailable(MillraceError):
    """The meta store cannot be reached now, or is too busy: nothing was done. Try again."""

    retriable = True


class MetaAmbiguous(MillraceError):
    """The meta store's answer was lost: the commit stands, or does not. Read what it was to change, then decide."""


class RevisionCompacted(MillraceError):
    """A revision of the meta store that is kept no more: list anew and go on from there. ``earliest`` can still be read."""

    def __init__(self, message: str, *, earliest: int) -> None:
        super().__init__(message)
        self.earliest = earliest


class LeaseNotFound(MillraceError):
    """A lease that has ended: its keys are gone. Take a new one, and what it stood for anew."""


class NotLeader(MillraceError):
    """This coordinator does not lead, or does no more: nothing was done. Ask the one that leads."""

    retriable = True


class SessionEnded(MillraceError):
    """A node's session is over: it owns nothing until it has registered anew and is assigned something."""


class NodeNotFound(MillraceError):
    """No node of that name is in the cluster; the message names those there are."""


class NodeUnreachable(MillraceError):
    """A node did not answer: what it was asked for may have been done. Ask again."""

    retriable = True


class OrderPending(MillraceError):
    """A node is opening or closing this role: ask again."""

    retriable = True


class OrderIgnored(MillraceError):
    """A node was told of a newer term of this role: an older order has no effect there."""


class AssignmentStale(MillraceError):
    """The node does not hold this role of the PChannel in this term: find out who does, and go on there."""

    retriable = True


class ChannelParked(MillraceError):
    """An entry of this PChannel cannot be processed; the PChannel waits for a person, the others go on."""


class TombstoneRefused(MillraceError):
    """No tombstone may stand in the place of that entry, or not with those words; the message says why. Nothing was changed."""


class CommitFenced(MillraceError):
    """Another committer moved the PChannel since this range was planned: drop the files, plan anew."""

    retriable = True


class TableUnavailable(MillraceError):
    """A table cannot be written or read now, for want of room or storage. A commit that was tried may stand."""

    retriable = True


class TableNotFound(MillraceError):
    """There is no such table (yet): the streaming node makes ``wal``, the flusher the others."""


class TableDamaged(MillraceError, OSError):
    """A file of a table is missing or does not read: the operation recovery makes it anew, from the log or the WAL.

    `missing`: it is not there. Where a reader has held an old version of the table for long, VACUUM may have taken it.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class WalGap(MillraceError):
    """The chain of previous ticks in the WAL is broken: rows of a range are missing."""


class StagedFileDamaged(MillraceError):
    """A staged file that an Import names is missing, altered, or is not what the message says; the message names it, and
    says what to do."""


class TickNotReached(MillraceError):
    """A read at a time tick that not every channel of the collection has confirmed yet."""

    retriable = True


class TickTooOld(MillraceError):
    """A read before the oldest state that can still be rebuilt; the message names that tick."""


class CollectionNotFound(MillraceError):
    """No collection of this name or id."""


class CollectionExists(MillraceError):
    """A collection of this name exists with another definition."""


class SchemaChanged(MillraceError):
    """A reader with a fixed schema has come to rows of a newer one: begin it again, with that one, from where it stands."""

    retriable = True


class CatalogBusy(MillraceError):
    """Another process holds the catalog's file for longer than a caller waits; nothing was done. Try again."""

    retriable = True


class CatalogDiverged(MillraceError):
    """The chain has another definition of a collection than the catalog, in a way that the catalog cannot follow."""


class DeadlineExceeded(MillraceError):
    """A bounded wait ran out. The effect of the call is unknown unless the message says otherwise."""

    retriable = True


class RateLimited(MillraceError):
    """The host takes no more row changes now, or not so many; nothing was appended. Try again in ``retry_after`` seconds."""

    retriable = True

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ChangesRefused(MillraceError):
    """A stream that takes inserts alone met a delete or a retraction: read all changes, or say that they are left out."""


class StreamBusy(MillraceError):
    """Another process runs this stream, or writes from the folder of its sink: end it first."""

    retriable = True


class StreamNotFound(MillraceError):
    """No stream of this name is declared: `millrace streams list` shows those there are."""


class InvalidStream(MillraceError):
    """A stream's declaration cannot run as it stands; the message names each field and what is wrong with it."""


class StreamClosed(Closed):
    """A message stream that was closed, before the call or while it waited: make another."""


class PackTooLarge(MillraceError):
    """A time-tick stream holds more than it may while it waits for ticks: have ticks sent more often, or raise
    ``max_pack_bytes``; the stream's positions are where they were."""


class MessagesRefused(MillraceError):
    """A pack came with messages that cannot be delivered, late or malformed; ``pack`` has them, and the good ones."""

    def __init__(self, message: str, *, pack: object) -> None:
        super().__init__(message)
        self.pack = pack


class InvalidSuite(MillraceError):
    """A users' expectation suite that cannot be used: the message names the file, the expectation and what is wrong."""


class QualityBlocked(MillraceError):
    """A critical expectation stands failed, so that nothing is removed; ``blocks`` are the ids to mend or to release."""

    def __init__(self, message: str, *, blocks: tuple[str, ...]) -> None:
        super().__init__(message)
        self.blocks = blocks


class RunNotFound(MillraceError):
    """No run of an operation with this id: it was never started, or its folder was cleaned away."""


class AirflowUnavailable(MillraceError):
    """Airflow's API cannot be reached, or answered with an error; ``status`` is the HTTP status where it answered."""

    retriable = True

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RepairImpossible(MillraceError):
    """What is damaged cannot be computed again from what is left; the message says what to restore."""


class BackupBusy(MillraceError):
    """Another backup is being made, or what a backup needs to stand still is being given up right now: try again."""

    retriable = True


class BackupNotFound(MillraceError):
    """There is no whole backup here: one without a manifest was never finished."""


class BackupDamaged(MillraceError):
    """A backup lacks a file, has one with other bytes than when it was made, or names what lies outside: restore another backup."""


class BackupRefused(MillraceError):
    """What is asked for would not give a consistent deployment; nothing was done, and the message says what is possible."""


class PipelineInvalid(MillraceError):
    """A pipeline's declaration is wrong; nothing was made of it. ``problems`` has the field, what it takes, and the kind of each fault."""

    def __init__(self, message: str, *, problems: list[dict[str, str]]) -> None:
        super().__init__(message)
        self.problems = problems


class SinkBusy(MillraceError):
    """A pipeline's sink takes no more now, or does not answer; what it took may be sent again. Try again in ``retry_after`` seconds."""

    retriable = True

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SinkRefused(MillraceError):
    """A pipeline's sink is not there, or refuses the pipeline as a whole (rights, a missing index): mend it; the message says what."""


class MemoryExceeded(MillraceError):
    """A pipeline's worker takes more memory than its resources allow: it ended behind a range, and is started again, later and later."""


class PipelineNotFound(MillraceError):
    """No pipeline of this id, or none that the caller may know of."""


class PipelineExists(MillraceError):
    """There is a pipeline of this id already: change that one, or take another id."""


class PipelineConflict(MillraceError):
    """Somebody else changed the pipeline meanwhile: read it again (its version), then decide. Nothing was done."""


class PipelineBusy(MillraceError):
    """Not in the state that the pipeline is in; nothing was done, and the message says which state it takes."""


class ServiceUnavailable(MillraceError):
    """No pipeline service answers where one was looked for, or not in time: start one, or name another address."""

    retriable = True


class QuotaExceeded(MillraceError):
    """An account's pipelines would take more than its quota allows: nothing was made. Ask whoever runs the deployment."""


class SecretUnreadable(MillraceError):
    """No key of today decrypts a pipeline's secret: bring the key back that encrypted it, or give the secret anew."""
