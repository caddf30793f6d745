"""Calls that wait for a PChannel: their pieces in order, and the entries and messages that pieces share.

A call is split into pieces, one for each VChannel and partition. Pieces of different calls for the same destination
share a message: one conversion, one verdict. Each call counts its own rows.

A verdict is about a message, and a refusal about an entry, so both may be the fault of one call among several. The
calls of a rejected message or a refused entry are therefore sent again, each alone, if the verdict depends on what they
carry: TOO_LARGE, MALFORMED, WRONG_VCHANNEL, DUPLICATE_KEY, SCHEMA_MISMATCH, CHECK_VIOLATED, and a refusal of
permission. A rejection has no effect, and new numbers are used, so this is safe; a row that fails then fails its own
call. All other reasons hold for each call alike (the collection or partition was dropped, the producer is fenced, the
chain is older), or are those of a transaction, which shares nothing.

Two exceptions. An entry whose first answer was lost is never sent again under new numbers. And calls of a ``batch()``,
whose callers do not wait, share the verdict of their message if later calls of the batch for the same VChannel took
effect or are being sent: nothing overtakes an earlier call.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pyarrow as pa

from millrace.base.errors import AppendDenied, AppendRejected, AppendUnresolved
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.plain_rows import FEW_ROWS, PlainRow, PlainRows, last_of_keys
from millrace.client.produce.rows import (
    ENTRY_BYTES,
    MAX_ENTRY_MESSAGES,
    MESSAGE_BYTES,
    MESSAGE_ROWS,
    Keys,
    Rows,
    conform,
    delete_message,
    group_messages,
    insert_message,
    key_rows,
    last_of_each_key,
    partition_id,
    partition_of,
    split_keys,
    split_rows,
)
from millrace.client.produce.sequencer import WINDOW, OutboundEntry
from millrace.client.produce.written import Written
from millrace.message.ids import pchannel_of
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.wal.reasons import Reason

_OWN_FAULT: Final = frozenset(
    {
        Reason.TOO_LARGE,
        Reason.MALFORMED,
        Reason.WRONG_VCHANNEL,
        Reason.DUPLICATE_KEY,
        Reason.SCHEMA_MISMATCH,
        Reason.CHECK_VIOLATED,
    }
)
"""Reasons that depend on what a message or entry carries."""

_IN_TRANSACTION: Final = (
    "the log cannot be reached, and whether it has the newest messages of this transaction is unknown: the spool sends"
    " them again, and the transaction ends with its lease"
)

_MAX_DESTINATIONS: Final = 10_000


class Call(ABC):
    """One caller's call: what became of its pieces so far. Subclasses say how the caller learns that it ended."""

    __slots__ = ("ended", "error", "left", "written")

    series: object = None
    """The series that it shares with calls that may be sent before it has ended; None if its caller waits for it."""

    waits = False
    """Whether a thread waits for it: it is held (AppendUnresolved) while the log is unreachable, and not queued."""

    def __init__(self) -> None:
        self.written = Written()
        self.error: BaseException | None = None
        self.left = 0
        """Pieces that are not settled."""
        self.ended = False

    @abstractmethod
    def finish(self) -> Callable[[], None] | None:
        """Tell the caller that it has `ended`. Called once.

        Returns what is still to call, once for all calls that end together.
        """

    def result(self) -> Written:
        """Return the outcome. Raises its error."""
        if self.error is not None:
            raise self.error
        return self.written


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """The destination of a message. Pieces of one destination share messages."""

    pchannel: str
    vchannel: str
    collection: CollectionInfo
    partition: int
    kind: MessageType
    plain: PlainRows | None

    @property
    def replaces(self) -> bool:
        """Whether no key may occur twice in a message."""
        return self.kind is MessageType.UPSERT or (
            self.kind is MessageType.INSERT and self.collection.schema.replaces_duplicates
        )


PieceRows: TypeAlias = pa.RecordBatch | list[PlainRow] | MutableMessage


@dataclass(slots=True)
class Piece:
    """Rows (or keys) of one call for one destination, or a message that was built already."""

    destination: Destination | None
    """None for a message."""
    rows: PieceRows
    count: int
    bytes: int
    call: Call
    entry: object = None
    """Pieces with the same object here travel in an entry of their own."""


