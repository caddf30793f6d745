"""The source-independent part of a scanner: from a PChannel's rows in tick order to the units that a reader gets, in
that order.

    scanner = Scanner(after_tick=0, filters=[VChannelFilter({"p0_1v0"})])
    visible = scanner.push(rows)  # rows of ROW_SCHEMA, with visible_tick; transactions assembled
    for delivered in visible_units(visible):  # ImmutableMessage | ImmutableTxn
        ...

A scanner delivers *units*: a message outside transactions at its own tick, and a committed transaction at its Commit's
tick, with its bodies in their order and then the Commit. Begin, KeepAlive and Rollback are not delivered. A deliver
policy says where a scan starts; filters select units. Both apply to a unit as a whole. The tick and id of a transaction
are its Commit's, so Begin and bodies are read whatever their own are. A type filter accepts a transaction whose Commit
or one of whose bodies has a wanted type.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument, WalGap
from millrace.message.columns import string_array
from millrace.message.header import NUMERIC_FIELDS
from millrace.message.ids import MessageId
from millrace.message.model import ImmutableMessage
from millrace.message.types import MessageType
from millrace.wal.txn_buffer import VISIBLE_TICK, TxnBuffer

# --- deliver policies: where a scan begins --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class All:
    """Start at the beginning of the WAL."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Start with units that become visible after the scan began."""


@dataclass(frozen=True, slots=True)
class StartFrom:
    """Start at the unit whose id (of a transaction: its Commit's) is `message_id` or greater."""

    message_id: MessageId


@dataclass(frozen=True, slots=True)
class StartAfter:
    """Start at the first unit whose id is greater than `message_id`."""

    message_id: MessageId


@dataclass(frozen=True, slots=True)
class StartAfterTick:
    """Start with units that become visible after `tick`."""

    tick: int


DeliverPolicy = All | Latest | StartFrom | StartAfter | StartAfterTick

# --- filters: what of it is delivered; a unit must pass all of them -------------------------------------------------


@dataclass(frozen=True, slots=True)
class VChannelFilter:
    """Messages of these VChannels, and messages of the whole PChannel (with an empty VChannel), which concern each."""

    names: Collection[str]


@dataclass(frozen=True, slots=True)
class TickAboveFilter:
    """Units that became visible after `tick`."""

    tick: int


@dataclass(frozen=True, slots=True)
class TickFromFilter:
    """Units that became visible at or after `tick`."""

    tick: int


@dataclass(frozen=True, slots=True)
class TypeFilter:
    """Units of these types."""

    types: Collection[MessageType]


Filter = VChannelFilter | TickAboveFilter | TickFromFilter | TypeFilter

# --- units as objects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImmutableTxn:
    """A committed transaction: one unit, visible at its Commit."""

    commit: ImmutableMessage
    bodies: tuple[ImmutableMessage, ...]

    @property
    def id(self) -> MessageId:
        return self.commit.id

    @property
    def time_tick(self) -> int:
        return self.commit.time_tick

    @property
    def last_confirmed(self) -> MessageId:
        return self.commit.last_confirmed

    @property
    def vchannel(self) -> str:
        return self.commit.vchannel

    @property
    def txn_id(self) -> int:
        return self.commit.txn_id


_ROWS: Final = 256
_FEW: Final = 3
"""Most rows that are converted row by row."""
_BYTES: Final = 1 << 20
"""Approximate limit of rows that are converted to objects at a time."""

_SILENT: Final = string_array(("BEGIN_TXN", "KEEP_ALIVE", "ROLLBACK_TXN"))
_IDS: Final = ("ledger", "entry", "index", "ordinal")


