"""Queues of a batch appender: calls, their pieces by VChannel and partition, and the messages that pieces share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import pyarrow as pa

from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import (
    ENTRY_BYTES,
    MESSAGE_BYTES,
    MESSAGE_ROWS,
    delete_message,
    insert_message,
    last_of_each_key,
)
from millrace.client.produce.sequencer import WINDOW, OutboundEntry
from millrace.client.produce.written import Written
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType


class PendingCall:
    """One call: its future, and how many of its pieces are not settled."""

    __slots__ = ("_left", "_lock", "future", "written")

    def __init__(self) -> None:
        self.future: Future[Written] = Future()
        self.future.set_running_or_notify_cancel()  # an append in flight cannot be cancelled
        self.written = Written()
        self._left = 0
        self._lock = threading.Lock()

    def expect(self, pieces: int) -> None:
        self._left = pieces
        if not pieces:
            self.future.set_result(self.written)

    def settle(self, take: Callable[[Written], None]) -> None:
        with self._lock:
            take(self.written)
            self._left -= 1
            done = not self._left
        if done:
            try:
                self.future.set_result(self.written)
            except InvalidStateError:
                pass  # it failed as unresolved before

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)


@dataclass(slots=True)
class Piece:
    """Rows (or keys) of one call for one VChannel and partition."""

    key: tuple[str, int, int, int, MessageType]
    collection: CollectionInfo
    rows: pa.RecordBatch
    bytes: int
    ticket: PendingCall
    enqueued_at: float


@dataclass(slots=True)
class ChannelQueue:
    """Pieces that wait for one PChannel, in order."""

    pieces: deque[Piece] = field(default_factory=deque)
    bytes: int = 0
    busy: bool = False


@dataclass(slots=True)
class EntryContents:
    """The pieces in each message of an OutboundEntry; released once."""

    pieces: list[list[Piece]]
    release: Callable[[int], None]
    released: bool = False

    def settle(self, sending: OutboundEntry) -> None:
        for place, pieces in enumerate(self.pieces):
            answer = sending.answers[place]
            for piece in pieces:
                rows, size = len(piece.rows), piece.bytes
                if answer is None:  # durable in the spool
                    piece.ticket.settle(lambda written, rows=rows: _spooled(written, rows))  # type: ignore[misc]
                else:
                    piece.ticket.settle(
                        lambda written, answer=answer, rows=rows, size=size: written.take(answer, rows=rows, size=size)  # type: ignore[misc]
                    )
        self._release()

    def fail(self, error: Exception) -> None:
        for pieces in self.pieces:
            for piece in pieces:
                piece.ticket.fail(error)
        self._release()

    def _release(self) -> None:
        if not self.released:
            self.released = True
            self.release(sum(piece.bytes for pieces in self.pieces for piece in pieces))


def _spooled(written: Written, rows: int) -> None:
    written.rows += rows
    written.spooled_rows += rows


def take_entry(queue: ChannelQueue) -> list[list[Piece]]:
    """Take pieces in order for one entry: by message the pieces that share it.

    The messages of a VChannel are next to each other.
    """
    by_vchannel: dict[str, list[list[Piece]]] = {}
    size = messages = 0
    while queue.pieces and size + queue.pieces[0].bytes <= max(ENTRY_BYTES, queue.pieces[0].bytes if not size else 0):
        piece = queue.pieces[0]
        mine = by_vchannel.setdefault(piece.key[0], [])
        if mine and _shares(mine[-1], piece):
            mine[-1].append(piece)
        elif len(mine) < WINDOW:
            mine.append([piece])
            messages += 1
        else:
            break
        queue.pieces.popleft()
        queue.bytes -= piece.bytes
        size += piece.bytes
    return [message for group in by_vchannel.values() for message in group]


def _shares(message: list[Piece], piece: Piece) -> bool:
    return (
        message[0].key == piece.key
        and sum(each.bytes for each in message) + piece.bytes <= MESSAGE_BYTES
        and sum(len(each.rows) for each in message) + len(piece.rows) <= MESSAGE_ROWS
    )


def to_outbound_entry(taken: list[list[Piece]], release: Callable[[int], None]) -> OutboundEntry:
    carried = EntryContents(taken, release)
    return OutboundEntry([_message(pieces) for pieces in taken], on_settled=carried.settle, context=carried)


def _message(pieces: list[Piece]) -> MutableMessage:
    first = pieces[0]
    vchannel, _, partition, _, kind = first.key
    rows = first.rows if len(pieces) == 1 else pa.concat_batches([each.rows for each in pieces])
    if kind is MessageType.DELETE:
        return delete_message(rows, first.collection, vchannel=vchannel, partition_id=partition)
    upsert = kind is MessageType.UPSERT
    schema = first.collection.schema
    if (upsert or schema.replaces_duplicates) and len(pieces) > 1:
        table = last_of_each_key(pa.Table.from_batches([rows]), schema.key_names)
        rows = table.combine_chunks().to_batches()[0]
    return insert_message(rows, first.collection, vchannel=vchannel, partition_id=partition, upsert=upsert)