class CallSplitter:
    """Splits calls into pieces. Thread-safe."""

    def __init__(self) -> None:
        self._plain: dict[tuple[int, int], PlainRows | None] = {}
        self._destinations: dict[tuple[str, int, int, int, MessageType], Destination] = {}

    def rows(
        self,
        call: Call,
        kind: MessageType,
        collection: CollectionInfo,
        rows: Rows,
        partition: str | None,
        partition_by: str | None,
    ) -> list[Piece]:
        """Return the pieces of an insert or upsert. Raises InvalidArgument, CheckViolated."""
        found = None if partition_by is not None else self.plain(call, kind, collection, rows, partition)
        if found is not None:
            return found
        table = self._table(rows, collection)
        if kind is MessageType.UPSERT:
            table = last_of_each_key(table, collection.schema.key_names)
        return [
            self.piece(call, kind, collection, vchannel, number, part)
            for vchannel, number, part in split_rows(table, collection, partition, partition_by)
        ]

    def plain(
        self, call: Call, kind: MessageType, collection: CollectionInfo, rows: Rows, partition: str | None
    ) -> list[Piece] | None:
        """Return the pieces of a few plain rows, as they are; None if they are many or not plain."""
        if not isinstance(rows, list | tuple) or not 0 < len(rows) <= FEW_ROWS:
            return None
        plain, homes = self._plain_of(collection), len(collection.vchannels)
        if plain is None or not (homes == 1 or plain.hashes_keys) or (taken := plain.take(rows)) is None:
            return None
        number = partition_of(collection, partition)
        if len(taken) == 1:
            home = plain.key_hash(taken[0]) % homes if homes > 1 else 0
            to = self._destination(kind, collection, collection.vchannels[home], number)
            return [Piece(to, taken, 1, plain.size(taken[0]), call)]
        if kind is MessageType.UPSERT or collection.schema.replaces_duplicates:
            taken = last_of_keys(taken, plain.key_of)
        shares: dict[int, list[PlainRow]] = {}
        for row in taken:
            shares.setdefault(plain.key_hash(row) % homes if homes > 1 else 0, []).append(row)
        return [
            Piece(
                self._destination(kind, collection, collection.vchannels[home], number),
                share,
                len(share),
                sum(map(plain.size, share)),
                call,
            )
            for home, share in sorted(shares.items())
        ]

    def keys(self, call: Call, collection: CollectionInfo, keys: Keys, partition: str | None) -> list[Piece]:
        """Return the pieces of a delete; partition None: of all partitions. Raises InvalidArgument."""
        found = key_rows(keys, collection)
        number = 0 if partition is None else partition_id(collection, partition)
        return [
            self.piece(call, MessageType.DELETE, collection, vchannel, number, part)
            for vchannel, part in split_keys(found, collection)
        ]

    def piece(
        self,
        call: Call,
        kind: MessageType,
        collection: CollectionInfo,
        vchannel: str,
        partition: int,
        rows: pa.RecordBatch,
    ) -> Piece:
        """Return a piece of rows (or keys) that are Arrow already."""
        to = self._destination(kind, collection, vchannel, partition)
        return Piece(to, rows, rows.num_rows, rows.nbytes, call)

    def _table(self, rows: Rows, collection: CollectionInfo) -> pa.Table:
        if isinstance(rows, list | tuple) and rows:
            plain = self._plain_of(collection)
            found = None if plain is None else plain.table(rows)
            if found is not None:
                return found
        return conform(rows, collection)

    def _plain_of(self, collection: CollectionInfo) -> PlainRows | None:
        key = (collection.id, len(collection.schemas))
        try:
            return self._plain[key]
        except KeyError:
            if len(self._plain) >= _MAX_DESTINATIONS:
                self._plain.clear()
            found = self._plain[key] = PlainRows.of(collection.schema)
            return found

    def _destination(self, kind: MessageType, collection: CollectionInfo, vchannel: str, partition: int) -> Destination:
        key = (vchannel, collection.id, partition, len(collection.schemas), kind)
        try:
            return self._destinations[key]
        except KeyError:
            if len(self._destinations) >= _MAX_DESTINATIONS:
                self._destinations.clear()
            plain = self._plain_of(collection)
            found = Destination(pchannel_of(vchannel), vchannel, collection, partition, kind, plain)
            self._destinations[key] = found
            return found


def message_pieces(call: Call, messages: Iterable[MutableMessage]) -> list[Piece]:
    """Return the pieces of messages for one PChannel, which share entries with no other call.

    They are sorted by VChannel, so that each VChannel's share of an entry is one result for the chain to remember.
    """
    given = list(messages)
    order = {name: place for place, name in enumerate(dict.fromkeys(message.vchannel for message in given))}
    found: list[Piece] = []
    for group in group_messages(sorted(given, key=lambda each: order[each.vchannel])):
        entry = object()
        found += [Piece(None, message, message.rows, len(message.payload), call, entry) for message in group]
    return found


