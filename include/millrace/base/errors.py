"""The exception family of Millrace.

Every error has a stable ``code``, says whether retrying the same call can help (``retriable``), and has a message that
tells the reader what to do. Retry code asks ``error.retriable`` and lists no types.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import ClassVar


class MillraceError(Exception):
    """The base class; never raised itself. The code is the class name unless the class sets one."""

    code: ClassVar[str] = "MILLRACE"
    retriable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "code" not in cls.__dict__:
            cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with all its attributes, whatever arguments its constructor takes."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[MillraceError], args: tuple[object, ...], facts: dict[str, object]) -> MillraceError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class InvalidArgument(MillraceError):
    """A caller passed a value that is never valid."""


class Closed(MillraceError):
    """The producer, appender or consumer is closed: open another."""


class CheckViolated(InvalidArgument):
    """Rows violate a check of their collection, or contradict a computed field: nothing of the call was sent."""


class NotSupportedRemotely(MillraceError):
    """The server runs an older build without this feature: update it, or use a client of the data folder on its
    host.
    """


class InvalidSettings(MillraceError):
    """A setting is missing, malformed or contradicts another."""


class FileRefused(MillraceError):
    """The operating system denied access to a file or folder: no permission, a full or read-only disk, or a name that
    is too long.
    """

    @classmethod
    def from_os_error(cls, error: OSError) -> FileRefused:
        """Describe `error` in one sentence."""
        named = [repr(os.fsdecode(each)) for each in (error.filename, error.filename2) if isinstance(each, str | bytes)]
        return cls(
            f"{' and '.join(named) or 'a file'}: {error.strerror}; check its name, owner and mode, and the free space"
        )


class UnsafeDataFolder(MillraceError):
    """Users other than the owner can write to the data folder. Nothing starts on it; the message gives the chmod to
    run.
    """


class PermissionDenied(MillraceError):
    """The caller's token has no role that the call needs, or is no longer valid: nothing was done. The message names
    the role and resource.
    """


class TokenFileRefused(MillraceError):
    """The token file is damaged, or users other than its owner can read or write it: no token is accepted."""


class Malformed(MillraceError):
    """Bytes are not a value of the wire form (docs/wire-form.md), or a body does not have the shape of its type."""


class StateDamaged(Malformed):
    """A PChannel's state row is not what was committed, or its file is missing: run the operation recovery, which
    rebuilds it.
    """


class UnsupportedVersion(MillraceError):
    """A wire form, chain or state has a version that this build does not know: run the build that wrote it, or a newer
    one.
    """


class FeatureNotActive(MillraceError):
    """The cluster has nodes of an earlier build, or had them, and its upgrade is not finished: finish it first."""


class UpgradeRefused(MillraceError):
    """The upgrade cannot be finished yet: a node runs an earlier build. Nothing was changed."""


class UnsupportedMessageType(MillraceError):
    """A message type of the chapter-4 enumeration that Millrace does not implement, or an unknown number."""


class LogError(MillraceError):
    """The base class of errors from log backends."""

    code = "LOG"


class ChannelNotFound(LogError):
    """The log has no such PChannel: create it first."""


class ChannelExists(LogError):
    """A PChannel (or consumer group) with this name already exists."""


class EntryTooLarge(LogError):
    """An entry exceeds the log's size limit: split the batch, or raise the limit on every host."""


class PositionTruncated(LogError):
    """Retention has removed the requested position. ``earliest`` is the first readable position."""

    def __init__(self, message: str, *, earliest: tuple[int, int]) -> None:
        super().__init__(message)
        self.earliest = earliest


class LogRegressed(LogError):
    """The log ends before a committed position, or its last committed entry has different bytes: it lost acknowledged
    data.
    """


class LogCorrupted(LogError):
    """A stored record fails its checksum although later records were acknowledged: restore the file, do not truncate
    it.
    """


class LogUnavailable(LogError):
    """The log (or its server) cannot be reached now."""

    retriable = True


class CaptureEnded(LogUnavailable):
    """The engine that captures a database's changes ended: the database cannot be reached, or lacks what it needs. The
    message says why."""


class CaptureLost(CaptureEnded):
    """The database no longer has the changes after a capture's position: only a new snapshot goes on."""

    retriable = False


class CaptureBusy(CaptureEnded):
    """Another process reads the database's log in the capture's place: the message names it. The capture tries
    again."""


class ServerStopping(LogUnavailable):
    """The log's server is stopping and accepted nothing of this append. Append again: the next server takes it."""


class ServerFull(LogError):
    """The log's server has reached its limit of open append streams and read nothing from this one. Try again."""

    retriable = True


