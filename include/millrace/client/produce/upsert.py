"""Upserts by primary key: the delete of the old row and the insert of the new one become visible at one tick.

If the rows of a VChannel fit one message, they are sent as one Upsert message, which shares entries with others as an
insert does; otherwise as a transaction per VChannel. The Commit is sent only after the chain has accepted the whole
body: if a part of an upsert is refused (because its partition was dropped, for example), no other part may become
visible.

A PChannel whose open term runs an older chain version rejects upserts (UNSUPPORTED_TYPE). There, a transaction carries
deletes and inserts instead; the producer checks for a newer term after a while.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from millrace.base.errors import AppendRejected, AppendUnresolved, LogUnavailable, MillraceError, TransactionLost
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.channel_queue import CallSplitter, Piece
from millrace.client.produce.channel_sender import WaitingCall
from millrace.client.produce.rows import (
    Rows,
    conform,
    delete_message,
    insert_message,
    key_rows,
    last_of_each_key,
    split_keys,
    split_rows,
)
from millrace.client.produce.transaction import TXN_ENDED, MessageSender
from millrace.client.produce.written import Written
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.wal.reasons import Reason

TXN_BYTES: Final = 32 << 20
"""Bytes of rows in one transaction, far below the chain's ``max_txn_bytes``."""

LEASE_MS: Final = 60_000

CHAIN_RECHECK_SECONDS: Final = 60.0
"""Seconds for which a producer that met an older chain version avoids upsert messages."""


@dataclass(slots=True)
class _Part:
    """Rows of one VChannel that change at once."""

    vchannel: str
    pieces: list[tuple[int, pa.RecordBatch]]
    bytes: int = 0


class UpsertSender(MessageSender, Protocol):
    """The part of a producer that upserts need."""

    def run(self, call: WaitingCall, pieces: Sequence[Piece]) -> Written: ...


class Upserter:
    """The upserts of one producer."""

    def __init__(
        self, producer: UpsertSender, splitter: CallSplitter, pool: ThreadPoolExecutor, settings: Settings
    ) -> None:
        self._producer = producer
        self._splitter = splitter
        self._pool = pool
        self._attempts = settings.append_attempts
        self._older_until = 0.0

    def run(self, rows: Rows, collection: CollectionInfo, partition: str | None, partition_by: str | None) -> Written:
        """Upsert rows that are in memory, with PChannels in parallel; the first failure is raised at the end."""
        parts: list[_Part] | None = None
        cut: list[_Part] = []
        if time.monotonic() >= self._older_until:
            call = WaitingCall()
            upsert = MessageType.UPSERT
            pieces = None
            if partition_by is None:
                pieces = self._splitter.plain(call, upsert, collection, rows, partition)
            if pieces is None:
                parts = _parts(rows, collection, partition, partition_by)
                cut = [part for part in parts if len(part.pieces) > 1]
                pieces = [
                    self._splitter.piece(call, upsert, collection, part.vchannel, number, batch)
                    for part in parts
                    if len(part.pieces) == 1
                    for number, batch in part.pieces
                ]
            written = self._producer.run(call, pieces)
            if not self._older(written):
                written.checked()
                if cut:
                    written.add(self._transactions(cut, collection))
                return written
        # Repeating what took effect is harmless.
        return self._transactions(parts or _parts(rows, collection, partition, partition_by), collection)

    def _older(self, written: Written) -> bool:
        """Return whether a term rejected a message type that its chain version does not know."""
        found = any(each.reason == Reason.UNSUPPORTED_TYPE for each in written.rejections)
        if found:
            self._older_until = time.monotonic() + CHAIN_RECHECK_SECONDS
        return found

    def _transactions(self, parts: list[_Part], collection: CollectionInfo) -> Written:
        by_pchannel: dict[str, list[_Part]] = {}
        for part in parts:
            by_pchannel.setdefault(pchannel_of(part.vchannel), []).append(part)
        waiting = [self._pool.submit(self._all, parts, collection) for parts in by_pchannel.values()]
        written, failures = Written(), []
        for each in waiting:
            try:
                written.add(each.result())
            except MillraceError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return written

    def _all(self, parts: list[_Part], collection: CollectionInfo) -> Written:
        written = Written()
        for part in parts:
            written.add(self._repeated(part, collection))
        return written

    def _repeated(self, part: _Part, collection: CollectionInfo) -> Written:
        """Run a transaction, again if DDL, a flush or its lease ended it without effect."""
        for _ in range(self._attempts - 1):
            try:
                return self._once(part, collection)
            except TransactionLost:
                continue
        return self._once(part, collection)

    def _once(self, part: _Part, collection: CollectionInfo) -> Written:
        txn_id = secrets.randbits(62) + 1
        name, number = part.vchannel, collection.id
        upsert = time.monotonic() >= self._older_until
        body = [
            builders.begin_txn(txn_id, vchannel=name, collection_id=number, term=0, keepalive_ms=LEASE_MS),
            *([] if upsert else _deletes(part, collection, txn_id)),
            *(
                insert_message(rows, collection, vchannel=name, partition_id=partition, txn_id=txn_id, upsert=upsert)
                for partition, rows in part.pieces
            ),
        ]
        try:
            sent = self._producer.send(body, raise_rejected=False)
        except AppendUnresolved as error:
            raise LogUnavailable(
                f"the upsert on {name} has no effect, because its transaction was not committed ({error}): upsert again"
            ) from error
        if sent.rejections:
            rollback = builders.rollback_txn(txn_id, vchannel=name, collection_id=number, term=0)
            self._producer.send([rollback], raise_rejected=False)
            if upsert and self._older(sent):
                return self._once(part, collection)
            raise _lost(sent.rejections[0], name)
        try:
            commit = self._producer.send([builders.commit_txn(txn_id, vchannel=name, collection_id=number, term=0)])
        except AppendRejected as rejection:
            raise _lost(rejection, name) from rejection
        rows = sum(batch.num_rows for _, batch in part.pieces)
        return Written(len(body) + 1, rows, sent.bytes, commit.last_tick, results=commit.results)


def _deletes(part: _Part, collection: CollectionInfo, txn_id: int) -> list[MutableMessage]:
    keys = pa.Table.from_batches([rows.select(list(collection.schema.key_names)) for _, rows in part.pieces])
    return [
        delete_message(share, collection, vchannel=part.vchannel, txn_id=txn_id)
        for _, share in split_keys(key_rows(keys, collection), collection)
    ]


def _lost(rejection: AppendRejected, vchannel: str) -> AppendRejected:
    """Return the rejection, as TransactionLost if another transaction may succeed."""
    if rejection.reason not in TXN_ENDED:
        return rejection
    return TransactionLost(f"the upsert's transaction on {vchannel} ended: {rejection}", reason=rejection.reason)


def _parts(rows: Rows, collection: CollectionInfo, partition: str | None, partition_by: str | None) -> list[_Part]:
    found: list[_Part] = []
    table = last_of_each_key(conform(rows, collection), collection.schema.key_names)
    for vchannel, number, batch in split_rows(table, collection, partition, partition_by):
        if not found or found[-1].vchannel != vchannel or found[-1].bytes + batch.nbytes > TXN_BYTES:
            found.append(_Part(vchannel, []))
        found[-1].pieces.append((number, batch))
        found[-1].bytes += batch.nbytes
    return found
