"""A producer: rows and keys in, durable and judged messages out, each with one effect however often it is sent.

Rows go to the VChannel of their primary key; the messages for one PChannel travel in entries of a few MiB. Every message
carries (producer id, epoch, sequence), so that a retry after an ambiguous failure, with the same sequences, has no second
effect and gets the first one's result (law 8). A PChannel's messages are sent one call at a time and keep their order.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.coord.store import Collection, pchannel_of
from millrace.errors import AppendRejected, InvalidArgument, MillraceError
from millrace.message import builders
from millrace.message.keys import vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.wire import encode_entry
from millrace.node.append_host_outcome import AppendOutcome, AppendResult
from millrace.settings import Settings
from millrace.wal.reasons import Reason

MESSAGE_BYTES: Final = 1 << 20
"""Rows are cut into messages of about this size."""

ENTRY_BYTES: Final = 4 << 20
"""Messages of one PChannel are framed into entries of about this size."""

MESSAGE_ROWS: Final = 65_536
MAX_ENTRY_MESSAGES: Final = 1_000


class Appender(Protocol):
    """What a producer needs of an append host's client."""

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome: ...


class Terms(Protocol):
    """Who knows the open term of a PChannel and the epochs of producers: the coordinator."""

    def term(self, pchannel: str) -> int: ...

    def next_epoch(self, producer_id: int) -> int: ...


@dataclass(slots=True)
class Written:
    """What one call came to: messages and rows that were sent, and those among them that were rejected."""

    messages: int = 0
    rows: int = 0
    bytes: int = 0
    last_tick: int = 0
    rejections: list[AppendRejected] = field(default_factory=list)
    rejected_rows: int = 0
    rejected_by_reason: Counter[str] = field(default_factory=Counter)
    """`rejected_rows`, by reason."""
    results: list[AppendResult] = field(default_factory=list)

    def add(self, other: Written) -> None:
        self.messages += other.messages
        self.rows += other.rows
        self.bytes += other.bytes
        self.last_tick = max(self.last_tick, other.last_tick)
        self.rejections += other.rejections
        self.rejected_rows += other.rejected_rows
        self.rejected_by_reason += other.rejected_by_reason
        self.results += other.results


@dataclass(slots=True)
class _Lane:
    """One PChannel as this producer sees it: its term, and the next sequence of each VChannel."""

    term: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    sequences: dict[str, int] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)


