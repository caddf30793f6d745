"""A producer: rows and keys in, durable and decided messages out, each with one effect however often it is sent.

A row goes to the VChannel of its primary key. Messages for one PChannel travel in entries of a few MiB, several in
flight at once; those of a VChannel keep their order. Every message carries (producer id, epoch, sequence), so a retry
after an ambiguous failure, with the same sequences, has no second effect and gets the first result (law 8). Messages
without a final outcome are held (AppendUnresolved) and settled before anything else is sent. Nothing is ever resent
under new numbers while its outcome is unknown.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.closeable import Closeable
from millrace.base.errors import AppendRejected, Closed, InvalidArgument, MillraceError
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.definition_cache import DefinitionCache
from millrace.client.produce.channel_queue import CallSplitter, Piece, message_pieces
from millrace.client.produce.channel_sender import ChannelSender, WaitingCall
from millrace.client.produce.frames import Frame, batches_of, row_count
from millrace.client.produce.lane import Appender, Lane, ProducerIdentity, TermSource
from millrace.client.produce.rows import (
    Keys,
    Rows,
    is_in_memory,
    last_of_each_key,
    require_collection,
)
from millrace.client.produce.transaction import MAX_LIFETIME, Transaction
from millrace.client.produce.upsert import Upserter
from millrace.client.produce.written import Deleted, Written
from millrace.client.spool.sender import SpoolSender
from millrace.message.ids import COORDINATOR_ID, Moment, pchannel_of, resolve_tick
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.wal.reasons import Reason

if TYPE_CHECKING:  # not needed for single appends
    from millrace.client.produce.batch_appender import BatchAppender, BatchLimits
    from millrace.client.produce.producer_recovery import AppliedLookup
    from millrace.message.schema_changes import SchemaChange

CollectionReader = Callable[[CollectionInfo, int | None], tuple[int, pa.Table]]
"""(collection, tick or None for now) -> the tick of the read, and the rows that were visible then."""


_OUTDATED: Final = frozenset(
    {
        Reason.COLLECTION_NOT_FOUND,
        Reason.PARTITION_NOT_FOUND,
        Reason.SCHEMA_MISMATCH,
        Reason.WRONG_VCHANNEL,
        Reason.CHECK_VIOLATED,
    }
)
"""Rejections of rows that were made by a definition that others have changed since."""


def _may_be_outdated(error: MillraceError) -> bool:
    return not isinstance(error, AppendRejected) or error.reason in _OUTDATED


class ProducerCatalog(TermSource, Protocol):
    """The part of the catalog that a producer needs."""

    def collection(self, name: str) -> CollectionInfo: ...

    def alter(self, name: str, changes: Sequence[SchemaChange]) -> int: ...


class Producer(Closeable):
    """An idempotent producer. Thread-safe; calls to different PChannels run in parallel.

    With a `producer_id` of the caller's, it starts a new epoch and fences an older producer of that id
    (ProducerFenced). Without one, the id is random, or `resumed`, the id of a former producer whose numbers its lanes
    take over without a new epoch (Lane.resume). With a `spool`, rows are stored there while the log is unreachable.
    """

    def __init__(
        self,
        append: Appender,
        catalog: ProducerCatalog,
        settings: Settings,
        *,
        definitions: DefinitionCache | None = None,
        producer_id: int | None = None,
        resumed: int | None = None,
        reader: CollectionReader | None = None,
        standing: AppliedLookup | None = None,
        spool: SpoolSender | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`definitions`: the definitions that a database caches for its producers; default: a cache of its own."""
        self._definitions = definitions or DefinitionCache(catalog.collection)
        self._standing = standing
        self._metrics = metrics
        self._append = append
        self._catalog = catalog
        self._settings = settings
        self._reader = reader
        if producer_id == COORDINATOR_ID:
            raise InvalidArgument(f"producer_id {producer_id} is reserved for the coordinator: choose another")
        number = producer_id or resumed or secrets.randbits(62) + 1
        self._identity = ProducerIdentity(number, catalog, owned=producer_id is not None)
        self._lanes: dict[str, Lane] = {}
        self._senders: dict[str, ChannelSender] = {}
        self._guard = threading.Lock()
        self._settling = threading.Lock()
        self._splitter = CallSplitter()
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="producer")
        self._upserts = Upserter(self, self._splitter, self._pool, settings)
        self._batches: list[BatchAppender] = []
        self.closed = False
        self._newest: dict[int, CollectionInfo] = {}
        """Last definitions from the catalog of collections whose schema was to evolve, by collection."""
        self.spool = spool
        if spool is not None:
            spool.start(self.lane)

    @property
    def id(self) -> int:
        return self._identity.id

    @property
    def unresolved(self) -> int:
        """Number of messages whose outcome is unknown; `settle` resolves them."""
        return sum(len(sending.unanswered) for lane in self._all_lanes() for sending in lane.unresolved)

    def close(self) -> None:
        """Send what the batch appenders hold, then release everything. Idempotent. Raises DeadlineExceeded."""
        self.closed = True
        with ExitStack() as closing:
            closing.callback(self._pool.shutdown)
            for sender in list(self._senders.values()):
                closing.callback(sender.close)
            for lane in self._all_lanes():
                closing.callback(lane.close)
            if self.spool is not None:
                closing.callback(self.spool.close)
            for batch in self._batches:
                closing.callback(batch.close)

    def insert(
        self,
        collection: CollectionInfo | str,
        rows: Rows,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        raise_rejected: bool = True,
        evolve: bool = False,
    ) -> Written:
        """Append `rows` to a collection, given by definition or name.

        The rows have columns of the collection's schema, which are cast if that is lossless.

        Rows go to `partition`, to the partition that the column `partition_by` names, or to ``_default``. The batches
        of a DataFrame or stream are sent one by one while the next is read, so a stream may be larger than memory. With
        `evolve`, missing columns are added to the collection first and types that are too narrow are widened (for a
        DataFrame or stream by its types), for all users.

        Raises AppendRejected for the first rejected message; with `raise_rejected` False, the result has all rejections
        instead.
        Raises InvalidArgument if rows do not fit the schema or a partition does not exist; AppendUnresolved,
        CollectionNotFound. After an error, the batches of a stream that were sent before remain in effect.
        """
        if evolve:
            collection = self.evolved(collection, rows, ask=True)
        if not isinstance(rows, pa.Table | pa.RecordBatch | Mapping | list | tuple):
            definition = self.known(collection, ask=True)
            return self._insert_stream(definition, rows, partition, partition_by, raise_rejected)

        written = self._by_definition(
            collection, lambda definition: self._insert(definition, rows, partition, partition_by)
        )
        return written.checked() if raise_rejected else written

    def _insert(
        self, collection: CollectionInfo, rows: Rows, partition: str | None, partition_by: str | None
    ) -> Written:
        call = WaitingCall()
        return self.run(call, self._splitter.rows(call, MessageType.INSERT, collection, rows, partition, partition_by))

    def _by_definition(self, collection: CollectionInfo | str, call: Callable[[CollectionInfo], Written]) -> Written:
        """Return the result of `call`, which appends by a definition.

        The cached definition of a name may be older than the collection. If the rows do not fit it (InvalidArgument,
        raised before anything is sent), or the chain rejects all messages for a reason that a newer definition may
        remove, the catalog is asked, and the call is made once more if it has another definition.
        """
        definition = self.known(collection)
        if not isinstance(collection, str):
            return call(definition)
        try:
            written = call(definition)
        except (InvalidArgument, AppendRejected) as error:
            newer = self.renewed(definition) if _may_be_outdated(error) else None
            if newer is None:
                raise
        else:
            newer = self.renewed_after(written, definition)
            if newer is None:
                return written
        return call(newer)

    def _insert_stream(
        self,
        collection: CollectionInfo,
        frame: Frame,
        partition: str | None,
        partition_by: str | None,
        raise_rejected: bool,
    ) -> Written:
        from millrace.client.progress import report_rows

        written = Written()
        with self._new_batch(None, collection) as batch:
            futures = [
                batch.insert(rows, partition=partition, partition_by=partition_by)
                for rows in report_rows(batches_of(frame, collection.schema), row_count(frame))
            ]
            batch.flush()
            for future in futures:
                written.add(future.result())
        return written.checked() if raise_rejected else written

    def evolved(self, collection: CollectionInfo | str, rows: Rows, *, ask: bool = False) -> CollectionInfo:
        """Return the collection with a schema that fits `rows`, after changing it if necessary.

        Others may change the schema at the same time.

        The catalog is asked if the newest known schema does not fit the rows, or on every call (`ask`).

        Raises InvalidArgument if no change makes the rows fit.
        """
        from millrace.client.produce.schema_evolution import required_changes

        named, definition = isinstance(collection, str), self.known(collection, ask=ask)
        ask = ask and not named
        newest = self._newest.get(definition.id, definition)
        definition = max(definition, newest, key=lambda each: each.schema_version)
        changes = () if ask else required_changes(rows, definition.schema)
        while ask or changes:
            found = self._definitions.renew(definition.name)
            definition = self._newest[found.id] = found if named else definition.require_same_id(found)
            changes, ask = required_changes(rows, definition.schema), False
            if not changes:
                break
            try:
                self._catalog.alter(definition.name, changes)
            except InvalidArgument:
                if self._definitions.renew(definition.name).schema_version == definition.schema_version:
                    raise  # otherwise another producer changed the schema at the same time
        return definition

    def known(self, collection: CollectionInfo | str, *, ask: bool = False) -> CollectionInfo:
        """Return the definition of a collection, given by definition or name.

        A name's definition may be cached (:mod:`millrace.catalog.definition_cache`); with `ask`, the catalog is asked.

        Raises CollectionNotFound, InvalidArgument, Closed.
        """
        self._require_open()
        if isinstance(collection, str):
            return self._definitions.renew(collection) if ask else self._definitions.get(collection)
        require_collection(collection)
        return collection

    def cached(self, collection: CollectionInfo | str) -> CollectionInfo | None:
        """Return what :meth:`known` returns if that needs no request, else None: for callers that must not block."""
        self._require_open()
        return self._definitions.cached(collection) if isinstance(collection, str) else self.known(collection)

    def renewed(self, definition: CollectionInfo) -> CollectionInfo | None:
        """Ask the catalog for the collection that has the name of `definition` now; None if that is the same.

        For a call by name whose rows do not fit `definition`. Also None if the catalog cannot be reached: then the
        call failed as it did.

        Raises CollectionNotFound if no collection has the name any more.
        """
        try:
            newer = self._definitions.renew(definition.name)
        except MillraceError as error:
            if error.retriable:
                return None
            raise
        return None if newer == definition else newer

    def renewed_after(self, written: Written, definition: CollectionInfo) -> CollectionInfo | None:
        """Return the definition by which to make a call by name once more, or None if its result is final.

        The catalog is asked if a newer definition may remove a rejection. If a part of the call took effect, its result
        is final, and the next call has the newer definition. Raises the errors of :meth:`renewed`.
        """
        if not any(map(_may_be_outdated, written.rejections)):
            return None
        newer = self.renewed(definition)
        took_effect = written.messages > len(written.rejections) or written.spooled_rows
        return None if took_effect or not all(map(_may_be_outdated, written.rejections)) else newer

    def upsert(
        self,
        collection: CollectionInfo | str,
        rows: Rows,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        evolve: bool = False,
    ) -> Written:
        """Replace the rows of these primary keys, wherever they are, and insert new ones.

        `evolve` is that of :meth:`insert`.

        For each key, the old row disappears and the new one appears at one tick: a reader always sees one of them. All
        keys of a VChannel (up to about 32 MiB of rows) change at once; for a stream, a relation or a Spark DataFrame,
        those of a batch do. Of several rows with one key, the last one counts. After an error, some VChannels may have
        changed and others not; upserting again is safe.
        """
        if evolve:
            collection = self.evolved(collection, rows, ask=True)
        if is_in_memory(rows):
            # A call that is made once more repeats what took effect: the result is the same.
            return self._by_definition(
                collection,
                lambda definition: self._upserts.run(rows, definition, partition, partition_by),
            )
        from millrace.client.progress import report_rows

        definition = self.known(collection, ask=True)
        written = Written()
        for batch in report_rows(batches_of(rows, definition.schema), row_count(rows)):
            written.add(self._upserts.run(batch, definition, partition, partition_by))
        return written

    def delete(
        self, collection: CollectionInfo | str, keys: Keys, *, partition: str | None = None, raise_rejected: bool = True
    ) -> Written:
        """Delete rows by primary key, in `partition` or in all; a key without a row is not an error."""
        written = self._by_definition(collection, lambda definition: self._delete(definition, keys, partition))
        return written.checked() if raise_rejected else written

    def _delete(self, collection: CollectionInfo, keys: Keys, partition: str | None) -> Written:
        call = WaitingCall()
        return self.run(call, self._splitter.keys(call, collection, keys, partition))

    def delete_where(
        self, collection: CollectionInfo | str, predicate: str | pc.Expression, *, at: Moment | None = None
    ) -> Deleted:
        """Delete the rows that match the predicate (:mod:`millrace.base.predicate.language`) at `at` (default: now).

        The rows are read at that tick, then deleted by key. A row that was written between the read and its key's
        delete is deleted too; a new row with another key is not, whatever its values.

        Raises TickNotReached if the streaming node is behind, InvalidArgument if `predicate` is not a predicate.
        """
        collection = self.known(collection, ask=True)
        tick, keys = self._hit(collection, predicate, at)
        found = Deleted(tick, len(keys))
        if len(keys):
            found.written = self.delete(collection, keys)
        return found

    def _hit(
        self, collection: CollectionInfo, predicate: str | pc.Expression, at: Moment | None
    ) -> tuple[int, pa.Table]:
        """Return the tick of the read and the distinct keys of the rows that match the predicate."""
        from millrace.base.predicate.arrow import filter_table

        if self._reader is None:
            raise InvalidArgument("this producer has nothing to read with: take it from Database.new_producer()")
        tick, table = self._reader(collection, None if at is None else resolve_tick(at))
        names = collection.schema.key_names
        read = filter_table(table, predicate).select(list(self._key_of(collection, table.schema)))
        return tick, last_of_each_key(read.rename_columns(list(names)), names)

    def _key_of(self, collection: CollectionInfo, columns: pa.Schema) -> tuple[str, ...]:
        """Return the primary key's names among a read's columns: it may have been renamed before or after."""
        schemas = (collection, collection.require_same_id(self._definitions.renew(collection.name)))
        known = {each.key_names for found in schemas for each in found.schemas if each.arrow().equals(columns)}
        if len(known) != 1:
            raise InvalidArgument(
                f"the key of {collection.name!r} had several names, which the read cannot tell apart: read the rows,"
                " and delete by key"
            )
        return known.pop()

    def transaction(
        self,
        collection: CollectionInfo | str,
        *,
        vchannel: int = 0,
        keepalive_ms: int | None = None,
        max_lifetime: float = MAX_LIFETIME,
    ) -> Transaction:
        """Open a transaction block on one VChannel: its writes become visible at once at its end, or never.

        The lease is renewed while the block runs. An exception inside the block rolls back and propagates.

        Raises TransactionLost if the transaction ended before the commit, AppendRejected if the commit was refused.
        """
        collection = self.known(collection, ask=True)
        if not 0 <= vchannel < len(collection.vchannels):
            raise InvalidArgument(
                f"collection {collection.name!r} has {len(collection.vchannels)} VChannels: give 0 to"
                f" {len(collection.vchannels) - 1}, not {vchannel}"
            )
        name = collection.vchannels[vchannel]
        return Transaction(self, collection, name, keepalive_ms=keepalive_ms, max_lifetime=max_lifetime, hit=self._hit)

    def batch(self, *, collection: CollectionInfo | None = None, limits: BatchLimits | None = None) -> BatchAppender:
        """Create an appender that batches small appends by size and time and returns a future for each.

        With `collection`, its calls need not name one. It is closed with the producer.
        """
        self._require_open()
        made = self._new_batch(limits, collection)
        self._batches = [*(each for each in self._batches if not each.closed), made]
        return made

    def _new_batch(self, limits: BatchLimits | None, collection: CollectionInfo | None) -> BatchAppender:
        from millrace.client.produce.batch_appender import BatchAppender

        return BatchAppender(
            self.sender,
            self._splitter,
            known=self.known,
            renewed=self.renewed,
            evolved=self.evolved,
            collection=collection,
            limits=limits,
        )

    def settle(self) -> Written:
        """Resolve the unresolved appends by sending them again. Raises AppendUnresolved if the log is unreachable."""
        self._require_open()
        written = Written()
        for lane in self._all_lanes():
            waiting = lane.unresolved
            lane.send([])
            for sending in waiting:
                written.add(sending.written())
        return written

    def send(self, messages: Sequence[MutableMessage], *, raise_rejected: bool = True) -> Written:
        """Stamp and append `messages`, in order within each VChannel, with PChannels in parallel. Raises Closed."""
        self._require_open()
        by_pchannel: dict[str, list[MutableMessage]] = {}
        for message in messages:
            by_pchannel.setdefault(pchannel_of(message.vchannel), []).append(message)
        call = WaitingCall()
        written = self._run_on(call, {name: message_pieces(call, each) for name, each in by_pchannel.items()})
        return written.checked() if raise_rejected else written

    def run(self, call: WaitingCall, pieces: Sequence[Piece]) -> Written:
        """Append the pieces of a call and wait for its outcome, with PChannels in parallel."""
        self._require_open()
        by_pchannel: dict[str, list[Piece]] = {}
        for piece in pieces:
            assert piece.destination is not None
            by_pchannel.setdefault(piece.destination.pchannel, []).append(piece)
        return self._run_on(call, by_pchannel)

    def _run_on(self, call: WaitingCall, by_pchannel: Mapping[str, Sequence[Piece]]) -> Written:
        call.left = sum(map(len, by_pchannel.values()))
        if not call.left:
            return call.written
        if self.spool is not None:  # for all PChannels at once: a call is accepted as a whole, or not at all
            self.spool.require_room([piece.bytes for pieces in by_pchannel.values() for piece in pieces])
        if len(by_pchannel) == 1:
            [(name, pieces)] = by_pchannel.items()
            return self.sender(name).run(call, pieces)
        senders = {self.sender(name): pieces for name, pieces in by_pchannel.items()}
        for sender, pieces in senders.items():
            sender.add(pieces)
        try:
            call.turn.acquire()
        except BaseException:  # interrupted: what is queued is not sent
            for sender in senders:
                sender.leave(call)
            raise
        return call.result()

    def lane(self, pchannel: str) -> Lane:
        """Return this producer's lane to a PChannel."""
        with self._guard:
            lane = self._lanes.get(pchannel)
            if lane is None:
                lane = self._lanes[pchannel] = Lane(
                    self._append, self._identity, self._settings, pchannel, metrics=self._metrics
                )
            return lane

    def sender(self, pchannel: str) -> ChannelSender:
        """Return the queue of this producer's calls for one PChannel."""
        found = self._senders.get(pchannel)
        if found is not None:
            return found
        with self._guard:
            if pchannel not in self._senders:
                self._senders[pchannel] = ChannelSender(
                    pchannel,
                    lambda: self.lane(pchannel),
                    settling=self._settling,
                    spool=self.spool,
                    retry_delay=self._settings.append_retry_delay,
                )
            return self._senders[pchannel]

    def numbers(self) -> dict[str, tuple[int, int]]:
        """Return by VChannel this producer's epoch and next sequence, for a producer that continues after it."""
        return {name: each for lane in self._all_lanes() for name, each in lane.numbers().items()}

    def ticks(self) -> dict[str, int]:
        """Return by PChannel a tick after which the next call's messages are.

        For a producer that continues after this one.
        """
        return {lane.pchannel: lane.tick for lane in self._all_lanes()}

    def resume(self, numbers: Mapping[str, tuple[int, int]], ticks: Mapping[str, int] | None = None) -> None:
        """Take over the numbers and `ticks` of a former producer of this id.

        The next call may repeat the former producer's last one, and has one effect. On a VChannel that has forgotten
        the producer, the WAL decides, if it is readable here.
        """
        ticks = ticks or {}
        for pchannel in {*ticks, *map(pchannel_of, numbers)}:
            mine = {name: each for name, each in numbers.items() if pchannel_of(name) == pchannel}
            self.lane(pchannel).resume(mine, tick=ticks.get(pchannel, 0), standing=self._standing)

    def _require_open(self) -> None:
        if self.closed:
            raise Closed(f"producer {self.id} is closed: make a new one")

    def _all_lanes(self) -> list[Lane]:
        with self._guard:
            return list(self._lanes.values())
