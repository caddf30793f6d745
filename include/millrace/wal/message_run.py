"""A run of messages on its way through the chain, as numpy columns.

:class:`MessageColumns` is a decoded batch; a :class:`MessageRun` is the stretch of it that the interceptors judge together. Interceptors
write verdicts into the run and may cut it shorter; they never touch the channel state while deciding. :class:`DecidedBatch` is
what evolve reads: the same columns, whether they come from a run just decided or from rows of the ``wal`` table.
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
"""Reason code of a message that is not rejected; code c > 0 is REASONS[c - 1]."""

MAX_RUN: Final = 1 << 16
"""Messages that are judged together at the most: bounds the memory of one step."""
MIN_RUN: Final = 1 << 10
"""Messages that a step looks at where the one before was cut short: bounds what a cut throws away."""
Bools = npt.NDArray[np.bool_]


def _table(types: Iterable[MessageType]) -> Bools:
    """By type number, whether it is one of `types`: looking it up costs one pass, whatever their number."""
    table = np.zeros(1 << 16, dtype=bool)
    table[[kind.value for kind in types]] = True
    return table


CARRIES_ROWS_MASK: Final = _table(ROW_CARRYING_TYPES)
"""By type number: messages of whole rows."""
DELETES_KEYS_MASK: Final = _table(KEY_DELETING_TYPES)
"""By type number: messages whose keys hit older rows."""
_CHANGING: Final = tuple(
    _table(kind for kind in DML if MIN_CHAIN_VERSION.get(kind, 1) <= version) for version in CHAIN_VERSIONS
)
_UNSTAMPED: Final = np.zeros(0, dtype=np.int64)


def dml_mask(version: int) -> Bools:
    """By type number: messages that change rows, to a chain of that version; what it does not know yet is none."""
    return _CHANGING[version - 1]


def reason_code(reason: Reason) -> int:
    """The small number that stands for `reason` while a run is judged."""
    return REASONS.index(reason) + 1


def group_indices(*keys: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """Row numbers of `keys` (columns of one length) grouped by equal keys; ascending inside a group."""
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
    """Bytes of each value; a null counts as 0 bytes."""
    offsets = np.frombuffer(payloads.buffers()[1], dtype=np.int64, count=len(payloads) + 1 + payloads.offset)
    return np.diff(offsets[payloads.offset :]) if len(payloads) else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission(Header):
    """A message that the chain makes itself, in the term that is open. A CreateSegment's segment id is the tick it gets."""

    type: MessageType
    segment_id: int = 0
    detail: str | None = None
    payload: bytes = b""


@dataclass(slots=True)
class MessageRun:
    """Messages start .. start + count - 1 of `columns` and what the interceptors found about them."""

    columns: MessageColumns
    start: int
    count: int
    type: npt.NDArray[np.uint16]
    """What each message is: what the log says, but where a collection judges an INSERT as an UPSERT (:meth:`retype`)."""
    reason: Codes
    details: dict[int, str] = field(default_factory=dict)
    """Words for a rejection, by place in the run."""
    persisted: bool = True
    """False for a time tick that becomes no row."""
    tick: Int64s = field(default_factory=lambda: _UNSTAMPED)
    segment: Int64s = field(default_factory=lambda: _UNSTAMPED)
    """Of an insert: where its rows go; of an Import the first one; else 0."""

    @classmethod
    def of(cls, columns: MessageColumns, start: int, *, most: int) -> MessageRun:
        count = min(len(columns) - start, most)
        kinds = columns.type[start : start + count]
        return cls(columns=columns, start=start, count=count, type=kinds, reason=np.zeros(count, dtype=np.uint8))

    def cut(self, count: int) -> None:
        """Keep the first `count` messages (at least one); the rest is judged later, from a newer state."""
        if count < self.count:
            self.count = max(count, 1)
            # A copy: the rows that come of it are kept, and a view would keep the whole step's verdicts with each of them.
            self.reason = self.reason[: self.count].copy()
            self.type = self.type[: self.count]

    def view(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column[self.start : self.start + self.count]

    def pending(self) -> npt.NDArray[np.intp]:
        """Places of the messages that no rule has rejected so far."""
        return (self.reason == ACCEPTED).nonzero()[0]

    def retype(self, places: npt.NDArray[np.intp], kind: MessageType) -> None:
        """Take the messages at `places` for ones of type `kind` from here on; the log's own columns stay."""
        self.type = self.type.copy()
        self.type[places] = kind

    def reject(self, places: npt.NDArray[Any] | Sequence[int] | int, reason: Reason, words: str) -> None:
        """Record `reason` for the messages at `places`."""
        self.reason[places] = reason_code(reason)
        for place in np.atleast_1d(np.asarray(places)):
            self.details[int(place)] = words

    @property
    def first_accepted(self) -> bool:
        """Whether the first (for a control message: the only) message is accepted so far."""
        return bool(self.reason[0] == ACCEPTED)


@dataclass(frozen=True, slots=True)
class DecidedMessage(Header):
    """One accepted message that was judged alone; an insert or delete comes without its payload.

    Made by place, the header first: a step of one message is made of such costs.
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
    """Decided Inserts and Deletes (and rejections of any type) in id order, as columns: what evolve makes the next state of."""

    tick: Int64s
    ordinal: npt.NDArray[np.int32]
    segment_id: Int64s
    reason: Codes
