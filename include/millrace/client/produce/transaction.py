"""A transaction: inserts, upserts and deletes on one VChannel that become visible at once.

The lease is renewed while the block runs.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, InvalidArgument, MillraceError, TransactionLost
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import (
    Keys,
    Rows,
    conform,
    delete_message,
    insert_message,
    key_rows,
    last_of_each_key,
    partition_id,
    split_keys,
    split_rows,
)
from millrace.client.produce.written import Deleted, Written
from millrace.message import builders
from millrace.message.ids import Moment
from millrace.message.model import MutableMessage
from millrace.wal.reasons import Reason

if TYPE_CHECKING:
    import pyarrow.compute as pc

DEFAULT_LEASE_MS: Final = 10_000
"""The chain's default lease of a transaction (docs/chain.md, ``default_txn_keepalive_ms``)."""

MAX_LIFETIME: Final = 3600.0
"""The chain's maximum lifetime of a transaction, in seconds (``max_txn_lifetime_ms``)."""

TXN_ENDED: Final = frozenset({Reason.TXN_EXPIRED, Reason.TXN_NOT_ACTIVE, Reason.TXN_NOT_FOUND})


KeyMatcher = Callable[[CollectionInfo, "str | pc.Expression", Moment | None], tuple[int, pa.Table]]
"""(collection, predicate, tick or None for now) -> the tick of the read, and the keys of the rows that match."""


class MessageSender(Protocol):
    """The part of a producer that a transaction or an upsert needs."""

    def send(self, messages: Sequence[MutableMessage], *, raise_rejected: bool = True) -> Written: ...