class Scanner:
    """Assembles and filters the rows of one PChannel. Push them in tick order, starting at the LastConfirmed of
    `after_tick`.

    Delivers units with a tick > `after_tick` and an id >= `first_id`. Raises WalGap for rows out of tick order: a
    source that repeats or reorders rows is faulty.
    """

    def __init__(
        self, *, after_tick: int = 0, first_id: MessageId | None = None, filters: Sequence[Filter] = ()
    ) -> None:
        names: set[str] | None = None
        types: set[MessageType] | None = None
        for each in filters:
            match each:
                case VChannelFilter(wanted):
                    names = set(wanted) if names is None else names & set(wanted)
                case TypeFilter(kinds):
                    types = set(kinds) if types is None else types & set(kinds)
                case TickAboveFilter(tick):
                    after_tick = max(after_tick, tick)
                case TickFromFilter(tick):
                    # Ticks are integers: at or after `tick` is after `tick - 1`.
                    after_tick = max(after_tick, tick - 1)
                case _:
                    raise InvalidArgument(f"{each!r} is not a scan filter")
        self.after_tick = after_tick
        self._first_id = first_id
        self._filters: tuple[Filter, ...] = (
            *(() if names is None else (VChannelFilter(frozenset(names)),)),
            *(() if types is None else (TypeFilter(frozenset(types)),)),
        )
        # The empty name: messages of the whole PChannel concern each VChannel.
        self._names = None if names is None else pa.array(sorted({"", *names}), pa.utf8())
        self._types = None if types is None else pa.array([kind.name for kind in types], pa.utf8())
        self._buffer = TxnBuffer(after_tick=after_tick)
        self._last_tick = 0
        self.filtered_count = 0
        """Number of messages excluded by filters so far."""

    @property
    def last_tick(self) -> int:
        """The tick of the last pushed row."""
        return self._last_tick

    @property
    def held_bytes(self) -> int:
        """Bytes held for open transactions."""
        return self._buffer.held_bytes

    @property
    def selection(self) -> tuple[Filter, ...] | None:
        """The selection that decides whether rows outside transactions after `after_tick` are delivered; None if it
        also depends on their ids.

        Scanners with an equal selection deliver the same ones.
        """
        return None if self._first_id is not None else self._filters

    def twin(self) -> Scanner:
        """Return a scanner with the same selection that has seen nothing."""
        return Scanner(filters=self._filters)

    def pass_over(self, first_tick: int, last_tick: int, *, excluded: int) -> None:
        """Note rows outside transactions that a twin was pushed: their ticks, and how many its filters excluded.

        They hold no DropCollection, which ends transactions. Raises WalGap, as `push` does.
        """
        if first_tick <= self._last_tick:
            raise WalGap(f"rows are out of tick order after tick {self._last_tick}: scan again from there")
        self._last_tick = last_tick
        self.filtered_count += excluded

    def push(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        """Return the rows that `rows` (accepted messages of ROW_SCHEMA) make visible and that pass the filters, in tick
        order.
        """
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        self._follow(table)
        if self._names is not None:
            pushed, table = table, table.filter(pc.is_in(_names(table, "vchannel"), self._names))
            self.filtered_count += pushed.num_rows - table.num_rows
        # Before the type filter: the buffer needs Begin and bodies, whatever types are wanted.
        visible = self._buffer.push(table)
        if visible.num_rows == 0:
            return visible
        kinds = _names(visible, "type")
        silent = pc.is_in(kinds, _SILENT)
        if pc.any(silent).as_py():
            visible = visible.filter(pc.invert(silent))
            kinds = _names(visible, "type")
        if visible.num_rows and (self._types is not None or self._first_id is not None):
            whole, visible = visible, visible.filter(pa.array(self._passing(visible, kinds)))
            self.filtered_count += whole.num_rows - visible.num_rows
        return visible

    def _follow(self, table: pa.Table) -> None:
        ticks = table.column("time_tick").to_numpy()
        if len(ticks) == 0:
            return
        if ticks[0] <= self._last_tick or (np.diff(ticks) <= 0).any():
            raise WalGap(f"rows are out of tick order after tick {self._last_tick}: scan again from there")
        self._last_tick = int(ticks[-1])

    def _passing(self, visible: pa.Table, kinds: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
        """Return which rows belong to units that pass."""
        ends = _unit_ends(visible)
        starts = np.concatenate([[0], ends[:-1] + 1])
        passing = np.ones(len(ends), dtype=bool)
        if self._types is not None:
            wanted = pc.is_in(kinds, self._types).to_numpy().astype(bool)
            passing &= np.logical_or.reduceat(wanted, starts)
        if self._first_id is not None:
            passing &= _not_below(visible, ends, self._first_id)
            if passing.any():
                self._first_id = None  # ids increase with ticks: all later units are at or above it
        return np.repeat(passing, ends - starts + 1)


def _unit_ends(visible: pa.Table) -> npt.NDArray[np.intp]:
    """Return the index of each unit's last row. Rows of a unit share their visible tick."""
    ticks = visible.column(VISIBLE_TICK).to_numpy()
    return np.append(np.flatnonzero(np.diff(ticks)), len(ticks) - 1)


def _not_below(table: pa.Table, places: npt.NDArray[np.intp], bound: MessageId) -> npt.NDArray[np.bool_]:
    above = np.zeros(len(places), dtype=bool)
    equal = np.ones(len(places), dtype=bool)
    for name, part in zip(_IDS, bound, strict=True):
        values = table.column(name).to_numpy()[places]
        above |= equal & (values > part)
        equal &= values == part
    return above | equal


def _names(table: pa.Table, column: str) -> pa.ChunkedArray:
    values = table.column(column)
    return values.cast(pa.utf8()) if pa.types.is_dictionary(values.type) else values


def visible_units(visible: pa.Table) -> Iterator[ImmutableMessage | ImmutableTxn]:
    """Yield the units of a table from :meth:`Scanner.push` as objects.

    They are created on demand: a small message is ten times as large as its row.
    """
    if visible.num_rows == 0:
        return
    ends = set(_unit_ends(visible).tolist())
    bodies: list[ImmutableMessage] = []
    step = 1
    if visible.num_rows > 1:
        step = max(1, min(_ROWS, visible.num_rows * _BYTES // max(1, visible.nbytes)))
    for start in range(0, visible.num_rows, step):
        for place, message in enumerate(_objects(visible.slice(start, step)), start):
            if place not in ends:
                bodies.append(message)
            elif message.type == MessageType.COMMIT_TXN:
                yield ImmutableTxn(message, tuple(bodies))
                bodies = []
            else:
                yield message


_SAME: Final = ("time_tick", "physical_ms", "vchannel", "segment_id", *NUMERIC_FIELDS)
_CONFIRMED: Final = ("lc_ledger", "lc_entry", "lc_index", "lc_ordinal")


def _objects(rows: pa.Table) -> Iterator[ImmutableMessage]:
    """Convert rows of ROW_SCHEMA to objects column by column: an Arrow scalar per value would dominate the cost."""
    if rows.num_rows <= _FEW:  # the columns would
        yield from map(message_from_row, rows.to_pylist())
        return

    def values(name: str) -> list[Any]:
        column = _names(rows, name)
        found: list[Any] = (
            column.to_numpy(zero_copy_only=False).tolist() if not column.null_count else column.to_pylist()
        )
        return found

    ids, confirmed = (map(MessageId, *map(values, names)) for names in (_IDS, _CONFIRMED))
    types = map(MessageType.__getitem__, values("type"))
    principals = _principals(rows)
    payloads = (payload or b"" for payload in values("payload"))
    for own, before, kind, payload, principal, *same in zip(
        ids, confirmed, types, payloads, principals, *(values(name) for name in _SAME), strict=True
    ):
        yield ImmutableMessage(
            id=own,
            last_confirmed=before,
            type=kind,
            payload=payload,
            principal=principal,
            **dict(zip(_SAME, same, strict=True)),
        )


def _principals(rows: pa.Table) -> list[str]:
    if "principal" not in rows.schema.names or rows.column("principal").null_count == rows.num_rows:
        return [""] * rows.num_rows
    return [name or "" for name in _names(rows, "principal").to_pylist()]


def message_from_row(row: dict[str, Any]) -> ImmutableMessage:
    """Convert a row of ROW_SCHEMA to an object."""
    return ImmutableMessage(
        id=MessageId(row["ledger"], row["entry"], row["index"], row["ordinal"]),
        last_confirmed=MessageId(row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"]),
        type=MessageType[row["type"]],
        payload=row["payload"] or b"",
        principal=row.get("principal") or "",
        **{name: row[name] for name in _SAME},
    )


_OLD_NAMES: Final = {
    "VChannels": "VChannelFilter",
    "TickAbove": "TickAboveFilter",
    "TickFrom": "TickFromFilter",
    "Types": "TypeFilter",
}
"""Deprecated names of the filters."""


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is deprecated: use {_OLD_NAMES[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_OLD_NAMES[name]]
