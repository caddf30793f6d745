"""A run of messages on its way through the chain, as numpy columns.

:class:`Columns` is a decoded batch; a :class:`Run` is the stretch of it that the interceptors judge together. Interceptors
write verdicts into the run and may cut it shorter; they never touch the channel state while deciding. :class:`Decided` is
what evolve reads: the same columns, whether they come from a run just decided or from rows of the ``wal`` table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.message.columns import Columns
from millrace.message.types import MessageType
from millrace.wal.reasons import Reason

Int64s = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]

REASONS: Final[tuple[Reason, ...]] = tuple(Reason)
ACCEPTED: Final = 0
"""Reason code of a message that is not rejected; code c > 0 is REASONS[c - 1]."""

MAX_RUN: Final = 1 << 16
"""Messages that are judged together at the most: bounds the memory of one step."""
MIN_RUN: Final = 1 << 10
"""Messages that a step looks at where the one before was cut short: bounds what a cut throws away."""


def reason_code(reason: Reason) -> int:
    """The small number that stands for `reason` while a run is judged."""
    return REASONS.index(reason) + 1


def groups(*keys: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
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


@dataclass(frozen=True, slots=True)
class Emission:
    """A message that the chain makes itself. A CreateSegment's segment id is the tick it gets."""

    type: MessageType
    vchannel: str
    collection_id: int = 0
    partition_id: int = 0
    segment_id: int = 0
    rows: int = 0
    txn_id: int = 0
    detail: str | None = None
    payload: bytes = b""


@dataclass(slots=True)
class Run:
    """Messages start .. start + count - 1 of `columns` and what the interceptors found about them."""

    columns: Columns
    start: int
    count: int
    reason: Codes
    details: dict[int, str] = field(default_factory=dict)
    """Words for a rejection, by place in the run."""
    before: list[Emission] = field(default_factory=list)
    """What is emitted before the first message, in order."""
    persisted: bool = True
    """False for a time tick that becomes no row."""

    @classmethod
    def of(cls, columns: Columns, start: int, *, most: int) -> Run:
        count = min(len(columns) - start, most)
        return cls(columns=columns, start=start, count=count, reason=np.zeros(count, dtype=np.uint8))

    def cut(self, count: int) -> None:
        """Keep the first `count` messages (at least one); the rest is judged later, from a newer state."""
        if count < self.count:
            self.count = max(count, 1)
            # A copy: the rows that come of it are kept, and a view would keep the whole step's verdicts with each of them.
            self.reason = self.reason[: self.count].copy()

    def view(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column[self.start : self.start + self.count]

    def pending(self) -> npt.NDArray[np.intp]:
        """Places of the messages that no rule has rejected so far."""
        return (self.reason == ACCEPTED).nonzero()[0]

    def reject(self, places: npt.NDArray[Any] | Sequence[int] | int, reason: Reason, words: str) -> None:
        """Record `reason` for the messages at `places`."""
        self.reason[places] = reason_code(reason)
        for place in np.atleast_1d(np.asarray(places)):
            self.details[int(place)] = words

    @property
    def accepted_one(self) -> bool:
        """Whether the first (for a control message: the only) message is accepted so far."""
        return bool(self.reason[0] == ACCEPTED)


@dataclass(frozen=True, slots=True)
class Row:
    """One accepted message that was judged alone; an insert or delete comes without its payload."""

    type: MessageType
    vchannel: str
    tick: int
    ledger: int
    entry: int
    index: int
    ordinal: int
    term: int
    collection_id: int
    partition_id: int
    segment_id: int
    schema_version: int
    rows: int
    txn_id: int
    producer_id: int
    epoch: int
    sequence: int
    size: int
    reason: int
    detail: str | None
    payload: bytes


@dataclass(slots=True)
class Decided:
    """Decided Inserts and Deletes (and rejections of any type) in id order, as columns: what evolve makes the next state of."""

    type: npt.NDArray[np.uint16]
    vchannel: npt.NDArray[np.int32]
    names: list[str]
    tick: Int64s
    ledger: Int64s
    entry: Int64s
    index: npt.NDArray[np.int32]
    ordinal: npt.NDArray[np.int32]
    partition_id: Int64s
    segment_id: Int64s
    rows: Int64s
    txn_id: Int64s
    producer_id: Int64s
    epoch: npt.NDArray[np.int32]
    sequence: Int64s
    size: Int64s
    reason: Codes

    def __len__(self) -> int:
        return len(self.tick)