class Transaction:
    """An open transaction, used as a context manager; made by :meth:`Producer.transaction`.

    A thread renews the lease every third of it, for at most `max_lifetime` seconds, while the block runs. The end of
    the block commits; an exception in it rolls back and propagates.

    Raises TransactionLost if the transaction ended before its commit, so that nothing of it is visible.
    """

    def __init__(
        self,
        producer: MessageSender,
        collection: CollectionInfo,
        vchannel: str,
        *,
        keepalive_ms: int | None = None,
        max_lifetime: float = MAX_LIFETIME,
        hit: KeyMatcher | None = None,
    ) -> None:
        self._producer = producer
        self._hit = hit
        self._collection = collection
        self._lease_ms = keepalive_ms
        self._lifetime = max_lifetime
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None
        self._lost: AppendRejected | None = None
        self.vchannel = vchannel
        self.id = secrets.randbits(62) + 1
        self.commit_tick: int | None = None

    @property
    def lost(self) -> bool:
        """Whether a renewal found that the transaction has ended: its commit will raise TransactionLost."""
        return self._lost is not None

    def __enter__(self) -> Self:
        begin = builders.begin_txn(
            self.id, vchannel=self.vchannel, collection_id=self._collection.id, term=0, keepalive_ms=self._lease_ms
        )
        self._producer.send([begin])
        self._keeper = threading.Thread(target=self._keep, name="transaction-lease", daemon=True)
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._keeper is not None:
            self._keeper.join()
        if kind is None:
            self._commit()
        else:
            self._roll_back()

    def insert(
        self, rows: Rows, *, partition: str | None = None, partition_by: str | None = None, evolve: bool = False
    ) -> Written:
        """Append rows to the transaction.

        Raises TransactionLost. Raises InvalidArgument for a key of another VChannel, and with `evolve` for rows that
        need a schema change, which would roll the transaction back: change the schema before
        (:meth:`Collection.alter`).
        """
        return self._put(rows, partition, partition_by, evolve, upsert=False)

    def upsert(
        self, rows: Rows, *, partition: str | None = None, partition_by: str | None = None, evolve: bool = False
    ) -> Written:
        """Replace the rows of these keys at the commit, including those that the transaction wrote before.

        Raises the errors of `insert`, and AppendRejected (UNSUPPORTED_TYPE) if the PChannel's term runs a chain version
        before 4.
        """
        return self._put(rows, partition, partition_by, evolve, upsert=True)

    def _put(
        self, rows: Rows, partition: str | None, partition_by: str | None, evolve: bool, *, upsert: bool
    ) -> Written:
        if evolve:
            self._require_fit(rows)
        table = conform(rows, self._collection)
        if upsert:
            table = last_of_each_key(table, self._collection.schema.key_names)
        shares = list(split_rows(table, self._collection, partition, partition_by))
        self._check(vchannel for vchannel, _, _ in shares)
        return self._send(
            [
                insert_message(
                    part, self._collection, vchannel=vchannel, partition_id=number, txn_id=self.id, upsert=upsert
                )
                for vchannel, number, part in shares
            ]
        )

    def delete(self, keys: Keys, *, partition: str | None = None) -> Written:
        """Delete by key within the transaction; all keys must belong to its VChannel. Raises the errors of `insert`."""
        shares = list(split_keys(key_rows(keys, self._collection), self._collection))
        self._check(vchannel for vchannel, _ in shares)
        number = 0 if partition is None else partition_id(self._collection, partition)
        return self._send(
            [
                delete_message(part, self._collection, vchannel=vchannel, partition_id=number, txn_id=self.id)
                for vchannel, part in shares
            ]
        )

    def delete_where(self, predicate: str | pc.Expression, *, at: Moment | None = None) -> Deleted:
        """Delete the rows that match the predicate at `at` (default: now), by key, within the transaction.

        Rows that the transaction wrote itself are deleted only if their key matched, too. All matching rows must be on
        its VChannel.

        Raises the errors of `insert` and of :meth:`millrace.client.produce.producer.Producer.delete_where`.
        """
        if self._hit is None:
            raise InvalidArgument("this transaction has nothing to read with: take it from Producer.transaction()")
        tick, keys = self._hit(self._collection, predicate, at)
        found = Deleted(tick, len(keys))
        if len(keys):
            found.written = self.delete(keys)
        return found

    def _require_fit(self, rows: Rows) -> None:
        from millrace.client.produce.schema_evolution import required_changes
        from millrace.message.schema_changes import AddField, WidenField

        changes = required_changes(rows, self._collection.schema)
        if changes:
            names = [
                each.field.name if isinstance(each, AddField) else each.name
                for each in changes
                if isinstance(each, AddField | WidenField)
            ]
            raise InvalidArgument(
                f"these rows need other fields or types ({', '.join(names)}) than the transaction's schema has, and a"
                " change of the"
                " schema rolls open transactions back: change it first, or insert one row with evolve=True before the"
                " transaction begins"
            )

    def keep_alive(self) -> None:
        """Renew the lease now. Raises TransactionLost."""
        message = builders.keep_alive(self.id, vchannel=self.vchannel, collection_id=self._collection.id, term=0)
        self._send([message])

    def _check(self, vchannels: Iterable[str]) -> None:
        others = sorted(set(vchannels) - {self.vchannel})
        if others:
            raise InvalidArgument(
                f"a transaction is on one VChannel, this one on {self.vchannel}, and these keys belong to"
                f" {', '.join(others)} too:"
                " open a transaction for each VChannel (vchannel=0, 1, ...) with the keys of each, or make the"
                " collection with"
                " vchannels=1 if all its rows have to change together; without a transaction, an upsert takes any keys"
                " and may be repeated"
            )

    def _send(self, messages: list[MutableMessage]) -> Written:
        try:
            return self._producer.send(messages)
        except AppendRejected as rejection:
            if rejection.reason in TXN_ENDED:
                self._lost = rejection
                raise self._lost_error(rejection) from rejection
            raise

    def _keep(self) -> None:
        """Renew the lease until the block ends, the lifetime is over, or the chain has ended the transaction."""
        pause = (self._lease_ms or DEFAULT_LEASE_MS) / 3000
        end = Deadline.after(self._lifetime)
        while not self._ended.wait(pause) and not end.expired():
            try:
                self.keep_alive()
            except TransactionLost:
                return
            except MillraceError as error:
                if not error.retriable and isinstance(error, AppendRejected):
                    return  # for example fenced: the commit will raise it, too

    def _commit(self) -> None:
        if self._lost is not None:
            raise self._lost_error(self._lost)
        commit = builders.commit_txn(self.id, vchannel=self.vchannel, collection_id=self._collection.id, term=0)
        self.commit_tick = self._send([commit]).last_tick

    def _roll_back(self) -> None:
        rollback = builders.rollback_txn(self.id, vchannel=self.vchannel, collection_id=self._collection.id, term=0)
        try:
            self._producer.send([rollback], raise_rejected=False)
        except MillraceError:
            pass  # the lease will end it; the caller's own error must propagate

    def _lost_error(self, rejection: AppendRejected) -> TransactionLost:
        return TransactionLost(
            f"transaction {self.id} on {self.vchannel} ended before its commit, and nothing of it is visible"
            f" ({rejection}):"
            " begin a new one with the same rows",
            reason=rejection.reason,
        )
