"""The one fenced commit: files enter and leave a table through :func:`commit_fenced` alone.

A call has parts, each from one writer's range of work: added files, removed files, and app ids with the version that
the work was planned from. A part is committed completely or not at all, and only once, whatever other writers do:

1. Check the table's snapshot. A part is fenced if one of its app ids has another version or a file that it removes is
   gone.
   Before that verdict the handle is refreshed, so an outdated snapshot fences nobody.
2. Commit all other parts in one transaction from that very snapshot. delta-rs may not retry, so the written version is
   the
   successor of the checked one.
3. If another writer took that version, refresh and go to 1. There is no refresh between 1 and 2.

App transactions alone are no fence: delta-rs never compares them, and a refreshed handle commits a lower version. The
check in 1 together with the put-if-absent of the version's name in 2 is the fence.

A failed attempt may have been committed. Each call writes an id of its own into the commit's info. After a failure, the
version that the attempt would have taken is read back. It is ours; or another writer's (then the attempt is lost for
good, since the name is taken); or does not exist (then the same actions are retried at the same version, where they can
be committed once). Files of a fenced part are deleted here, and only if no attempt that names them may have been
committed. A caller that gets an exception leaves its files to VACUUM.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import Field, TableFeatures
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction

from millrace.base.backoff import Backoff
from millrace.base.deadline import Deadline
from millrace.base.errors import CommitFenced, DeadlineExceeded, InvalidArgument, TablesMoved, TableUnavailable
from millrace.base.failpoint import hit
from millrace.storage.delta_log import CLOSED, COMMIT_INFO_KEY, boot_seconds, commit_file
from millrace.storage.file_sink import delete_uncommitted
from millrace.storage.parquet_file import FileAction
from millrace.storage.store import commit_tries
from millrace.storage.table import NO_COMMIT_HOOKS, LogMaintenance, TableHandle, maintain_log

COMMIT_DEADLINE: Final = 60.0

_MARK: Final = "millraceCommit"
"""Key of the commit's info under which each call writes its own id."""
_FAILURES: Final = (DeltaError, OSError)
_PAUSE: Final = (0.01, 1.0)
"""First and largest pause in seconds after such an attempt. They are jittered."""

WriteAttempt = Callable[[CommitProperties], None]
"""One attempt at the transaction, from the checked snapshot."""


@dataclass(frozen=True, slots=True)
class AppTransaction:
    """One app id of a part: the version that the work was planned from, and the new version."""

    base: int | None
    """0: none yet, or 0. None: none yet."""
    version: int


@dataclass(frozen=True, slots=True)
class CommitPart:
    """Changes that are committed completely or not at all."""

    adds: Sequence[FileAction] = ()
    removes: Sequence[str] = ()
    """Live files, relative to the table. If one is gone, the part is fenced."""
    app_transactions: Mapping[str, AppTransaction] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    """Entries for the commit's info, under COMMIT_INFO_KEY."""
    unchecked_removes: Sequence[str] = ()
    """Files to remove without checking that they are live: the app ids fence them sufficiently."""
    requires: Sequence[str] = ()
    """Files that stay, and on which the added ones build. If one is gone, the part is fenced."""


@dataclass(frozen=True, slots=True)
class FencedPart:
    """The reason that a part was not committed."""

    conflicts: tuple[str, ...]
    """App ids with another version, and files that are gone."""
    may_be_committed: bool
    """Whether an attempt that names its files may be in the table after all. If not, the files are deleted."""


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The outcome of one call."""

    version: int
    """The table's version after the commit."""
    fenced: Mapping[int, FencedPart]
    """The fenced parts by index. All others are in the table."""
    conflicts: int = 0

    def raise_if_fenced(self) -> None:
        """Raise CommitFenced if a part was fenced."""
        if self.fenced:
            moved = sorted({name for fence in self.fenced.values() for name in fence.conflicts})
            raise CommitFenced(
                f"{', '.join(moved)} moved since this was planned: another writer committed first; plan again"
            )


def commit_fenced(
    table: TableHandle,
    parts: Sequence[CommitPart],
    *,
    data_change: bool = True,
    deadline: float = COMMIT_DEADLINE,
    maintenance: LogMaintenance = LogMaintenance(),  # noqa: B008 - a value
) -> CommitOutcome:
    """Commit every part that still follows the table. `table` is at the newest version known when the parts were
    planned.

    Without `data_change`, the added files hold the rows of the removed ones. Raises DeadlineExceeded if other writers,
    and TableUnavailable if the storage, prevented the commit. In both cases it may have been committed, and its files
    stay.
    """
    if len({move for part in parts for move in part.app_transactions.items()}) > len(
        {app for part in parts for app in part.app_transactions}
    ):
        raise InvalidArgument("two parts of one commit move an app id differently")
    attempts = _Attempts(table, deadline)
    pending = dict(enumerate(parts))
    fenced: dict[int, FencedPart] = {}

    def look() -> WriteAttempt | None:
        moved = {place: _moved(table, part, attempts.may_be_committed) for place, part in pending.items()}
        if any(moved.values()):
            table.refresh()  # an outdated snapshot fences nobody
            moved = {place: _moved(table, part, attempts.may_be_committed) for place, part in pending.items()}
        for place, names in moved.items():
            if names:
                fenced[place] = FencedPart(tuple(names), attempts.may_be_committed)
                part = pending.pop(place)
                # If an earlier attempt may be in the table, it may name these files: leave them to VACUUM.
                if not attempts.may_be_committed:
                    delete_uncommitted(table.store, part.adds)
        return _writing(table, list(pending.values()), data_change) if pending else None

    with table.store.lease():
        # While anybody holds the lease, no entry of the table's log is removed: `_owner` can read them.
        committed = attempts.run(look)
    if committed:
        maintain_log(table, maintenance)
    return CommitOutcome(table.version, fenced, attempts.conflicts)