class LogBusy(LogError):
    """Another process holds this log; use it through its server."""

    retriable = True


class DataFolderCopied(LogError):
    """The data folder is a copy of one that is in use: it names processes of the original. The message says how to
    separate the two.
    """


class LogFenced(LogError):
    """A newer writer took over this log: this handle can read but no longer append. The newer writer continues."""


class LogRefused(LogError):
    """The brokers rejected an administrative call of the log. ``status`` is their HTTP status; the message has their
    reason.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class AppendRejected(MillraceError):
    """The chain rejected a message; ``reason`` is a name of :class:`millrace.wal.reasons.Reason`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class AppendDenied(AppendRejected, PermissionDenied):
    """The producer's token does not allow these messages: the server accepted none of their entry."""

    def __init__(self, message: str, *, reason: str = "PERMISSION_DENIED") -> None:
        super().__init__(message, reason=reason)


class ProducerFenced(AppendRejected):
    """A newer producer with this id took over: this one can no longer append. Close it; the newer one continues."""

    def __init__(self, message: str, *, reason: str = "PRODUCER_FENCED") -> None:
        super().__init__(message, reason=reason)


class AppendUnresolved(LogUnavailable):
    """The result of an append is unknown: its entry is in the log once, or not at all. Do not send its rows again:
    the producer keeps them and repeats them with the same sequences before its next append, or on ``settle()``.
    """

    retriable = False


class VersionConflict(MillraceError):
    """Another command changed the aggregate first: nothing was appended. Load it, decide again, and append with its
    ``current_version``.
    """

    def __init__(self, message: str, *, key: str, expected_version: int, current_version: int) -> None:
        super().__init__(message)
        self.key = key
        self.expected_version = expected_version
        self.current_version = current_version


class EventUndecodable(MillraceError):
    """An event's type or version is unknown to this program, or its data does not fit the type: register the type or
    an upcaster, or deploy the newer program.
    """


class EventStreamDamaged(MillraceError):
    """The versions of an aggregate's events have a gap or a repetition: something else than an event store wrote to
    the collection. Find it in the WAL (``millrace wal``), and let only event stores write there.
    """


class BufferFull(MillraceError):
    """A producer's buffer stayed full until the deadline: nothing of this append was accepted. Append again later."""

    retriable = True


class SpoolFull(MillraceError):
    """The log cannot be reached and the spool is full: nothing of this append was accepted. Wait, or enlarge the
    spool.
    """

    retriable = True


class SpoolBusy(MillraceError):
    """Another process holds this spool: a spool belongs to one producer at a time."""


class SpoolCorrupted(MillraceError):
    """A complete record of the spool fails its checksum: the disk damaged it. Keep the folder and examine it."""


class TransactionLost(AppendRejected):
    """A transaction ended before its commit (its lease or lifetime expired, or DDL or a flush ended it): none of it is
    visible.
    Begin a new one with the same rows.
    """


class GroupBusy(MillraceError):
    """Another consumer of this group reads this channel: a group has one consumer per channel.

    ``renewals`` grows while that consumer lives.
    """

    def __init__(self, message: str, *, renewals: int = 0) -> None:
        super().__init__(message)
        self.renewals = renewals


class TaskLeaseLost(MillraceError):
    """The lease of a work queue's task was over, and another consumer has the task: it is processed again."""


class PositionsBusy(MillraceError):
    """Another process held the file of consumer positions longer than the caller waits; nothing was done. Try again."""

    retriable = True


class MetaUnavailable(MillraceError):
    """The meta store cannot be reached, or is too busy: nothing was done. Try again."""

    retriable = True


class MetaAmbiguous(MillraceError):
    """The meta store's answer was lost: the commit took effect or did not. Read what it should have changed, then
    decide.
    """


class RevisionCompacted(MillraceError):
    """A revision of the meta store was compacted away: list again and continue from there. ``earliest`` can still be
    read.
    """

    def __init__(self, message: str, *, earliest: int) -> None:
        super().__init__(message)
        self.earliest = earliest


class LeaseNotFound(MillraceError):
    """A lease has expired and its keys are gone. Acquire a new one, and whatever it protected."""


class NotLeader(MillraceError):
    """This coordinator is not the leader: nothing was done. Ask the leader."""

    retriable = True


class SessionEnded(MillraceError):
    """A node's session has ended: it owns nothing until it registers again and receives assignments."""


class NodeNotFound(MillraceError):
    """The cluster has no node with this name; the message lists the nodes."""


class NodeUnreachable(MillraceError):
    """A node did not answer: the request may have taken effect. Ask again."""

    retriable = True


class OrderPending(MillraceError):
    """A node is opening or closing this role: ask again."""

    retriable = True


