"""A stream of a collection's changes as Arrow batches, from any tick on.

    with client.changes("people", after=positions) as stream:
        for batch in stream:    # batch.rows: the columns, `_change`, `_time_tick`, ... (wal.visible.changes)
            save(batch.rows, stream.positions)

The stream has every row that was written, loaded, backfilled or restored, every key that was deleted, and a retraction
for everything that was replaced or dropped: each once, in the order of its VChannel. The positions are those after the
last returned batch, which may be between two rows of an import. A program that stores them with its results processes
each change exactly once.

Memory: one piece of the WAL (BATCH_BYTES of the ``wal`` reader) and one batch per PChannel, and the open transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, MillraceError
from millrace.base.metrics import Metrics
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.scan import STALL_TIMEOUT, Scan, UncommittedReader, WalOpener
from millrace.client.consume.shared_tail import SharedTail
from millrace.message.bodies import ImportSource
from millrace.message.ids import Moment, pchannel_of, resolve_tick
from millrace.message.schema import CollectionSchema
from millrace.rpc.tail import TailSource
from millrace.wal.scanner import StartAfterTick, VChannelFilter
from millrace.wal.visible.changes import (
    CHANGES_BEGIN,
    ChangeBatch,
    ChangePosition,
    ChangeReader,
    ChangeStart,
    change_schema,
)

_WAIT: Final = 0.5
_TURN: Final = 0.05
"""Longest wait on one of several PChannels, in seconds."""


@dataclass(frozen=True, slots=True)
class ChangeSources:
    """Where changes are read from: the files of a data folder or a remote server (millrace.client.database.Tables)."""

    wal: WalOpener
    tail: TailSource | SharedTail
    imports: ImportSource
    start: Callable[[str, int, ChangePosition], ChangeStart]
    """(PChannel, collection id, position) -> where a reader after the position starts."""
    log: UncommittedReader | None = None
    stall_timeout: float = STALL_TIMEOUT
    """Stall timeout of the scans, in seconds."""


class ChangeStream(Closeable):
    """Changes of one collection. One thread polls; any thread may close.

    Made by :meth:`millrace.client.collection.Collection.changes`.
    """

    def __init__(
        self,
        collection: CollectionInfo,
        sources: ChangeSources,
        *,
        after: Moment | Mapping[str, Sequence[int]] | None = None,
        until_tick: int | None = None,
        schema: CollectionSchema | None = None,
        metrics: Metrics | None = None,
        principals: bool = False,
    ) -> None:
        """Start the stream after `after`, a tick or moment, or the positions of a stream.

        A PChannel that the positions lack starts at its beginning. With a `schema`, a version of the collection's, all
        changes have it. With `principals`, batches end with the column ``_principal``.
        """
        self._principals = principals
        channels: dict[str, list[str]] = {}
        for vchannel in collection.vchannels:
            channels.setdefault(pchannel_of(vchannel), []).append(vchannel)
        begin = _positions(after, channels)
        self._closed = False
        self._feeds = [
            _Feed(
                collection.id,
                name,
                own,
                sources,
                begin.get(name, CHANGES_BEGIN),
                until_tick,
                schema,
                metrics,
                principals=principals,
            )
            for name, own in sorted(channels.items())
        ]
        self._turn = 0

    @property
    def positions(self) -> dict[str, ChangePosition]:
        """By PChannel the position after all returned batches; as JSON, lists of two integers."""
        return {feed.pchannel: feed.position for feed in self._feeds}

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether the stream is closed or has returned everything up to `until_tick`."""
        return self._closed or all(feed.ended for feed in self._feeds)

    def poll(self, *, timeout: float) -> ChangeBatch | None:
        """Return the next batch, or None if none arrives within `timeout` seconds or the stream has ended.

        After an error, the next poll continues from the positions.

        Raises the errors of the log and the tables: PositionTruncated if retention has removed the next changes,
        StagedFileDamaged, LogUnavailable.
        """
        deadline = Deadline.after(timeout)
        wait = 0.0
        while not self.ended:
            for _ in self._feeds:
                feed = self._feeds[self._turn]
                self._turn = (self._turn + 1) % len(self._feeds)
                batch = feed.next(wait)
                if batch is not None:
                    return batch
            if deadline.expired():
                return None
            wait = deadline.remaining(maximum=_WAIT if len(self._feeds) == 1 else _TURN)
        return None

    def __iter__(self) -> Iterator[ChangeBatch]:
        """Yield batches until the stream ends."""
        while not self.ended:
            batch = self.poll(timeout=_WAIT)
            if batch is not None:
                yield batch

    def reader(self, schema: CollectionSchema) -> pa.RecordBatchReader:
        """Return the rest of a stream that was made with `schema` as an Arrow reader.

        The reader closes the stream at its end.
        """

        def batches() -> Iterator[pa.RecordBatch]:
            with self:
                for batch in self:
                    yield batch.rows

        return pa.RecordBatchReader.from_batches(change_schema(schema, principals=self._principals), batches())

    def close(self) -> None:
        """Close the stream. Idempotent."""
        self._closed = True
        for feed in self._feeds:
            feed.close()


