"""The ``wal`` Delta table: its creation, and the position of a PChannel at one version.

Plain Delta (reader 1, writer 2), so that delta-rs and delta-spark both append to it and read it; partitioned by kind,
PChannel and date of the tick. Only the committer (millrace.node.ingest.committer) and its compaction write to it. A
position is the last live row of kind ``state`` of a PChannel, with those that it builds on (millrace.tables.wal.
state_rows). Each commit adds one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, unquote

import crc32c
import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed, MillraceError, StateDamaged, UnsupportedVersion
from millrace.message.ids import LogId
from millrace.storage.commit import add_columns
from millrace.storage.parquet_file import open_file
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, create_table, open_table, table_at, table_exists
from millrace.tables.wal.state_rows import NextRow, StateRow, chain_of, next_row, state_of, state_row
from millrace.wal.digest import WalDigest
from millrace.wal.schema import KIND_STATE, PARTITION_COLUMNS, ROW_SCHEMA
from millrace.wal.state import ChannelState

STATS_COLUMNS: Final = ("time_tick", "ledger", "entry")
"""Columns with statistics in the Delta log, by which readers prune files."""

COMMIT_APP_SUFFIX: Final = "/commit"
"""``<pchannel>/commit``: the app id whose version counts the PChannel's commits (millrace.node.ingest.committer)."""

_CONFIGURATION: Final = {"delta.dataSkippingStatsColumns": ",".join(STATS_COLUMNS)}
_CHECKSUM: Final = "crc32c"
"""Key in a state row's detail."""
_BASE: Final = "base"
"""Key in an increment's detail: commit and digest of the row that it follows."""
_PCHANNEL: Final = re.compile(r"[A-Za-z0-9._-]+")


def _plain(field: pa.Field) -> pa.Field:
    """Return a column of ROW_SCHEMA with its Delta type: strings without dictionary, binary of any size."""
    kind = field.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_large_binary(kind):
        kind = pa.binary()
    elif pa.types.is_unsigned_integer(kind):
        raise InvalidArgument(f"Delta has no unsigned integers: {field.name}")
    return pa.field(field.name, kind, nullable=field.nullable)


TABLE_SCHEMA: Final = pa.schema(
    [
        *(_plain(item) for item in ROW_SCHEMA),
        pa.field("kind", pa.utf8()),
        pa.field("pchannel", pa.utf8()),
        pa.field("date", pa.date32()),
    ]
)
"""Columns of the table. The partition columns are last, and not in the files."""


