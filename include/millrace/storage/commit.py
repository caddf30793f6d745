"""The one fenced commit: files come into a table, and leave it, by :func:`commit_fenced` alone.

A call has parts, each of one writer's range of work: files added, files taken away, and app ids with the version that the work was
planned from. A part goes in whole or not at all, and does so once, whoever else commits:

1. look at the table's snapshot: a part of which an app id stands elsewhere, or a file that it takes away is gone, is fenced;
   the others go on. Nobody is fenced by an old snapshot: before the verdict the handle is brought to the newest version.
2. commit all others in one transaction from that very snapshot; delta-rs is allowed no retry of its own, so the version that is
   written is the successor of the one that was looked at;
3. where that version is another writer's, go to the newest version and to 1. There is no refresh between 1 and 2.

App transactions are no fence by themselves: delta-rs never compares them, and a refreshed handle commits a lower version. The
check in 1 together with the put-if-absent of a version's name in 2 is the fence.

A failure does not say that nothing happened. Each call leaves its mark in the commit's info, and an attempt that failed is settled
by reading back the version that it was to take: ours, another's (then it is lost for good: the name is taken), or nobody's yet
(then the same actions are tried again in the same place, where they can come to stand once). Files of a fenced part are removed
here, and only where no attempt that names them may stand; whoever gets an exception leaves its files to VACUUM.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import Field, TableFeatures
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import CommitFenced, DeadlineExceeded, InvalidArgument, TableUnavailable
from millrace.base.failpoint import hit
from millrace.storage.delta_log import COMMIT_INFO_KEY, commit_file
from millrace.storage.file_sink import delete_uncommitted
from millrace.storage.parquet_file import FileAction
from millrace.storage.table import NO_COMMIT_HOOKS, LogMaintenance, TableHandle, maintain_log

COMMIT_DEADLINE: Final = 60.0

_MARK: Final = "millraceCommit"
_FAILURES: Final = (DeltaError, OSError)
_IDLE_TRIES: Final = 3
_PAUSE: Final = (0.01, 1.0)

WriteAttempt = Callable[[CommitProperties], None]
"""One attempt at the transaction, from the snapshot that was looked at."""


@dataclass(frozen=True, slots=True)
class AppTransaction:
    """One app id of a part: the version the work was planned from (0: none yet), and the one that the commit gives it."""

    base: int
    version: int


@dataclass(frozen=True, slots=True)
class CommitPart:
    """What goes into a commit together or not at all."""

    adds: Sequence[FileAction] = ()
    removes: Sequence[str] = ()
    """Live files, relative to the table: one that is gone fences the part."""
    app_transactions: Mapping[str, AppTransaction] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    """What stands of it in the commit's info, under METADATA_KEY."""
    unchecked_removes: Sequence[str] = ()
    """Files that go too, without a look whether they are there: the app ids say enough of them."""