@dataclass(slots=True)
class _OpenMessage:
    """A message of an entry that is being filled."""

    pieces: list[Piece]
    destination: Destination
    rows: int
    bytes: int

    def takes(self, piece: Piece) -> bool:
        return (
            self.destination is piece.destination
            and self.bytes + piece.bytes <= MESSAGE_BYTES
            and self.rows + piece.count <= MESSAGE_ROWS
            # A call's pieces for one destination are as large as messages are; the same call makes the same messages.
            and self.pieces[-1].call is not piece.call
        )

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.rows += piece.count
        self.bytes += piece.bytes


@dataclass(slots=True)
class ChannelQueue:
    """Pieces that wait for one PChannel, in order."""

    pieces: deque[Piece] = field(default_factory=deque)
    bytes: int = 0

    def add(self, pieces: Sequence[Piece]) -> None:
        self.pieces += pieces
        for piece in pieces:
            self.bytes += piece.bytes

    def put_back(self, pieces: Sequence[Piece]) -> None:
        """Put pieces before all others."""
        self.pieces.extendleft(reversed(pieces))
        self.bytes += sum(piece.bytes for piece in pieces)

    def remove(self, unwanted: Iterable[Call]) -> list[Piece]:
        """Remove and return the pieces of these calls."""
        calls = {id(call) for call in unwanted}
        found = [piece for piece in self.pieces if id(piece.call) in calls]
        if found:
            self.pieces = deque(piece for piece in self.pieces if id(piece.call) not in calls)
            self.bytes -= sum(piece.bytes for piece in found)
        return found

    def take(self) -> list[list[Piece]]:
        """Take pieces in order for one entry: by message the pieces that share it.

        The messages of a VChannel are next to each other.
        """
        first = self.pieces[0]
        if first.entry is not None:
            own: list[list[Piece]] = []
            while self.pieces and self.pieces[0].entry is first.entry:
                own.append([self._pop()])
            return own
        by_vchannel: dict[str, list[_OpenMessage]] = {}
        size = messages = 0
        while self.pieces and messages < MAX_ENTRY_MESSAGES:
            piece = self.pieces[0]
            to = piece.destination
            if to is None or piece.entry is not None or (size and size + piece.bytes > ENTRY_BYTES):
                break
            mine = by_vchannel.setdefault(to.vchannel, [])
            if mine and mine[-1].takes(piece):
                mine[-1].add(piece)
            elif len(mine) < WINDOW or piece.call is first.call:
                mine.append(_OpenMessage([piece], to, piece.count, piece.bytes))
                messages += 1
            else:
                break
            size += self._pop().bytes
        return [message.pieces for group in by_vchannel.values() for message in group]

    def _pop(self) -> Piece:
        piece = self.pieces.popleft()
        self.bytes -= piece.bytes
        return piece


