"""Rows of the ``wal`` table from decided runs and emitted messages, in id order; and the reverse, for replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.columns import MessageColumns, integer_array, principal_array, string_array
from millrace.message.header import NUMERIC_FIELDS
from millrace.message.ids import MessageId
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_columns
from millrace.wal.message_run import (
    ACCEPTED,
    REASONS,
    DecidedBatch,
    DecidedMessage,
    Emission,
    MessageRun,
    dml_mask,
    payload_sizes,
    reason_code,
)
from millrace.wal.reasons import Reason
from millrace.wal.schema import ROW_SCHEMA, complete_rows
from millrace.wal.versions import CHAIN_VERSION

_TYPES: Final = tuple(MessageType)
_TYPE_NAMES: Final = string_array(member.name for member in _TYPES)
TYPE_CODES: Final = {member: code for code, member in enumerate(_TYPES)}
"""Dictionary code of each type in the column ``type`` of a chain's rows."""
_REASON_NAMES: Final = string_array(reason.value for reason in REASONS)
_TYPE_INDEX: Final = np.zeros(1 << 16, dtype=np.int32)
_TYPE_INDEX[[member.value for member in _TYPES]] = np.arange(len(_TYPES), dtype=np.int32)

EMPTY_ROWS: Final = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in ROW_SCHEMA], schema=ROW_SCHEMA)
"""A batch without rows."""

_UNSUPPORTED: Final = reason_code(Reason.UNSUPPORTED_TYPE)
_COPIED: Final = ("ledger", "entry", "index", "physical_ms", *NUMERIC_FIELDS)
_CONFIRMED: Final = ("ledger", "entry", "index", "ordinal")
_NAMES: Final = tuple(ROW_SCHEMA.names)


@dataclass(slots=True)
class _Piece:
    """Rows of one step of the chain: a run's messages, or one emitted message (then `emission` is set)."""

    start: int
    count: int
    ordinal: int
    tick: npt.NDArray[np.int64]
    reason: npt.NDArray[np.uint8]
    segment: npt.NDArray[np.int64]
    type: npt.NDArray[np.uint16]
    confirmed: MessageId | None
    details: dict[int, str]
    emission: Emission | None = None
    term: int = 0