@dataclass(frozen=True, slots=True)
class FencedPart:
    """Why a part is not in the table."""

    conflicts: tuple[str, ...]
    """App ids that stand elsewhere, and files that are gone."""
    may_be_committed: bool
    """Whether an attempt that names its files may be in the table after all; otherwise the files are removed."""


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What became of the parts of one call."""

    version: int
    """Of the table, behind the commit."""
    fenced: Mapping[int, FencedPart]
    """By place among the parts; all others are in the table."""
    conflicts: int = 0

    def raise_if_fenced(self) -> None:
        """Raises CommitFenced where a part was fenced."""
        if self.fenced:
            moved = sorted({name for fence in self.fenced.values() for name in fence.conflicts})
            raise CommitFenced(f"{', '.join(moved)} moved since this was planned: another writer committed; plan anew")


def commit_fenced(
    table: TableHandle,
    parts: Sequence[CommitPart],
    *,
    data_change: bool = True,
    deadline: float = COMMIT_DEADLINE,
    maintenance: LogMaintenance = LogMaintenance(),  # noqa: B008 - a value
    seam: Callable[[str], None] = hit,
) -> CommitOutcome:
    """Commit every part that still follows what the table holds; `table` is at the newest version that was seen then.

    Without `data_change` the added files hold the rows of the removed ones again. Raises DeadlineExceeded where other writers, and
    TableUnavailable where the storage, kept it from committing: the commit may stand then, and its files stay.
    """
    if len({move for part in parts for move in part.app_transactions.items()}) > len(
        {app for part in parts for app in part.app_transactions}
    ):
        raise InvalidArgument("two parts of one commit move an app id differently")
    attempts = _Attempts(table, deadline, seam)
    pending = dict(enumerate(parts))
    fenced: dict[int, FencedPart] = {}

    def look() -> WriteAttempt | None:
        moved = {place: _moved(table, part, attempts.may_be_committed) for place, part in pending.items()}
        if any(moved.values()):
            table.refresh()  # nobody is fenced by an old snapshot
            moved = {place: _moved(table, part, attempts.may_be_committed) for place, part in pending.items()}
        for place, names in moved.items():
            if names:
                fenced[place] = FencedPart(tuple(names), attempts.may_be_committed)
                part = pending.pop(place)
                if not attempts.may_be_committed:
                    delete_uncommitted(table.store, part.adds)
        return _writing(table, list(pending.values()), data_change) if pending else None

    with table.store.lease():
        committed = attempts.run(look)
    if committed:
        maintain_log(table, maintenance, seam)
    return CommitOutcome(table.version, fenced, attempts.conflicts)


def alter_fenced(
    table: TableHandle,
    look: Callable[[], WriteAttempt | None],
    *,
    deadline: float = COMMIT_DEADLINE,
    seam: Callable[[str], None] = hit,
) -> bool:
    """Change columns or properties by what `look` finds at the newest version; False where it finds nothing (any more) to do.

    What `look` returns is committed from the very version it looked at, or not at all; then it looks again. Raises what
    :func:`commit_fenced` does, and what `look` does.
    """
    with table.store.lease():
        table.refresh()
        return _Attempts(table, deadline, seam).run(look)


def add_columns(
    table: TableHandle,
    wanted: pa.Schema,
    *,
    refuse: Callable[[Mapping[str, tuple[str, str]]], None] = lambda differing: None,
) -> bool:
    """Give the table the columns of `wanted` that it lacks, or has as ones that are never null; False where there are none. `refuse` may raise for those of another type."""
    if table.delta.protocol().writer_features or any(has_timestamp_ntz(field.type) for field in wanted):
        # From writer 7 on Spark does not open a table with columns that are not nullable and without this one: it is there before others.
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
    """Whether a timestamp without a zone is in it, wherever: a table with one has features of its own, which are added one by one
    (:func:`add_columns`). One that is created with it lacks what Spark wants beside it."""
    return "timestamp[us]" in str(kind)


def has_nested_timestamp_ntz(kind: pa.DataType) -> bool:
    """Whether a timestamp without a zone stands inside of a list or a map, where delta-rs does not see that the table needs the
    feature for it: it would make a table that it then does not open."""
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


def set_properties(
    table: TableHandle, wanted: Callable[[Mapping[str, str]], Mapping[str, str]], *, seam: Callable[[str], None] = hit
) -> bool:
    """Set those table properties that `wanted` gives for the present ones; False where it gives none."""

    def look() -> WriteAttempt | None:
        found = dict(wanted(table.configuration))
        if not found:
            return None
        return lambda properties: table.delta.alter.set_table_properties(
            found, raise_if_not_exists=False, commit_properties=properties, post_commithook_properties=NO_COMMIT_HOOKS
        )

    return alter_fenced(table, look, seam=seam)


class _Owner(Enum):
    OURS = auto()
    ANOTHERS = auto()
    NOBODYS = auto()
    FORGOTTEN = auto()
    """The table is beyond that version, and the log no longer says whose it was."""


class _Attempts:
    """Looks, tries, and settles what became of the attempt, until one stands or there is nothing to write."""

    def __init__(self, table: TableHandle, deadline: float, seam: Callable[[str], None]) -> None:
        self._table = table
        self._seconds = deadline
        self._ends = Deadline.after(deadline)
        self._seam = seam
        self._mark = uuid.uuid4().hex
        self._idle = 0
        self._pause = _PAUSE[0]
        self.conflicts = 0
        self.may_be_committed = False
        """Of one attempt nobody knows any more whether it stands."""

    def run(self, look: Callable[[], WriteAttempt | None]) -> bool:
        table = self._table
        if not table.version_exists():
            table.refresh()
        while (write := look()) is not None:
            self._seam("commit.checked")
            version = table.version + 1
            try:
                write(CommitProperties({_MARK: self._mark}, max_commit_retries=0))
            except _FAILURES as error:
                if not self._settled(version, error):
                    continue
            table.store.sync([commit_file(version)])
            table.refresh()
            return True
        return False

    def _settled(self, version: int, error: Exception) -> bool:
        """Whether the attempt at `version` stands, although it failed with `error`; if not, what the next look starts from."""
        owner = self._owner(version)
        if owner is _Owner.OURS:
            return True
        if self._ends.expired():
            raise DeadlineExceeded(f"no commit to {self._table.uri} in {self._seconds:.0f} s: {error}") from error
        if owner is _Owner.NOBODYS:  # nobody was first: it is the storage, or the commit itself
            self._idle += 1
            if self._idle > _IDLE_TRIES or not isinstance(error, CommitFailedError | OSError):
                raise TableUnavailable(f"{self._table.uri} takes no commit ({error}): it may stand") from error
            time.sleep(jittered(self._pause))
            self._pause = min(self._pause * 2, _PAUSE[1])
        else:
            self.conflicts += 1
            self.may_be_committed |= owner is _Owner.FORGOTTEN
            self._table.refresh()
        return False

    def _owner(self, version: int) -> _Owner:
        store, name = self._table.store, commit_file(version)
        try:
            data = store.read(name)
            if data is None:
                if store.delta().version() < version:
                    return _Owner.NOBODYS
                data = store.read(name)
        except _FAILURES:
            return _Owner.NOBODYS  # as far as is known: the next attempt takes the same place, or finds it taken
        if data is None:
            return _Owner.FORGOTTEN
        marks = (
            json.loads(line).get("commitInfo", {}).get(_MARK) for line in data.splitlines() if b"commitInfo" in line
        )
        return _Owner.OURS if self._mark in marks else _Owner.ANOTHERS


def _moved(table: TableHandle, part: CommitPart, may_be_committed: bool) -> list[str]:
    moved = [app_id for app_id, move in part.app_transactions.items() if table.app_version(app_id) != move.base]
    moved += table.not_live(part.removes)
    if may_be_committed and not part.app_transactions and not part.removes:
        return [action.path for action in part.adds]  # nothing in the table tells whether it is there
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
    """The partition values of a file, by the folders that it lies in."""
    parts = (folder.partition("=") for folder in name.split("/")[:-1])
    return {unquote(column): unquote(value) for column, equals, value in parts if equals}
