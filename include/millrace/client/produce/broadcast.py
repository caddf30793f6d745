"""A broadcast: messages for VChannels of one or more collections, appended atomically."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from millrace.base.errors import Closed, InvalidArgument
from millrace.catalog.broadcast import MESSAGE_KIND, BroadcastResult, check_data, check_kind_name, check_messages
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import (
    Keys,
    Rows,
    conform,
    delete_message,
    insert_message,
    key_rows,
    last_of_each_key,
    one_or_more_keys,
    partition_of,
    split_keys,
    split_rows,
)
from millrace.message import builders
from millrace.message.model import MutableMessage


class BroadcastCatalog(Protocol):
    """The part of the catalog that a broadcast needs."""

    def collection(self, name: str) -> CollectionInfo: ...

    def broadcast(
        self, messages: Sequence[MutableMessage], *, kind: str, data: Mapping[str, Any] | None, request: str
    ) -> BroadcastResult: ...


class Broadcast:
    """Collects messages, at most one for each VChannel, and submits them. Not thread-safe.

    Made by :meth:`millrace.client.database.Database.broadcast`.
    """

    def __init__(
        self,
        catalog: BroadcastCatalog,
        *,
        kind: str = MESSAGE_KIND,
        data: Mapping[str, Any] | None = None,
        request: str = "",
    ) -> None:
        self._catalog = catalog
        self._kind = check_kind_name(kind)
        self._data = check_data(dict(data) if isinstance(data, Mapping) else data)
        self._request = request or uuid.uuid4().hex
        self._messages: list[MutableMessage] = []
        self._result: BroadcastResult | None = None

    @property
    def result(self) -> BroadcastResult | None:
        """The id and the tick of each VChannel, once it is submitted."""
        return self._result

    def insert(self, collection: str | CollectionInfo, rows: Rows, *, partition: str | None = None) -> Self:
        """Add rows to insert. Raises InvalidArgument, CheckViolated, CollectionNotFound."""
        return self._rows(collection, rows, partition, upsert=False)

    def upsert(self, collection: str | CollectionInfo, rows: Rows, *, partition: str | None = None) -> Self:
        """Add rows that replace those with their keys. Raises as :meth:`insert`."""
        return self._rows(collection, rows, partition, upsert=True)

    def delete(self, collection: str | CollectionInfo, keys: Keys, *, partition: str | None = None) -> Self:
        """Add keys whose rows to delete, in one partition or in all. Raises as :meth:`insert`."""
        there = self._resolve(collection)
        rows = key_rows(one_or_more_keys(keys, there.schema), there)
        number = 0 if partition is None else partition_of(there, partition)
        return self._add(
            delete_message(part, there, vchannel=vchannel, partition_id=number)
            for vchannel, part in split_keys(rows, there)
        )

    def flush(self, collection: str | CollectionInfo) -> Self:
        """Add a flush of the collection's growing segments. Raises CollectionNotFound."""
        there = self._resolve(collection)
        return self._add(
            builders.manual_flush(vchannel=vchannel, collection_id=there.id, term=0) for vchannel in there.vchannels
        )

    def submit(self) -> BroadcastResult:
        """Submit the broadcast and return its id and ticks. Idempotent: a repeated call returns the first result.

        Raises BroadcastRefused, AppendRejected with the reason why a VChannel refuses its message, CheckViolated,
        InvalidArgument, EntryTooLarge, TooManyBroadcasts, PermissionDenied: nothing was sent.
        Raises other errors that are retriable: it will be completed, and a repeated call waits for that.
        """
        if self._result is None:
            check_messages(self._messages)
            self._result = self._catalog.broadcast(
                self._messages, kind=self._kind, data=self._data, request=self._request
            )
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Submit the broadcast, unless the block raised."""
        if kind is None:
            self.submit()

    def _resolve(self, collection: str | CollectionInfo) -> CollectionInfo:
        return self._catalog.collection(collection) if isinstance(collection, str) else collection

    def _rows(self, collection: str | CollectionInfo, rows: Rows, partition: str | None, *, upsert: bool) -> Self:
        there = self._resolve(collection)
        table = conform(rows, there)
        if upsert:
            table = last_of_each_key(table, there.schema.key_names)
        return self._add(
            insert_message(part, there, vchannel=vchannel, partition_id=number, upsert=upsert)
            for vchannel, number, part in split_rows(table, there, partition, None)
        )

    def _add(self, messages: Iterable[MutableMessage]) -> Self:
        if self._result is not None:
            raise Closed("the broadcast was submitted: begin another")
        added = list(messages)
        if not added:
            raise InvalidArgument("no rows and no keys: a broadcast needs at least one message")
        check_messages([*self._messages, *added])
        self._messages += added
        return self