class OrderIgnored(MillraceError):
    """A node has received a newer term of this role: an older order has no effect on it."""


class AssignmentStale(MillraceError):
    """The node does not hold this role of the PChannel in this term: look up the owner and continue there."""

    retriable = True


class ChannelParked(MillraceError):
    """An entry of this PChannel cannot be processed. The PChannel waits for an operator; the others continue."""


class TombstoneRefused(MillraceError):
    """That entry cannot be replaced by a tombstone, or the author or reason is invalid; the message says why. Nothing
    was changed.
    """


class CommitFenced(MillraceError):
    """Another committer moved the PChannel after this range was planned: drop the files and plan again."""

    retriable = True


class TableUnavailable(MillraceError):
    """A table cannot be read or written now: its storage is full or unreachable. An attempted commit may have taken
    effect.
    """

    retriable = True


class TablesMoved(TableUnavailable):
    """The tables were moved to another place, or are being moved: the process continues there when it is started
    again.
    """


class MoveRefused(MillraceError):
    """The tables cannot be moved there: the place has files, belongs to another deployment, or lacks space. Nothing
    was changed.
    """


class StoreCannotPublish(MillraceError):
    """The store of the tables cannot create a file only if its name is free, which publishing a collection needs."""


class TableNotFound(MillraceError):
    """The table does not exist (yet): the streaming node creates ``wal``, the flusher the others."""


class TableDamaged(MillraceError, OSError):
    """A file of a table is missing or unreadable: the operation recovery rebuilds it from the log or the WAL.

    `missing` is True if the file does not exist. If a reader held an old table version for long, VACUUM may have
    removed it.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class PublishedRowsDiffer(MillraceError):
    """Files that took the place of published ones do not have the same rows: nothing of them was published."""


class FileReplaced(TableDamaged):
    """A file that a read planned with was replaced by a later commit, and removed after ``file_retention``: read again.

    The newest version of the table has the same rows in other files.
    """

    retriable = True


class WalGap(MillraceError):
    """The sequence of previous ticks in the WAL is broken: rows of a range are missing."""


class StagedFileDamaged(MillraceError):
    """A staged file of an Import is missing, changed, or not what the message describes. The message names the file and
    says what to do.
    """


class TickNotReached(MillraceError):
    """A read at a time tick that some channel of the collection has not confirmed yet."""

    retriable = True


class TickTooOld(MillraceError):
    """A read before the oldest state that can be rebuilt; the message names that tick."""


class CollectionNotFound(MillraceError):
    """No collection has this name or id."""


class CollectionExists(MillraceError):
    """A collection with this name exists with another definition."""


class AliasNotFound(MillraceError):
    """No collection has this alias."""


class AliasExists(MillraceError):
    """The name is a collection's, or the alias of another collection."""


class CollectionHasAliases(MillraceError):
    """A collection with aliases is not dropped: drop the aliases first, or point them to another collection."""


class SchemaChanged(MillraceError):
    """A reader with a fixed schema reached rows of a newer schema: start it again with that schema, from its
    position.
    """

    retriable = True


class CatalogBusy(MillraceError):
    """Another process held the catalog's file longer than the caller waits; nothing was done. Try again."""

    retriable = True


class CatalogDiverged(MillraceError):
    """The chain has another definition of a collection than the catalog, and the catalog cannot follow it."""


class DeadlineExceeded(MillraceError):
    """A bounded wait timed out. The effect of the call is unknown unless the message says otherwise."""

    retriable = True


class RateLimited(MillraceError):
    """The host currently limits row changes, and nothing was appended. Try again in ``retry_after`` seconds."""

    retriable = True

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BroadcastRefused(MillraceError):
    """The check of a kind of broadcast refused it: nothing was stored or sent."""


class CallbackFailed(MillraceError):
    """Every VChannel has a broadcast, but the callback of its kind failed. It is called again; do not submit the
    broadcast again under another request.
    """

    retriable = True


class TooManyBroadcasts(MillraceError):
    """Too many broadcasts are open: nothing was stored. `millrace broadcasts` shows the channels that they wait for."""

    retriable = True


class ChangesRefused(MillraceError):
    """A stream of inserts only received a delete or a retraction: read all changes, or declare that they are
    skipped.
    """


class StreamBusy(MillraceError):
    """Another process runs this stream, or writes from its sink's folder: stop it first."""

    retriable = True


class StreamNotFound(MillraceError):
    """No stream with this name is declared: `millrace flows list` shows the declared ones."""


class FlowNotRunning(MillraceError):
    """No machine runs the flow, and only a running worker can do what was asked. Start it, and try again."""

    retriable = True