class WalRowBuilder:
    """Collects the chain's decisions about `columns` and builds ROW_SCHEMA batches."""

    def __init__(self, columns: MessageColumns) -> None:
        self.columns = columns
        self._pieces: list[_Piece] = []

    def add_run(self, run: MessageRun, *, ordinal: int, confirmed: MessageId | None) -> None:
        """Add a decided and stamped run. Its first message has `ordinal`, the others 0.

        `confirmed` is the first open Begin, if any.
        """
        details = {place: words for place, words in run.details.items() if place < run.count and run.reason[place]}
        self._pieces.append(
            _Piece(run.start, run.count, ordinal, run.tick, run.reason, run.segment, run.type, confirmed, details)
        )

    def add_emitted(
        self, emission: Emission, *, cause: int, ordinal: int, tick: int, term: int, confirmed: MessageId | None
    ) -> None:
        """Add a message that the chain emitted because of message `cause` of the batch."""
        segment = tick if emission.type is MessageType.CREATE_SEGMENT else emission.segment_id
        details = {} if emission.detail is None else {0: emission.detail}
        self._pieces.append(
            _Piece(
                cause,
                1,
                ordinal,
                np.array([tick]),
                np.zeros(1, dtype=np.uint8),
                np.array([segment]),
                np.array([emission.type], dtype=np.uint16),
                confirmed,
                details,
                emission,
                term,
            )
        )

    def build(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return accepted and emitted messages, and rejections: two ROW_SCHEMA batches, each in id order."""
        pieces, columns = self._pieces, self.columns
        if not pieces:
            return EMPTY_ROWS, EMPTY_ROWS
        source = self._source()
        values: dict[str, npt.NDArray[Any]] = {name: getattr(columns, name)[source] for name in _COPIED}
        values["type"] = _TYPE_INDEX[np.concatenate([piece.type for piece in pieces])]
        values["vchannel"] = columns.vchannel[source]
        principal = None if columns.principal is None else columns.principal[source]
        values["time_tick"] = np.concatenate([piece.tick for piece in pieces])
        values["segment_id"] = np.concatenate([piece.segment for piece in pieces])
        reason = np.concatenate([piece.reason for piece in pieces])
        starts = np.cumsum([0, *(piece.count for piece in pieces)])
        values["ordinal"] = np.zeros(len(reason), dtype=np.int32)
        values["ordinal"][starts[:-1]] = [piece.ordinal for piece in pieces]
        names = list(columns.names)
        payloads = self._payloads()
        details: dict[int, str] = {}
        for piece, start in zip(pieces, starts.tolist(), strict=False):
            details.update({start + place: words for place, words in piece.details.items()})
            if piece.emission is not None:
                _overwrite(values, start, piece, names)
                if principal is not None:
                    principal[start] = -1  # a copy: with an emission, `source` is no slice
        rejected = reason != ACCEPTED
        some = bool(rejected.any())
        if some:
            # A version without upserts did not know the name of the type either: an old log must give the same rows
            # as then.
            nameless = (reason == _UNSUPPORTED) & (values["type"] == TYPE_CODES[MessageType.UPSERT])
            values["type"][nameless] = TYPE_CODES[MessageType.UNDEFINED]
        plain = {name: integer_array(each) for name, each in values.items()}
        plain |= self._confirmed(values, reason, starts) or {"lc_" + name: plain[name] for name in _CONFIRMED}
        codes = pa.array(reason.astype(np.int32) - 1, mask=~rejected) if some else pa.nulls(len(reason), pa.int32())
        arrays = plain | {
            "type": pa.DictionaryArray.from_arrays(plain["type"], _TYPE_NAMES, safe=False),
            "vchannel": pa.DictionaryArray.from_arrays(plain["vchannel"], pa.array(names, pa.utf8()), safe=False),
            "reason": pa.DictionaryArray.from_arrays(codes, _REASON_NAMES, safe=False),
            "detail": _words(details, len(reason)),
            "payload": payloads,
            "principal": principal_array(principal, columns.principals, len(reason)),
        }
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in _NAMES], schema=ROW_SCHEMA)
        if not some:
            return batch, EMPTY_ROWS
        return batch.filter(pa.array(~rejected)), batch.filter(pa.array(rejected))

    def _source(self) -> npt.NDArray[np.intp] | slice:
        """Return the batch indices of the rows. Messages that were judged together are a slice, without a copy."""
        if len(self._pieces) == 1 and self._pieces[0].emission is None:
            return slice(self._pieces[0].start, self._pieces[0].start + self._pieces[0].count)
        return np.concatenate([np.arange(piece.start, piece.start + piece.count) for piece in self._pieces])

    def _payloads(self) -> pa.LargeBinaryArray:
        """Return the payloads of all rows: a view if nothing was emitted, else one copy."""
        parts: list[pa.LargeBinaryArray] = []
        start = stop = 0
        for piece in self._pieces:
            if piece.emission is None and piece.start == stop:
                stop += piece.count
                continue
            parts.append(self.columns.payloads.slice(start, stop - start))
            if piece.emission is None:
                start, stop = piece.start, piece.start + piece.count
            else:
                parts.append(pa.array([piece.emission.payload], pa.large_binary()))
                start = stop
        parts.append(self.columns.payloads.slice(start, stop - start))
        parts = [part for part in parts if len(part)]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def _confirmed(
        self, values: dict[str, npt.NDArray[Any]], reason: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp]
    ) -> dict[str, pa.Array] | None:
        """Return the columns of LastConfirmed; None if each message is its own: no transaction was open."""
        if all(piece.confirmed is None for piece in self._pieces):
            return None
        held = {name: values[name].copy() for name in _CONFIRMED}
        for piece, start in zip(self._pieces, starts.tolist(), strict=False):
            if piece.confirmed is not None:
                rows = start + np.flatnonzero(reason[start : start + piece.count] == ACCEPTED)
                for name, value in zip(_CONFIRMED, piece.confirmed, strict=True):
                    held[name][rows] = value
        return {"lc_" + name: integer_array(each) for name, each in held.items()}


def rows_of_accepted(
    entries: pa.RecordBatch, messages: Sequence[DecidedMessage], confirmed: MessageId | None
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the rows of entries (ENTRY_SCHEMA) with one message each, all accepted, as :meth:`WalRowBuilder.build`."""
    builder = WalRowBuilder(decode_columns(entries))
    count = len(messages)
    builder.add_run(
        MessageRun(
            columns=builder.columns,
            start=0,
            count=count,
            type=np.array([each.type for each in messages], dtype=np.uint16),
            reason=np.zeros(count, dtype=np.uint8),
            tick=np.array([each.tick for each in messages], dtype=np.int64),
            segment=np.array([each.segment_id for each in messages], dtype=np.int64),
        ),
        ordinal=0,
        confirmed=confirmed,
    )
    return builder.build()


def _words(details: dict[int, str], count: int) -> pa.Array:
    """Return the texts of rejections by row; null for other rows."""
    if not details:
        return pa.nulls(count, pa.utf8())
    return pa.array([details.get(row) for row in range(count)], pa.utf8())


def _overwrite(values: dict[str, npt.NDArray[Any]], row: int, piece: _Piece, names: list[str]) -> None:
    """Overwrite an emitted message's row: id and stamp come from its cause, everything else is its own."""
    emission = piece.emission
    assert emission is not None
    if emission.vchannel not in names:
        names.append(emission.vchannel)
    values["vchannel"][row] = names.index(emission.vchannel)
    for name in NUMERIC_FIELDS:
        values[name][row] = getattr(emission, name)
    values["term"][row] = piece.term


def rows_in_order(messages: pa.RecordBatch | pa.Table, rejections: pa.RecordBatch | pa.Table) -> pa.Table:
    """Return messages and rejections of one PChannel as one table in id order (`reason` is null for messages)."""
    table = pa.concat_tables([_plain(messages), _plain(rejections)])
    return table.sort_by([(name, "ascending") for name in ("ledger", "entry", "index", "ordinal", "time_tick")])


def _plain(batch: pa.RecordBatch | pa.Table) -> pa.Table:
    """Return the rows without dictionaries, which Parquet readers may or may not return."""
    table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
    plain = [
        pa.field(field.name, field.type.value_type, field.nullable) if pa.types.is_dictionary(field.type) else field
        for field in ROW_SCHEMA
    ]
    return complete_rows(table).cast(pa.schema(plain))


def iter_decided(table: pa.Table) -> Iterator[DecidedBatch | DecidedMessage]:
    """Yield rows in id order as evolve needs them: slices of row changes and rejections, other messages one by one."""
    for batch in table.combine_chunks().to_batches():
        yield from _decided(batch)


def _decided(batch: pa.RecordBatch) -> Iterator[DecidedBatch | DecidedMessage]:
    def view(name: str) -> npt.NDArray[Any]:
        return batch.column(name).to_numpy(zero_copy_only=False)

    vchannel = pc.dictionary_encode(batch.column("vchannel"))
    reason = pc.index_in(batch.column("reason"), _REASON_NAMES).fill_null(-1).to_numpy(zero_copy_only=False) + 1
    types = np.array([member.value for member in _TYPES], dtype=np.uint16)[
        pc.index_in(batch.column("type"), _TYPE_NAMES).to_numpy(zero_copy_only=False)
    ]
    whole = DecidedBatch(
        type=types,
        vchannel=vchannel.indices.to_numpy(zero_copy_only=False),
        names=vchannel.dictionary.to_pylist(),
        tick=view("time_tick"),
        ledger=view("ledger"),
        entry=view("entry"),
        index=view("index"),
        ordinal=view("ordinal"),
        segment_id=view("segment_id"),
        **{name: view(name) for name in NUMERIC_FIELDS},
        size=payload_sizes(batch.column("payload")),
        reason=reason.astype(np.uint8),
    )
    alone = np.flatnonzero(~dml_mask(CHAIN_VERSION)[types] & (whole.reason == ACCEPTED)).tolist()
    start = 0
    for row in [*alone, len(whole)]:
        if row > start:
            yield slice_decided(whole, start, row)
        if row < len(whole):
            yield _row(batch, whole, row)
        start = row + 1


def slice_decided(rows: DecidedBatch, start: int, stop: int) -> DecidedBatch:
    """Return rows start .. stop - 1."""
    own = {name: getattr(rows, name)[start:stop] for name in ("tick", "ordinal", "segment_id", "reason")}
    return DecidedBatch(**rows.slice_arrays(start, stop), **own)


def _row(batch: pa.RecordBatch, rows: DecidedBatch, row: int) -> DecidedMessage:
    detail, payload = batch.column("detail")[row].as_py(), batch.column("payload")[row].as_py() or b""
    stamps = (int(rows.tick[row]), int(rows.ordinal[row]), int(rows.segment_id[row]), len(payload), detail, payload)
    values: tuple[Any, ...] = (
        MessageType(int(rows.type[row])),
        rows.vchannel_name(row),
        *rows.header_numbers(row),
        *stamps,
    )
    return DecidedMessage(*values)