@dataclass(slots=True, eq=False)
class EntryContents:
    """The pieces in each message of an entry; `settling` guards the calls, which may have pieces in other entries."""

    messages: list[list[Piece]]
    settling: threading.Lock
    done: bool = False

    def outbound(self) -> OutboundEntry:
        """Convert the pieces. Returns the entry, whose `context` is this object."""
        return OutboundEntry([_message(pieces) for pieces in self.messages], context=self)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self.messages for piece in pieces]

    def settle(self, sending: OutboundEntry, in_flight: Iterable[EntryContents] = ()) -> list[Piece]:
        """Count the entry's outcomes for its calls, and end those that are complete.

        `in_flight`: what was taken after it. Returns the pieces to send again, each alone.
        """
        if self.done:
            return []
        self.done = True
        complete: list[Call] = []
        again: list[Piece] = []
        with self.settling:
            for place, (pieces, answer) in enumerate(zip(self.messages, sending.answers, strict=True)):
                repeats = isinstance(answer, AppendRejected) and self._repeats(sending, pieces, answer)
                passed = self._passed(sending, place, in_flight) if repeats else ()
                for piece in pieces:
                    call = piece.call
                    if call.ended:
                        continue  # it failed before
                    if repeats and (call.series is None or call.series not in passed):
                        again.append(piece)
                        continue
                    if answer is None:  # durable in the spool
                        if isinstance(piece.rows, MutableMessage) and piece.rows.txn_id:
                            call.error = AppendUnresolved(_IN_TRANSACTION)
                        call.written.rows += piece.count
                        call.written.spooled_rows += piece.count
                    else:
                        call.written.take(answer, rows=piece.count, size=piece.bytes)
                        if isinstance(answer, AppendRejected) and isinstance(piece.rows, MutableMessage):
                            call.written.refused.append((piece.rows, answer))
                    call.left -= 1
                    if not call.left:
                        call.ended = True
                        complete.append(call)
        finish_calls(complete)
        for piece in again:
            piece.entry = object()
        return again

    def _repeats(self, sending: OutboundEntry, pieces: Sequence[Piece], answer: AppendRejected) -> bool:
        """Return whether a verdict may concern another call than that of a piece, and none of them took effect."""
        if pieces[0].destination is None:
            return False
        if isinstance(answer, AppendDenied) or answer.reason == Reason.TOO_LARGE:  # perhaps of the whole entry
            if sending.ambiguous:
                return False  # of a repeat alone: the first attempt may be in the log
            pieces = self.pieces
        elif answer.reason not in _OWN_FAULT:
            return False
        return any(piece.call is not pieces[0].call for piece in pieces)

    def _passed(self, sending: OutboundEntry, place: int, in_flight: Iterable[EntryContents]) -> Collection[object]:
        """Return the series of later calls for the VChannel of message `place` that took or may take effect."""
        after = [
            pieces
            for pieces, answer in zip(self.messages[place + 1 :], sending.answers[place + 1 :], strict=True)
            if not isinstance(answer, AppendRejected)
        ]
        after += [pieces for each in in_flight for pieces in each.messages]
        to = self.messages[place][0].destination
        return {
            piece.call.series
            for pieces in after
            for piece in pieces
            if to is None or piece.destination is None or piece.destination.vchannel == to.vchannel
        }

    def fail(self, error: BaseException) -> None:
        """Fail the pieces."""
        self.done = True
        fail_pieces(self.pieces, error, self.settling)


def fail_pieces(pieces: Iterable[Piece], error: BaseException, settling: threading.Lock) -> None:
    """End pieces with `error`, which is raised by their calls once these have ended."""
    complete: list[Call] = []
    with settling:
        for piece in pieces:
            call = piece.call
            if call.ended:
                continue
            call.error = call.error or error
            call.left -= 1
            if not call.left:
                call.ended = True
                complete.append(call)
    finish_calls(complete)


def finish_calls(calls: Iterable[Call]) -> None:
    """Tell the callers of calls that ended together."""
    for each in {call.finish(): None for call in calls}:
        if each is not None:
            each()


def _message(pieces: Sequence[Piece]) -> MutableMessage:
    first = pieces[0]
    to = first.destination
    if to is None:
        assert isinstance(first.rows, MutableMessage)
        return first.rows
    rows = _joined(pieces, to)
    if to.kind is MessageType.DELETE:
        return delete_message(rows, to.collection, vchannel=to.vchannel, partition_id=to.partition)
    return insert_message(
        rows,
        to.collection,
        vchannel=to.vchannel,
        partition_id=to.partition,
        upsert=to.kind is MessageType.UPSERT,
    )


def _joined(pieces: Sequence[Piece], to: Destination) -> pa.RecordBatch:
    """Return the rows of all pieces, converted once; of a key that may occur once, the last row."""
    parts: list[pa.RecordBatch] = []
    plain: list[PlainRow] = []
    for piece in pieces:
        if isinstance(piece.rows, list):
            plain += piece.rows
            continue
        if plain:
            parts.append(_converted(plain, to))
            plain = []
        assert isinstance(piece.rows, pa.RecordBatch)
        parts.append(piece.rows)
    if plain:
        parts.append(_converted(plain, to))
    if len(parts) == 1:
        # A call's own rows have each key once; the plain rows of several calls have it now.
        return parts[0]
    rows = pa.concat_batches(parts)
    if to.replaces:
        table = last_of_each_key(pa.Table.from_batches([rows]), to.collection.schema.key_names)
        return table.combine_chunks().to_batches()[0]
    return rows


def _converted(rows: list[PlainRow], to: Destination) -> pa.RecordBatch:
    assert to.plain is not None
    if to.replaces and len(rows) > 1:
        rows = last_of_keys(rows, to.plain.key_of)
    return to.plain.batch(rows)