class Producer:
    """An idempotent producer. Thread-safe; calls to different PChannels go on at once.

    With a `producer_id` of the caller's it takes over: a new epoch begins, and an older producer of that id is fenced
    (PRODUCER_FENCED). Without one the id is random.
    """

    def __init__(self, append: Appender, terms: Terms, settings: Settings, *, producer_id: int | None = None) -> None:
        self._append = append
        self._terms = terms
        self._settings = settings
        self.id = producer_id if producer_id is not None else secrets.randbits(62) + 1
        self._epoch = 1 if producer_id is None else terms.next_epoch(producer_id)
        self._lanes: dict[str, _Lane] = {}
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="producer")

    def close(self) -> None:
        self._pool.shutdown()

    def insert(
        self,
        collection: Collection,
        rows: pa.RecordBatch | pa.Table,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        raise_rejected: bool = True,
    ) -> Written:
        """Append `rows` (columns of the collection's schema, cast where that loses nothing).

        They go to `partition`, to the partition that the column `partition_by` names, or to the collection's only one.
        Raises AppendRejected for the first rejected message, or gives all of them in the result where `raise_rejected` is
        False; InvalidArgument for rows that do not fit the schema or a partition that is not there.
        """
        table = conform(rows, collection)
        messages = [
            builders.insert(part, vchannel=vchannel, collection_id=collection.id, partition_id=partition_id, term=0,
                            schema_version=collection.schema_version)
            for vchannel, partition_id, part in split_rows(table, collection, partition, partition_by)
        ]  # fmt: skip
        return self.send(messages, raise_rejected=raise_rejected)

    def delete(
        self,
        collection: Collection,
        keys: pa.Array | pa.ChunkedArray | Sequence[int] | Sequence[str],
        *,
        partition: str | None = None,
        raise_rejected: bool = True,
    ) -> Written:
        """Delete rows by primary key, in `partition` or in all; a key without a row is no error."""
        key_type = collection.schema.key_arrow().field(0).type
        array = pa.array(keys, key_type) if not isinstance(keys, pa.Array | pa.ChunkedArray) else keys.cast(key_type)
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        homes = vchannel_index(array, len(collection.vchannels))
        messages = [
            builders.delete(
                array.take(pa.array(np.flatnonzero(homes == home))),
                schema=collection.schema,
                vchannel=collection.vchannels[home],
                collection_id=collection.id,
                partition_id=0 if partition is None else _partition_id(collection, partition),
                schema_version=collection.schema_version,
                term=0,
            )
            for home in np.unique(homes).tolist()
        ]
        return self.send(messages, raise_rejected=raise_rejected)

    @contextmanager
    def transaction(
        self, collection: Collection, *, vchannel: int = 0, keepalive_ms: int | None = None
    ) -> Iterator[Transaction]:
        """Inserts and deletes on one VChannel that become visible together at the end of the block, or never.

        An exception inside the block rolls back and goes on. Raises AppendRejected where the commit was refused.
        """
        name = collection.vchannels[vchannel]
        txn = Transaction(self, collection, name, secrets.randbits(62) + 1)
        self.send(
            [builders.begin_txn(txn.id, vchannel=name, collection_id=collection.id, term=0, keepalive_ms=keepalive_ms)]
        )
        try:
            yield txn
        except BaseException:
            self.send([builders.rollback_txn(txn.id, vchannel=name, collection_id=collection.id, term=0)])
            raise
        commit = builders.commit_txn(txn.id, vchannel=name, collection_id=collection.id, term=0)
        txn.commit_tick = self.send([commit]).last_tick

    def send(self, messages: Sequence[MutableMessage], *, raise_rejected: bool = True) -> Written:
        """Stamp and append `messages`, in order within each PChannel; PChannels at once."""
        by_pchannel: dict[str, list[MutableMessage]] = {}
        for message in messages:
            by_pchannel.setdefault(pchannel_of(message.vchannel), []).append(message)
        lanes = [(self._lane(name), name, group) for name, group in by_pchannel.items()]
        if len(lanes) == 1:
            parts = [self._send_lane(*lanes[0])]
        else:
            parts = list(self._pool.map(lambda lane: self._send_lane(*lane), lanes))
        written = Written()
        for part in parts:
            written.add(part)
        if raise_rejected and written.rejections:
            raise written.rejections[0]
        return written

    def _lane(self, pchannel: str) -> _Lane:
        with self._guard:
            lane = self._lanes.get(pchannel)
            if lane is None:
                lane = self._lanes[pchannel] = _Lane(self._terms.term(pchannel))
            return lane

    def _send_lane(self, lane: _Lane, pchannel: str, messages: list[MutableMessage]) -> Written:
        with lane.lock:
            written = Written()
            for group in _entries(messages):
                written.add(self._send_group(lane, pchannel, group))
            return written

    def _send_group(self, lane: _Lane, pchannel: str, messages: list[MutableMessage]) -> Written:
        stamped = self._stamp(lane, messages)
        outcome = self._append_judged(lane, pchannel, stamped)
        written = Written(messages=len(messages), last_tick=outcome.last_tick)
        for message, judged in zip(stamped, outcome.judged(), strict=True):
            written.rows += message.rows
            written.bytes += len(message.payload)
            if isinstance(judged, AppendRejected):
                written.rejections.append(judged)
                written.rejected_rows += message.rows
                written.rejected_by_reason[judged.reason] += message.rows
            else:
                written.results.append(judged)
                written.last_tick = max(written.last_tick, judged.time_tick)
        return written

    def _stamp(self, lane: _Lane, messages: list[MutableMessage]) -> list[MutableMessage]:
        stamped = []
        for message in messages:
            sequence = lane.sequences.get(message.vchannel, 0)
            lane.sequences[message.vchannel] = sequence + 1
            epoch = lane.epochs.setdefault(message.vchannel, self._epoch)
            stamped.append(message.with_(term=lane.term, producer_id=self.id, epoch=epoch, sequence=sequence))
        return stamped

    def _append_judged(self, lane: _Lane, pchannel: str, stamped: list[MutableMessage]) -> AppendOutcome:
        """Append one entry until its messages are judged for good: through lost answers, and through a change of term."""
        ambiguous = False
        while True:
            outcome, lost = self._append_retried(pchannel, encode_entry(stamped))
            ambiguous |= lost
            reasons = set(outcome.rows.column("reason").unique().to_pylist())
            if reasons & {Reason.TERM_FENCED, Reason.TERM_NOT_OPENED}:
                term = self._terms.term(pchannel)
                if term != lane.term:
                    lane.term = term
                    stamped[:] = [message.with_(term=term) for message in stamped]
                    continue
            if Reason.UNKNOWN_PRODUCER in reasons and not ambiguous:
                self._begin_epoch(lane, stamped)
                continue
            return outcome

    def _begin_epoch(self, lane: _Lane, stamped: list[MutableMessage]) -> None:
        """The chain forgot this producer (it idled among too many others): go on in a new epoch."""
        forgotten = {message.vchannel for message in stamped}
        for vchannel in forgotten:
            lane.epochs[vchannel] = lane.epochs.get(vchannel, self._epoch) + 1
            lane.sequences[vchannel] = 0
        stamped[:] = self._stamp(lane, stamped)

    def _append_retried(self, pchannel: str, entry: bytes) -> tuple[AppendOutcome, bool]:
        """The outcome, and whether an earlier attempt may have taken effect."""
        settings = self._settings
        for attempt in range(settings.append_attempts):
            try:
                return self._append.append(pchannel, [entry], deadline=settings.append_deadline), attempt > 0
            except MillraceError as error:
                if not error.retriable or attempt + 1 == settings.append_attempts:
                    raise
            time.sleep(settings.append_retry_delay)
        raise InvalidArgument("append_attempts must be at least 1")