def alter_fenced(
    table: TableHandle,
    look: Callable[[], WriteAttempt | None],
    *,
    deadline: float = COMMIT_DEADLINE,
) -> bool:
    """Change columns or properties by what `look` returns at the newest version. Returns False if it returns None:
    nothing to do.

    The write that `look` returns is committed from the very version that it saw, or not at all; then `look` is called
    again.
    Raises what :func:`commit_fenced` and `look` raise.
    """
    with table.store.lease():
        table.refresh()
        return _Attempts(table, deadline).run(look)


def add_columns(
    table: TableHandle,
    wanted: pa.Schema,
    *,
    refuse: Callable[[Mapping[str, tuple[str, str]]], None] = lambda differing: None,
) -> bool:
    """Add the columns of `wanted` that the table lacks, and make columns nullable where `wanted` does.

    Returns False if there is nothing to change. `refuse` may raise for columns whose type differs.
    """
    if table.delta.protocol().writer_features or any(has_timestamp_ntz(field.type) for field in wanted):
        # From writer 7 on, Spark cannot open a table that has non-nullable columns without this feature. Add it
        # before any other.
        alter_fenced(table, lambda: _feature(table, "invariants", TableFeatures.Invariants))
    if any(has_nested_timestamp_ntz(field.type) for field in wanted):
        alter_fenced(table, lambda: _feature(table, "timestampNtz", TableFeatures.TimestampWithoutTimezone))

    def look() -> WriteAttempt | None:
        lacking, differing = table.missing_columns(wanted)
        if differing:
            refuse(differing)
        if not lacking:
            return None
        fields = [Field(each.name, each.type, nullable=True, metadata=each.metadata) for each in lacking]
        return lambda properties: table.delta.alter.add_columns(
            fields, commit_properties=properties, post_commithook_properties=NO_COMMIT_HOOKS
        )

    return alter_fenced(table, look)


def has_timestamp_ntz(kind: pa.DataType) -> bool:
    """Return whether the type contains a timestamp without a zone, at any depth.

    A table with such a column needs table features, which :func:`add_columns` adds one by one. A table that is created
    with it lacks what Spark needs besides.
    """
    return "timestamp[us]" in str(kind)


