"""The outcome of an append: one row for each message of the appended entries, as columns, and a typed view of it.

The columns are those of the chain's decisions, without payloads, so an answer for a thousand messages is a few arrays.
A producer of few messages uses :meth:`AppendOutcome.results`, in which a duplicate has the first result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import AppendRejected, InvalidArgument
from millrace.message.ids import MessageId
from millrace.message.types import Flag, MessageType, flags_of
from millrace.wal.message_run import DecidedMessage
from millrace.wal.reasons import Reason
from millrace.wal.rows import TYPE_CODES
from millrace.wal.schema import ROW_SCHEMA

OUTCOME_SCHEMA: Final = pa.schema(
    [
        pa.field("ledger", pa.int64(), nullable=False),  # message id; a rejection's too
        pa.field("entry", pa.int64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("ordinal", pa.int32(), nullable=False),
        pa.field("time_tick", pa.int64(), nullable=False),
        pa.field("lc_ledger", pa.int64(), nullable=False),  # LastConfirmed
        pa.field("lc_entry", pa.int64(), nullable=False),
        pa.field("lc_index", pa.int32(), nullable=False),
        pa.field("lc_ordinal", pa.int32(), nullable=False),
        pa.field("txn_id", pa.int64(), nullable=False),
        pa.field("reason", pa.utf8(), nullable=False),  # a Reason; "" if the message was accepted
        pa.field("detail", pa.utf8(), nullable=False),  # a rejection's message; "" otherwise
    ]
)
"""One row per message, in the order (entry, index) of the append."""

ID_COLUMNS: Final = ("ledger", "entry", "index", "ordinal")
CONFIRMED_COLUMNS: Final = ("lc_ledger", "lc_entry", "lc_index", "lc_ordinal")


@dataclass(frozen=True, slots=True)
class TxnContext:
    """The transaction that a message belongs to."""

    txn_id: int


@dataclass(frozen=True, slots=True)
class AppendResult:
    """An accepted message: its id and tick, and the LastConfirmed for readers.

    A reader that starts at LastConfirmed misses nothing that becomes visible after the message.

    For a resolved duplicate, these are the first message's; its LastConfirmed is None, because only the first answer
    has it.
    """

    message_id: MessageId
    last_confirmed: MessageId | None
    time_tick: int
    txn_context: TxnContext | None = None
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class AppendOutcome:
    """The decisions about one append's messages, in order; `rows` has OUTCOME_SCHEMA."""

    rows: pa.RecordBatch

    def __len__(self) -> int:
        return self.rows.num_rows

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a numeric column of OUTCOME_SCHEMA as a numpy view of shape ``(messages,)``."""
        return self.rows.column(name).to_numpy(zero_copy_only=False)

    @property
    def rejected(self) -> int:
        """Number of rejected messages, including duplicates."""
        return self.rows.num_rows - int(pc.sum(pc.equal(self.rows.column("reason"), "")).as_py() or 0)

    @property
    def last_tick(self) -> int:
        """The greatest time tick of the messages; 0 if there are none."""
        ticks = self.column("time_tick")
        return int(ticks.max()) if len(ticks) else 0

    def message_outcomes(self) -> Iterator[AppendResult | AppendRejected]:
        """Yield each message's result or rejection, in order; a duplicate has the first message's outcome."""
        for row in self.rows.to_pylist():
            yield _judged(row)

    def results(self) -> list[AppendResult]:
        """Return each message's result, in order. Raises the first rejection as AppendRejected."""
        found: list[AppendResult] = []
        for each in self.message_outcomes():
            if isinstance(each, AppendRejected):
                raise each
            found.append(each)
        return found

    def result(self) -> AppendResult:
        """Return the result of the only message.

        Raises AppendRejected, or InvalidArgument if there are several messages.
        """
        if len(self) != 1:
            raise InvalidArgument(f"this append has {len(self)} messages: use results()")
        return self.results()[0]