class Transaction:
    """An open transaction; made by :meth:`Producer.transaction`."""

    def __init__(self, producer: Producer, collection: Collection, vchannel: str, txn_id: int) -> None:
        self._producer = producer
        self._collection = collection
        self.vchannel = vchannel
        self.id = txn_id
        self.commit_tick: int | None = None

    def insert(
        self, rows: pa.RecordBatch | pa.Table, *, partition: str | None = None, partition_by: str | None = None
    ) -> Written:
        """Append rows to the transaction. Raises InvalidArgument for a key of another VChannel."""
        table = conform(rows, self._collection)
        shares = list(split_rows(table, self._collection, partition, partition_by))
        if any(vchannel != self.vchannel for vchannel, _, _ in shares):
            raise InvalidArgument(f"a transaction is on one VChannel: these keys do not all belong to {self.vchannel}")
        return self._producer.send(
            [
                builders.insert(
                    part,
                    vchannel=vchannel,
                    collection_id=self._collection.id,
                    partition_id=partition_id,
                    schema_version=self._collection.schema_version,
                    term=0,
                    txn_id=self.id,
                )
                for vchannel, partition_id, part in shares
            ]
        )

    def delete(self, keys: Sequence[int] | Sequence[str]) -> Written:
        """Delete by key within the transaction; all keys must belong to its VChannel."""
        message = builders.delete(
            keys,
            schema=self._collection.schema,
            vchannel=self.vchannel,
            collection_id=self._collection.id,
            schema_version=self._collection.schema_version,
            term=0,
            txn_id=self.id,
        )
        return self._producer.send([message])

    def keep_alive(self) -> None:
        """Renew the lease."""
        message = builders.keep_alive(self.id, vchannel=self.vchannel, collection_id=self._collection.id, term=0)
        self._producer.send([message])