class InvalidStream(MillraceError):
    """A stream's declaration is invalid; the message names each field and its problem."""


class StreamClosed(Closed):
    """The message stream was closed before the call or during its wait: open another."""


class PackTooLarge(MillraceError):
    """A time-tick stream exceeds its memory limit while it waits for ticks: have ticks sent more often, or raise
    ``max_pack_bytes``. The stream's positions are unchanged.
    """


class MessagesRefused(MillraceError):
    """A pack contains messages that cannot be delivered: late or malformed. ``pack`` has them and the valid ones."""

    def __init__(self, message: str, *, pack: object) -> None:
        super().__init__(message)
        self.pack = pack


class InvalidSuite(MillraceError):
    """A user's expectation suite is invalid; the message names the file, the expectation and the problem."""


class QualityBlocked(MillraceError):
    """A critical expectation has failed, so nothing is removed. ``blocks`` are the ids to fix or to release."""

    def __init__(self, message: str, *, blocks: tuple[str, ...]) -> None:
        super().__init__(message)
        self.blocks = blocks


class RunNotFound(MillraceError):
    """No run of an operation has this id: it was never started, or its folder was removed."""


class AirflowUnavailable(MillraceError):
    """Airflow's API cannot be reached, or answered with an error; ``status`` is the HTTP status if it answered."""

    retriable = True

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RepairImpossible(MillraceError):
    """The damaged data cannot be rebuilt from what is left; the message says what to restore."""


class BackupBusy(MillraceError):
    """Another backup is running, or data that a backup needs is being removed now: try again."""

    retriable = True


class BackupNotFound(MillraceError):
    """There is no complete backup here: one without a manifest was never finished."""


class BackupDamaged(MillraceError):
    """A backup lacks a file, has one with changed bytes, or names a path outside of it: restore another backup."""


class BackupRefused(MillraceError):
    """The request would not give a consistent deployment. Nothing was done; the message says what is possible."""


class PipelineInvalid(MillraceError):
    """A pipeline's declaration is invalid; nothing was created. ``problems`` lists the field, the allowed values and
    the kind of each error.
    """

    def __init__(self, message: str, *, problems: list[dict[str, str]]) -> None:
        super().__init__(message)
        self.problems = problems


class SinkBusy(MillraceError):
    """A pipeline's sink is overloaded or does not answer. Try again in ``retry_after`` seconds.

    Documents that it accepted may be sent again.
    """

    retriable = True

    def __init__(self, message: str, *, retry_after: float, taken: Collection[int] = ()) -> None:
        """`taken`: positions of the batch's records that took effect before, if the sink knows them."""
        super().__init__(message)
        self.retry_after = retry_after
        self.taken = frozenset(taken)


class SinkRefused(MillraceError):
    """A pipeline's sink does not exist, or rejects the pipeline as a whole (permissions, a missing index): fix it as
    the message says.
    """


class BatchRefused(MillraceError):
    """A flow's sink rejects a batch as a whole, and one of its records may be the cause. The runner writes halves of it
    until one record is left, which it puts aside. Nothing has to be done.
    """

    def __init__(self, message: str, *, taken: Collection[int] = ()) -> None:
        """`taken`: positions of the batch's records that took effect nevertheless."""
        super().__init__(message)
        self.taken = frozenset(taken)


class ErrorLimitExceeded(MillraceError):
    """More records of a flow failed than its declaration allows (`errors.limit`), and the flow stopped. The records are
    at the place of its dead letters that the message names: fix the cause, then restart the flow.
    """


class LanesFailed(MillraceError):
    """A flow ran to the present end of its source, and some lanes failed on the way: what they did not read is read by
    the next run. Remove the cause that the message names.
    """


class MemoryExceeded(MillraceError):
    """A pipeline's worker exceeds its memory limit: it stopped after a range, and restarts with increasing delays."""


class PipelineNotFound(MillraceError):
    """No pipeline has this id, or the caller may not see it."""


class PipelineExists(MillraceError):
    """A pipeline with this id already exists: change that one, or choose another id."""


class PipelineConflict(MillraceError):
    """Another user changed the pipeline meanwhile: read its current version, then decide. Nothing was done."""


class PipelineBusy(MillraceError):
    """The pipeline is not in a state that allows this. Nothing was done; the message names the required state."""


class ServiceUnavailable(MillraceError):
    """No pipeline service answers at the address, or not in time: start one, or give another address."""

    retriable = True


class QuotaExceeded(MillraceError):
    """An account's pipelines would exceed its quota: nothing was created. Ask the operator of the deployment."""


class SecretUnreadable(MillraceError):
    """No current key decrypts a pipeline's secret: restore the key that encrypted it, or set the secret again."""