class _Feed:
    """The scan and the reader of one PChannel, reopened at the position after an error."""

    def __init__(
        self,
        collection_id: int,
        pchannel: str,
        vchannels: Sequence[str],
        sources: ChangeSources,
        after: ChangePosition,
        until_tick: int | None,
        schema: CollectionSchema | None,
        metrics: Metrics | None,
        *,
        principals: bool,
    ) -> None:
        self.pchannel = pchannel
        self._principals = principals
        self.position = after
        self._collection_id = collection_id
        self._vchannels = VChannelFilter(set(vchannels))
        self._sources = sources
        self._until = until_tick
        self._schema = schema
        self._metrics = metrics
        self._open: tuple[Scan, ChangeReader] | None = None
        self._batches: Iterator[ChangeBatch] = iter(())

    @property
    def ended(self) -> bool:
        return self._until is not None and self.position.tick >= self._until

    def next(self, timeout: float) -> ChangeBatch | None:
        if self.ended:
            return None
        try:
            return self._next(timeout)
        except MillraceError:
            self.close()
            raise

    def _next(self, timeout: float) -> ChangeBatch | None:
        found, reader = self._open or self._begin()
        batch = next(self._batches, None)
        if batch is None:
            self._passed(found)
            rows = found.poll(timeout=timeout)
            if rows is not None:
                self._batches = reader.push(rows)
                batch = next(self._batches, None)
            if batch is None:
                self._passed(found)
                return None
        self.position = batch.position
        return batch

    def _passed(self, found: Scan) -> None:
        """Advance the position after everything that the scan delivered was returned."""
        tick = found.confirmed_tick if self._until is None else min(found.confirmed_tick, self._until)
        if tick > self.position.tick:
            self.position = ChangePosition(tick)

    def _begin(self) -> tuple[Scan, ChangeReader]:
        start = self._sources.start(self.pchannel, self._collection_id, self.position)
        found = Scan(
            self.pchannel,
            StartAfterTick(start.scan_after),
            wal=self._sources.wal,
            tail=self._sources.tail,
            filters=[self._vchannels],
            until_tick=self._until,
            metrics=self._metrics,
            log=self._sources.log,
            stall_timeout=self._sources.stall_timeout,
        )
        reader = ChangeReader(
            self.pchannel,
            self._collection_id,
            start,
            imports=self._sources.imports,
            schema=self._schema,
            principals=self._principals,
        )
        self._open, self._batches = (found, reader), iter(())
        return found, reader

    def close(self) -> None:
        opened, self._open, self._batches = self._open, None, iter(())
        if opened is not None:
            opened[0].close()


def _positions(
    after: Moment | Mapping[str, Sequence[Any]] | None, pchannels: Mapping[str, object]
) -> dict[str, ChangePosition]:
    """Return by PChannel the start position. Raises InvalidArgument if `after` is not a position."""
    if after is None:
        return {}
    if not isinstance(after, Mapping):
        return dict.fromkeys(pchannels, ChangePosition(resolve_tick(after)))
    for name, place in after.items():
        if name not in pchannels:
            raise InvalidArgument(
                f"the collection has no VChannel on {name!r}: the positions belong to another collection"
            )
        if not 1 <= len(place) <= 2 or any(not isinstance(part, int) or part < 0 for part in place):
            raise InvalidArgument(f"a position is [tick, rows], as in the stream's `positions`, not {place!r}")
    return {name: ChangePosition(*place) for name, place in after.items()}