def conform(rows: pa.RecordBatch | pa.Table, collection: Collection) -> pa.Table:
    """`rows` with the collection's columns, in its order and types; a nullable column that is absent is null.

    Raises InvalidArgument that names the column.
    """
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    schema = collection.schema.arrow()
    unknown = [name for name in table.column_names if name not in schema.names]
    if unknown:
        raise InvalidArgument(
            f"collection {collection.name!r} has no column {unknown[0]!r}; it has {', '.join(schema.names)}"
        )
    columns: list[Any] = []
    for column in schema:
        if column.name not in table.column_names:
            if not column.nullable:
                raise InvalidArgument(f"the column {column.name!r} is missing, and it is not nullable")
            columns.append(pa.nulls(len(table), column.type))
            continue
        values = table.column(column.name)
        try:
            columns.append(values.cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InvalidArgument(f"the column {column.name!r} is no {column.type}: {error}") from None
        if not column.nullable and values.null_count:
            raise InvalidArgument(f"the column {column.name!r} has nulls, and it is not nullable")
    return pa.Table.from_arrays(columns, schema=schema)


def _partition_id(collection: Collection, name: str) -> int:
    try:
        return collection.partitions[name]
    except KeyError:
        known = ", ".join(collection.partitions)
        raise InvalidArgument(f"collection {collection.name!r} has no partition {name!r}; it has {known}") from None


def split_rows(
    table: pa.Table, collection: Collection, partition: str | None, partition_by: str | None
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """The rows of each VChannel and partition, in their order, in batches of about MESSAGE_BYTES."""
    if not len(table):
        return
    homes = vchannel_index(table.column(collection.schema.primary_key), len(collection.vchannels)).astype(np.int64)
    if partition_by is not None:
        names = pc.dictionary_encode(table.column(partition_by)).combine_chunks()
        names = names.chunk(0) if isinstance(names, pa.ChunkedArray) else names
        ids = np.array([_partition_id(collection, name) for name in names.dictionary.to_pylist()], dtype=np.int64)
        partitions = ids[names.indices.to_numpy(zero_copy_only=False)]
    else:
        if partition is None and len(collection.partitions) != 1:
            raise InvalidArgument(
                f"name the partition: collection {collection.name!r} has {len(collection.partitions)}"
            )
        chosen = next(iter(collection.partitions)) if partition is None else partition
        partitions = np.full(len(table), _partition_id(collection, chosen), dtype=np.int64)
    code = homes * (int(partitions.max()) + 1) + partitions
    order = np.argsort(code, kind="stable")
    bounds = [0, *(np.flatnonzero(np.diff(code[order])) + 1).tolist(), len(order)]
    batch = table.take(pa.array(order)).combine_chunks().to_batches()[0] if len(bounds) > 2 else _one_batch(table)
    step = max(1, min(MESSAGE_ROWS, MESSAGE_BYTES * len(table) // max(table.nbytes, 1)))
    for start, stop in pairwise(bounds):
        row = int(order[start])
        for first in range(start, stop, step):
            part = batch.slice(first, min(step, stop - first))
            yield collection.vchannels[int(homes[row])], int(partitions[row]), part


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    return table.combine_chunks().to_batches()[0]


def _entries(messages: list[MutableMessage]) -> Iterator[list[MutableMessage]]:
    """Runs of messages of about ENTRY_BYTES."""
    group: list[MutableMessage] = []
    size = 0
    for message in messages:
        if group and (size + len(message.payload) > ENTRY_BYTES or len(group) == MAX_ENTRY_MESSAGES):
            yield group
            group, size = [], 0
        group.append(message)
        size += len(message.payload)
    if group:
        yield group