@dataclass(frozen=True, slots=True)
class WalTotals:
    """Totals of a PChannel's rows since its first commit. Each state row holds them."""

    messages: int = 0
    rejections: int = 0
    digest: WalDigest = field(default_factory=WalDigest)
    """Digest of all message and rejection rows (millrace.wal.digest)."""

    def __add__(self, other: WalTotals) -> WalTotals:
        return WalTotals(self.messages + other.messages, self.rejections + other.rejections, self.digest + other.digest)

    def to_json(self) -> dict[str, Any]:
        return {"messages": self.messages, "rejections": self.rejections, "digest": str(self.digest)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(int(data["messages"]), int(data["rejections"]), WalDigest.parse(data["digest"]))


@dataclass(frozen=True, slots=True)
class WalPosition:
    """The position of one PChannel at one version of the table."""

    version: int
    """Version of the table."""
    pchannel: str
    commits: int = 0
    """Number of this PChannel's commits: the fence compares it."""
    last_tick: int = 0
    """Version of the app transaction: the last time tick of the last range."""
    totals: WalTotals = field(default_factory=WalTotals)
    position: LogId | None = None
    """The next log entry to read; None before the first commit."""
    rows: tuple[StateRow, ...] = ()
    """The live state rows that make the state: a snapshot and the increments after it."""
    has_checksum: bool = True
    """Whether the row has a checksum. A row of an earlier build has none (millrace.tables.wal.state_check)."""
    uri: str = field(default="", compare=False)
    """The table's."""

    @property
    def state(self) -> ChannelState | None:
        """The decoded channel state; None before the first commit.

        Raises UnsupportedVersion, Malformed, and TableDamaged for a file that is needed and cannot be read.
        """
        if not self.rows:
            return None
        state = state_of(self.rows, self.read_row)
        if (state.pchannel, state.position, state.last_tick) != (self.pchannel, self.position, self.last_tick):
            raise Malformed(
                f"the state rows of {self.pchannel} give the state of {state.pchannel} at {state.position}, tick "
                f"{state.last_tick}, not that at {self.position}, tick {self.last_tick}"
            )
        return state

    @property
    def state_bytes(self) -> bytes | None:
        """The state's canonical bytes; None before the first commit. Raises as :attr:`state`."""
        state = self.state
        return None if state is None else state.to_bytes()

    def read_row(self, row: StateRow) -> bytes:
        """Read the bytes of one of its state rows from the table. Raises TableDamaged."""
        with open_file(store_at(self.uri), row.path) as file:
            (payload,) = file.read(["payload"])["payload"].to_pylist()
        found: bytes = payload
        return found

    def next_row(self, state: ChannelState) -> NextRow:
        """Return the state row of a commit that follows this position and ends at `state`. Raises as :attr:`state`."""
        return next_row(self.rows, state, self.read_row, whole=not self.has_checksum)


def partition_path(kind: str, pchannel: str, date: str) -> str:
    """Return the folder of a partition, relative to the table.

    Raises InvalidArgument for names unsuitable for folders.
    """
    if not _PCHANNEL.fullmatch(pchannel) or pchannel in {".", ".."}:
        raise InvalidArgument(f"{pchannel!r} is not a valid PChannel name: use letters, digits, '.', '_' and '-'")
    return f"kind={quote(kind)}/pchannel={quote(pchannel)}/date={quote(date)}"


def state_detail(*, commits: int, previous_tick: int, totals: WalTotals, time_tick: int, row: NextRow) -> str:
    """Return the ``detail`` of a state row, with a checksum over itself, the row's tick and the row's bytes."""
    body: dict[str, Any] = {"commits": commits, "previous_tick": previous_tick, **totals.to_json()}
    if row.base is not None:
        body[_BASE] = [row.base.commits, row.base.digest]
    return _json({**body, _CHECKSUM: _checksum(body, time_tick, row.payload)})


def _checksum(body: dict[str, Any], time_tick: int, state: bytes) -> int:
    return int(crc32c.crc32c(state, crc32c.crc32c(f"{time_tick} {_json(body)}".encode())))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


class _FoundRow(NamedTuple):
    """A state row as its file has it."""

    row: StateRow
    last_tick: int
    totals: WalTotals
    position: LogId
    has_checksum: bool


class WalTable:
    """A handle on the table at one version. Not thread-safe: each thread opens its own."""

    def __init__(self, table: TableHandle) -> None:
        self.table = table
        self._positions: dict[str, WalPosition] = {}
        """The last position that was read of each PChannel."""
        self._found: dict[str, dict[str, _FoundRow]] = {}
        """State rows that were read, by PChannel and file."""

    @classmethod
    def create(cls, uri: object) -> Self:
        """Open the table at `uri`, creating it if needed, and add columns that an earlier build did not have.

        Several processes may do so concurrently.
        """
        table = create_table(
            uri,
            TABLE_SCHEMA,
            partition_by=PARTITION_COLUMNS,
            configuration=_CONFIGURATION,
            name="wal",
            description="Messages, rejections and channel state of every PChannel.",
        )
        if table.missing_columns(TABLE_SCHEMA)[0]:
            add_columns(table, TABLE_SCHEMA)
        return cls(table)

    @staticmethod
    def exists(uri: object) -> bool:
        """Return whether there is a table at `uri`."""
        return table_exists(uri)

    @classmethod
    def open(cls, uri: object) -> Self:
        """Open the table at `uri` at its newest version. Raises TableNotFound, TableDamaged."""
        return cls(table_at(uri))

    @property
    def uri(self) -> str:
        return self.table.uri

    @property
    def version(self) -> int:
        """The version of this handle."""
        return self.table.version

    def refresh(self) -> None:
        """Go to the newest version."""
        self.table.refresh()

    def poll(self) -> None:
        """Go to the newest version that was announced (:meth:`TableHandle.poll`)."""
        self.table.poll()

    def commits(self, pchannel: str) -> int:
        """Return the number of commits of `pchannel` up to this version."""
        return self.table.app_version(pchannel + COMMIT_APP_SUFFIX)

    def last_tick(self, pchannel: str) -> int:
        """Return the last committed time tick of `pchannel` at this version; 0 before the first commit."""
        return self.table.app_version(pchannel)

    def position(self, pchannel: str) -> WalPosition:
        """Return the position of `pchannel` at this version."""
        return self.positions([pchannel])[pchannel]

    def positions(self, pchannels: Iterable[str]) -> dict[str, WalPosition]:
        """Return the positions of `pchannels`, all at this version. Reads the new state rows of those that moved."""
        found: dict[str, WalPosition] = {}
        moved: list[str] = []
        for pchannel in pchannels:
            commits = self.commits(pchannel)
            known = self._positions.get(pchannel)
            if commits == 0:
                found[pchannel] = WalPosition(self.version, pchannel)
            # The count of commits alone identifies the state row: a PChannel that did not move needs no read.
            elif known is not None and known.commits == commits:
                found[pchannel] = _at(known, self.version)
            else:
                moved.append(pchannel)
        if moved:
            paths = self._state_paths()
            for pchannel in moved:
                found[pchannel] = self._read_state(pchannel, paths.get(pchannel, []))
        return found

    def valid_positions(
        self, pchannels: Iterable[str], *, on_damaged: Callable[[str, StateDamaged], None] = lambda name, error: None
    ) -> dict[str, WalPosition]:
        """Return positions without the PChannels whose state is damaged; `damaged` is called for each of those."""
        names = list(pchannels)
        try:
            return self.positions(names)
        except StateDamaged:
            found = {}
        for name in names:
            try:
                found[name] = self.position(name)
            except StateDamaged as error:
                on_damaged(name, error)
        return found

    def pchannels(self) -> list[str]:
        """Return the PChannels with a commit, sorted."""
        return sorted(self._state_paths())

    def files(self, kind: str, pchannel: str, *, after: int | None = None, until: int | None = None) -> list[str]:
        """Return files, relative to the table, that may hold rows of `kind` and `pchannel` with `after` < tick <=
        `until`.
        """
        predicate = f"kind = '{kind}' AND pchannel = '{pchannel}'"
        if after is not None:
            predicate += f" AND time_tick > {after}"
        if until is not None:
            predicate += f" AND time_tick <= {until}"
        return self.table.files(predicate)

    def _state_paths(self) -> dict[str, list[str]]:
        """Return the live state files by PChannel, relative to the table."""
        paths: dict[str, list[str]] = {}
        for path in self.table.files(f"kind = '{KIND_STATE}'"):
            paths.setdefault(_partition_value(path, "pchannel"), []).append(path)
        return paths

    def _read_state(self, pchannel: str, paths: list[str]) -> WalPosition:
        problems = []
        known = self._found.get(pchannel, {})
        rows: dict[str, _FoundRow] = {}
        for path in paths:
            try:
                rows[path] = known[path] if path in known else self._state_row(pchannel, path)
            # Not damage: another build wrote it. Recovery must not rebuild what a newer build can read.
            except UnsupportedVersion:
                raise
            except (OSError, pa.ArrowException, MillraceError, ValueError, LookupError, TypeError) as error:
                problems.append(f"{path}: {error}")
        self._found[pchannel] = rows
        # Several state rows are live: the app transactions say which commit is the last.
        last = self.commits(pchannel), self.last_tick(pchannel)
        for found in rows.values():
            if (found.row.commits, found.last_tick) == last:
                try:
                    chain = chain_of([each.row for each in rows.values()], found.row)
                except Malformed as error:
                    problems.append(f"{found.row.path}: {error}")
                    continue
                position = WalPosition(
                    self.version,
                    pchannel,
                    *last,
                    found.totals,
                    found.position,
                    chain,
                    found.has_checksum,
                    self.table.uri,
                )
                self._positions[pchannel] = position
                return position
        raise StateDamaged(
            f"version {self.version} of {self.table.uri} has no valid state row of {pchannel} for its commit "
            f"{last[0]} at tick {last[1]} ({'; '.join(problems) or 'none at all'}): "
            "run the operation recovery (mode repair), which recomputes it from the log"
        )

    def _state_row(self, pchannel: str, path: str) -> _FoundRow:
        """Parse the state row of a file. Raises read errors, Malformed."""
        with self.table.open_file(path) as file:
            (row,) = file.read(["detail", "payload", "time_tick", "ledger", "entry"]).to_pylist()
        detail = json.loads(row["detail"])
        checksum = detail.pop(_CHECKSUM, None)
        if checksum is not None and checksum != _checksum(detail, row["time_tick"], row["payload"]):
            raise Malformed("its checksum differs")
        base = detail.get(_BASE)
        found = _FoundRow(
            state_row(path, detail["commits"], row["payload"], None if base is None else (base[0], base[1])),
            row["time_tick"],
            WalTotals.from_json(detail),
            LogId(row["ledger"], row["entry"]),
            checksum is not None,
        )
        if not found.has_checksum:
            state = ChannelState.from_bytes(row["payload"])
            if (state.pchannel, state.position, state.last_tick) != (pchannel, found.position, found.last_tick):
                raise Malformed("the state does not belong to the row's position")
        return found

    def position_at(self, pchannel: str, version: int) -> WalPosition | None:
        """Return the position of `pchannel` at an older version.

        Returns None if that version or its state row is gone, or the PChannel had no commit yet.
        """
        try:
            # Old versions go without notice: log cleanup removes the commit, VACUUM the files.
            pinned = open_table(self.table.uri, version=version)
            found = None if pinned is None else WalTable(pinned).position(pchannel)
        except Exception:  # cleaned up or vacuumed: delta-rs has no single error type for it
            return None
        return found if found is not None and found.rows else None


def _partition_value(path: str, column: str) -> str:
    """Return the value of a partition column in a file's path."""
    return unquote(path.partition(f"{column}=")[2].partition("/")[0])


def _at(position: WalPosition, version: int) -> WalPosition:
    """Return the same position, seen at a later version."""
    return replace(position, version=version)