def has_nested_timestamp_ntz(kind: pa.DataType) -> bool:
    """Return whether a list or a map contains a timestamp without a zone.

    There delta-rs does not see that the table needs the feature, and would create a table that it cannot open.
    """
    if pa.types.is_struct(kind):
        return any(has_nested_timestamp_ntz(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_nested(kind) and "timestamp[us]" in str(kind))


def _feature(table: TableHandle, name: str, feature: TableFeatures) -> WriteAttempt | None:
    if name in (table.delta.protocol().writer_features or ()):
        return None
    return lambda properties: table.delta.alter.add_feature(
        feature,
        allow_protocol_versions_increase=True,
        commit_properties=properties,
        post_commithook_properties=NO_COMMIT_HOOKS,
    )


def set_properties(table: TableHandle, wanted: Callable[[Mapping[str, str]], Mapping[str, str]]) -> bool:
    """Set the table properties that `wanted` returns for the current ones. Returns False if it returns none."""

    def look() -> WriteAttempt | None:
        found = dict(wanted(table.configuration))
        if not found:
            return None
        return lambda properties: table.delta.alter.set_table_properties(
            found, raise_if_not_exists=False, commit_properties=properties, post_commithook_properties=NO_COMMIT_HOOKS
        )

    return alter_fenced(table, look)


class _Owner(Enum):
    OURS = auto()
    ANOTHERS = auto()
    UNKNOWN = auto()
    FORGOTTEN = auto()
    """The table is beyond that version, and the log no longer has its commit."""


class _Attempts:
    """Checks, writes, and resolves failed attempts, until one is committed or there is nothing to write."""

    def __init__(self, table: TableHandle, deadline: float) -> None:
        self._table = table
        self._seconds = deadline
        self._ends = Deadline.after(deadline)
        self._mark = uuid.uuid4().hex
        self._idle = 0
        self._backoff = Backoff(*_PAUSE)
        self.conflicts = 0
        self.may_be_committed = False
        """Whether one attempt's fate is unknown for good."""

    def run(self, look: Callable[[], WriteAttempt | None]) -> bool:
        table = self._table
        if not table.follows():
            table.refresh()
        while (write := look()) is not None:
            hit("commit.checked")
            # The version that this attempt may take, read before the write: afterwards the handle may have moved.
            version, begun = table.version + 1, boot_seconds()
            try:
                # No retries by delta-rs: it would refresh and commit on top of a version that nobody checked.
                table.write(partial(write, CommitProperties({_MARK: self._mark}, max_commit_retries=0)))
            except _FAILURES as error:
                if not self._settled(version, error):
                    continue
                table.refresh()
            if boot_seconds() - begun > table.store.log_seconds / 2:
                # So late that the name may have been free again, and the commit no part of the table.
                self.may_be_committed = True
                table.refresh()
                continue
            # delta-rs does not fsync. Truncation of the log relies on durable commits.
            table.store.sync([commit_file(version)])
            table.advance()
            return True
        return False

    def _settled(self, version: int, error: Exception) -> bool:
        """Return whether the attempt at `version` was committed although it failed. If not, prepare the next one."""
        owner = self._owner(version)
        if owner is _Owner.OURS:
            return True
        if self._ends.expired():
            raise DeadlineExceeded(f"no commit to {self._table.uri} in {self._seconds:.0f} s: {error}") from error
        if owner is _Owner.UNKNOWN:  # no other writer won: the storage or the commit itself failed
            if CLOSED in (self._table.delta.protocol().writer_features or ()):
                raise TablesMoved(
                    f"{self._table.uri} was moved to another place: this continues there when started again"
                ) from error
            self._idle += 1
            if self._idle > commit_tries(self._table.store) or not isinstance(error, CommitFailedError | OSError):
                raise TableUnavailable(
                    f"{self._table.uri} accepts no commit ({error}); this one may have been committed"
                ) from error
            time.sleep(self._backoff.next_delay())
        else:
            self.conflicts += 1
            # The commit file of that version is gone, so nobody can tell whether it was this attempt's.
            self.may_be_committed |= owner is _Owner.FORGOTTEN
            self._table.refresh()
        return False

    def _owner(self, version: int) -> _Owner:
        store, name = self._table.store, commit_file(version)
        try:
            data = store.read(name)
            if data is None:
                if store.delta().version() < version:
                    return _Owner.UNKNOWN
                # The file appeared between the two looks, or log cleanup removed it: read again.
                data = store.read(name)
        except _FAILURES:
            return _Owner.UNKNOWN  # unknown: the next attempt takes the same version, or finds it taken
        if data is None:
            return _Owner.FORGOTTEN
        marks = (
            json.loads(line).get("commitInfo", {}).get(_MARK) for line in data.splitlines() if b"commitInfo" in line
        )
        return _Owner.OURS if self._mark in marks else _Owner.ANOTHERS


def _moved(table: TableHandle, part: CommitPart, may_be_committed: bool) -> list[str]:
    moved = [
        app_id
        for app_id, move in part.app_transactions.items()
        if (table.find_app_version(app_id) if move.base is None else table.app_version(app_id)) != move.base
    ]
    moved += table.not_live([*part.removes, *part.requires])
    if may_be_committed and not part.app_transactions and not part.removes:
        return [action.path for action in part.adds]  # nothing in the table tells whether it was committed
    return moved


def _writing(table: TableHandle, parts: Sequence[CommitPart], data_change: bool) -> WriteAttempt:
    now = int(time.time() * 1000)
    removes = {name: None for part in parts for name in (*part.removes, *part.unchecked_removes)}
    actions: list[AddAction | RemoveAction] = [
        AddAction(each.path, each.size, each.partition, each.written_ms, data_change, each.stats)
        for part in parts
        for each in part.adds
    ]
    actions += [RemoveAction(name, data_change, now, partition_values=partition_values(name)) for name in removes]
    moves = {app_id: move.version for part in parts for app_id, move in part.app_transactions.items()}
    info = {key: value for part in parts for key, value in part.info.items()}

    def write(properties: CommitProperties) -> None:
        properties.app_transactions = [Transaction(app_id, version) for app_id, version in moves.items()]
        if info:
            properties.custom_metadata = {COMMIT_INFO_KEY: info, **(properties.custom_metadata or {})}
        table.delta.create_write_transaction(
            actions,
            mode="append",
            schema=table.delta.schema(),
            partition_by=table.partition_columns,
            commit_properties=properties,
            post_commithook_properties=NO_COMMIT_HOOKS,
        )

    return write


def partition_values(name: str) -> dict[str, str | None]:
    """Return the partition values of a file, from the names of its folders."""
    parts = (folder.partition("=") for folder in name.split("/")[:-1])
    return {unquote(column): unquote(value) for column, equals, value in parts if equals}
