"""Runs of messages on their way through the chain, as numpy columns.

:class:`Columns` is a decoded batch. A :class:`MessageRun` is the slice of it that the interceptors judge together.
Interceptors
write verdicts into the run and may shorten it; they never modify the channel state while deciding.
:class:`DecidedBatch` is
what evolve reads: the same columns, from a run just decided or from rows of the ``wal`` table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.message.columns import HeaderColumns, MessageColumns
from millrace.message.header import Header
from millrace.message.types import DML, KEY_DELETING_TYPES, MIN_CHAIN_VERSION, ROW_CARRYING_TYPES, MessageType
from millrace.wal.reasons import Reason
from millrace.wal.versions import CHAIN_VERSIONS

Int64s = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]

REASONS: Final[tuple[Reason, ...]] = tuple(Reason)
ACCEPTED: Final = 0
"""Reason code of an accepted message. Code c > 0 is REASONS[c - 1]."""

MAX_RUN: Final = 1 << 16
"""Maximum messages that are judged together. Bounds the memory of a step."""
MIN_RUN: Final = 1 << 10
"""Messages that a step looks at after one that was cut short. Bounds the work that a cut discards."""
Bools = npt.NDArray[np.bool_]


def _table(types: Iterable[MessageType]) -> Bools:
    """Return a lookup table by type number: whether it is one of `types`. One pass for any number of types."""
    table = np.zeros(1 << 16, dtype=bool)
    table[[kind.value for kind in types]] = True
    return table


CARRIES_ROWS_MASK: Final = _table(ROW_CARRYING_TYPES)
"""Mask, by type number, of messages that carry whole rows."""
DELETES_KEYS_MASK: Final = _table(KEY_DELETING_TYPES)
"""Mask, by type number, of messages whose keys hit older rows."""
_CHANGING: Final = tuple(
    _table(kind for kind in DML if MIN_CHAIN_VERSION.get(kind, 1) <= version) for version in CHAIN_VERSIONS
)
_UNSTAMPED: Final = np.zeros(0, dtype=np.int64)


def dml_mask(version: int) -> Bools:
    """Return by type number the messages that change rows in that chain version.

    Types unknown to it are not included.
    """
    return _CHANGING[version - 1]


def reason_code(reason: Reason) -> int:
    """Return the code of `reason` while a run is judged."""
    return REASONS.index(reason) + 1


def group_indices(*keys: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """Return the row indices of `keys` (columns of one length) grouped by equal keys, ascending in each group."""
    count = len(keys[0])
    if count == 1:
        return [np.zeros(1, dtype=np.intp)]
    code: npt.NDArray[np.intp] | None = None
    for key in keys:
        if count == 0 or (key == key[0]).all():
            continue
        _, inverse = np.unique(key, return_inverse=True)
        if code is None:
            code = inverse
        else:
            _, code = np.unique(code * (int(inverse.max()) + 1) + inverse, return_inverse=True)
    if code is None:
        return [np.arange(count, dtype=np.intp)] if count else []
    order = np.argsort(code, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(code[order])) + 1)


def payload_sizes(payloads: pa.LargeBinaryArray) -> Int64s:
    """Return the bytes of each value. A null counts as 0."""
    offsets = np.frombuffer(payloads.buffers()[1], dtype=np.int64, count=len(payloads) + 1 + payloads.offset)
    return np.diff(offsets[payloads.offset :]) if len(payloads) else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission(Header):
    """A message that the chain emits, in the open term. The segment id of a CreateSegment is the tick it gets."""

    type: MessageType
    segment_id: int = 0
    detail: str | None = None
    payload: bytes = b""


@dataclass(slots=True)
class MessageRun:
    """Messages start .. start + count - 1 of `columns`, with the interceptors' verdicts."""

    columns: MessageColumns
    start: int
    count: int
    type: npt.NDArray[np.uint16]
    """The type of each message: the log's, except an INSERT that a collection judges as an UPSERT (:meth:`retype`)."""
    reason: Codes
    details: dict[int, str] = field(default_factory=dict)
    """Text of a rejection, by index in the run."""
    persisted: bool = True
    """False for a time tick that becomes no row."""
    tick: Int64s = field(default_factory=lambda: _UNSTAMPED)
    segment: Int64s = field(default_factory=lambda: _UNSTAMPED)
    """Segment of an insert's rows, or first segment of an Import. Otherwise 0."""

    @classmethod
    def of(cls, columns: MessageColumns, start: int, *, most: int) -> MessageRun:
        count = min(len(columns) - start, most)
        kinds = columns.type[start : start + count]
        return cls(columns=columns, start=start, count=count, type=kinds, reason=np.zeros(count, dtype=np.uint8))

    def cut(self, count: int) -> None:
        """Keep the first `count` messages (at least one). The rest is judged later, from a newer state."""
        if count < self.count:
            self.count = max(count, 1)
            # Copy it: the rows refer to it, and a view would keep the whole step's verdicts alive.
            self.reason = self.reason[: self.count].copy()
            self.type = self.type[: self.count]

    def view(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column[self.start : self.start + self.count]

    def pending(self) -> npt.NDArray[np.intp]:
        """Return the indices of messages that no rule has rejected so far."""
        return (self.reason == ACCEPTED).nonzero()[0]

    def retype(self, places: npt.NDArray[np.intp], kind: MessageType) -> None:
        """Treat the messages at `places` as type `kind` from here on. The log's columns do not change."""
        self.type = self.type.copy()
        self.type[places] = kind

    def reject(self, places: npt.NDArray[Any] | Sequence[int] | int, reason: Reason, words: str) -> None:
        """Record `reason` for the messages at `places`."""
        self.reason[places] = reason_code(reason)
        for place in np.atleast_1d(np.asarray(places)):
            self.details[int(place)] = words

    @property
    def first_accepted(self) -> bool:
        """Whether the first message (of a control message: the only one) is accepted so far."""
        return bool(self.reason[0] == ACCEPTED)


@dataclass(frozen=True, slots=True)
class DecidedMessage(Header):
    """One accepted message that was judged alone. An insert or delete has no payload here.

    Construct it with positional arguments, the header first: construction dominates the cost of a step of one message.
    """

    type: MessageType
    ledger: int = 0
    entry: int = 0
    index: int = 0
    tick: int = 0
    ordinal: int = 0
    segment_id: int = 0
    size: int = 0
    detail: str | None = None
    payload: bytes = b""


@dataclass(slots=True, kw_only=True)
class DecidedBatch(HeaderColumns):
    """Decided inserts and deletes, and rejections of any type, in id order as columns: the input of evolve."""

    tick: Int64s
    ordinal: npt.NDArray[np.int32]
    segment_id: Int64s
    reason: Codes