def _judged(row: dict[str, Any]) -> AppendResult | AppendRejected:
    reason, detail = row["reason"], row["detail"]
    message_id = MessageId(*(row[name] for name in ID_COLUMNS))
    if not reason:
        return AppendResult(
            message_id=message_id,
            last_confirmed=MessageId(*(row[name] for name in CONFIRMED_COLUMNS)),
            time_tick=row["time_tick"],
            txn_context=TxnContext(row["txn_id"]) if row["txn_id"] else None,
        )
    if reason != Reason.DUPLICATE:
        return AppendRejected(f"message {message_id} was rejected: {reason} ({detail})", reason=reason)
    first_id, first_tick, first_reason = parse_duplicate(detail)
    if first_reason:
        return AppendRejected(
            f"message {message_id} repeats {first_id}, which was rejected: {first_reason}", reason=first_reason
        )
    context = TxnContext(row["txn_id"]) if row["txn_id"] else None
    return AppendResult(first_id, None, first_tick, context, duplicate=True)


def parse_duplicate(detail: str) -> tuple[MessageId, int, str]:
    """Return the first message's id, time tick and reason ("" if accepted) from a DUPLICATE rejection's detail.

    The form is `<message id>@<tick>`, followed by a blank and the reason if the original was rejected (docs/chain.md,
    "Producers").
    """
    place, _, reason = detail.partition(" ")
    text, _, tick = place.partition("@")
    return MessageId.parse(text), int(tick), reason


def outcome_rows(messages: pa.RecordBatch, rejections: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows that answer appended messages, from a chain outcome (two ROW_SCHEMA batches), in id order.

    Messages that the chain emitted are left out: CreateSegment and Flush, which only it makes, and a RollbackTxn with a
    detail.
    """
    emitted = _emitted(messages)
    own = _columns(messages) if emitted is None else _columns(messages.filter(pa.array(~emitted)))
    if not rejections.num_rows:
        return own
    whole = pa.concat_batches([own, _columns(rejections)])
    keys = [whole.column(name).to_numpy() for name in ("index", "entry", "ledger")]
    return whole.take(pa.array(np.lexsort(keys)))


def accepted_rows(messages: Sequence[DecidedMessage], confirmed: MessageId | None) -> pa.RecordBatch:
    """Return what :func:`outcome_rows` does for a few messages that were all accepted.

    `confirmed` is the first Begin that is open, if any: the LastConfirmed of each message, else its own id.
    """
    count = len(messages)
    longs: list[tuple[int, ...]] = []
    ints: list[tuple[int, ...]] = []
    for each in messages:
        own = MessageId(each.ledger, each.entry, each.index, each.ordinal)
        lc = own if confirmed is None else confirmed
        longs.append((own.ledger, own.entry, each.tick, lc.ledger, lc.entry, each.txn_id))
        ints.append((own.index, own.ordinal, lc.index, lc.ordinal))
    long, short = (
        [pa.Array.from_buffers(kind, count, [None, data], offset=place * count) for place in range(width)]
        for kind, width, data in (
            (pa.int64(), 6, pa.py_buffer(np.array(longs, dtype=np.int64).T.tobytes())),
            (pa.int32(), 4, pa.py_buffer(np.array(ints, dtype=np.int32).T.tobytes())),
        )
    )
    arrays = [*long[:2], *short[:2], *long[2:5], *short[2:], long[5], *[_no_text(count)] * 2]
    return pa.RecordBatch.from_arrays(arrays, schema=OUTCOME_SCHEMA)


@lru_cache(maxsize=64)
def _no_text(count: int) -> pa.Array:
    return pa.repeat("", count)


_EMITTED: Final = np.array([Flag.EMITTED in (flags_of(member) or Flag.NONE) for member in TYPE_CODES])
"""For each type code, whether only the chain makes such messages."""
_ROLLBACK: Final = TYPE_CODES[MessageType.ROLLBACK_TXN]
"""The chain or a producer makes it."""


def _emitted(messages: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
    """Return which messages the chain emitted; None if none."""
    codes = messages.column("type").indices.to_numpy()
    emitted = _EMITTED[codes]
    rollbacks = codes == _ROLLBACK
    if rollbacks.any():
        emitted |= rollbacks & messages.column("detail").is_valid().to_numpy(zero_copy_only=False)
    return emitted if emitted.any() else None


_PLACES: Final = tuple(map(ROW_SCHEMA.get_field_index, OUTCOME_SCHEMA.names))


def _columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    count = rows.num_rows
    *arrays, reason, detail = [rows.column(place) for place in _PLACES]
    if reason.null_count == detail.null_count == count:
        arrays += [pa.repeat("", count)] * 2
    else:
        arrays += [pc.fill_null(column.cast(pa.utf8()), "") for column in (reason, detail)]
    return pa.RecordBatch.from_arrays(arrays, schema=OUTCOME_SCHEMA)
