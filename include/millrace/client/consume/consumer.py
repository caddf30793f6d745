"""A consumer: the units of one or several channels, each VChannel's in order, with positions that a group keeps.

    with client.consumer("users", group="mailer") as consumer:
        for delivery in consumer:
            for change in delivery.changes():
                ...
            consumer.acknowledge(delivery)

A unit is a message outside transactions or a whole committed transaction (:mod:`millrace.wal.scanner`). The position of a
group on a PChannel is the greatest tick below which everything that was delivered is acknowledged: no gap is ever stepped
over. It is written down every `commit_interval` seconds, on `commit` and on `close`; a consumer of the same group begins
exactly behind it, so that what was delivered and not acknowledged comes again (at least once).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, get_args

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import Closed, InvalidArgument, MillraceError
from millrace.base.metrics import Metrics
from millrace.client.consume.batch_decoder import BatchDecoder
from millrace.client.consume.delivery import AckState, DefinitionLookup, Delivery, SchemaMode
from millrace.client.consume.scan import STALL_TIMEOUT, Scan, TailSource, UncommittedReader, WalOpener, scan
from millrace.message.bodies import ImportSource
from millrace.message.ids import tick_physical_ms
from millrace.wal.scanner import All, DeliverPolicy, Filter, ImmutableTxn, StartAfterTick, VChannelFilter, visible_units

if TYPE_CHECKING:
    import pyarrow as pa

PREFETCH_BYTES: Final = 16 << 20
"""Bytes of units that are read ahead, at most about, a unit that is larger apart; one piece of a scan beside that, in Arrow's memory."""

_HAND_BYTES: Final = 512 << 10
"""Bytes of units that are handed over together, about."""

_log: Final = logging.getLogger(__name__)

COMMIT_INTERVAL: Final = 0.2

_WAIT: Final = 0.5
_PAUSE: Final = 0.2


class GroupPositions(Protocol):
    """The places of consumer groups, one a group and PChannel; thread-safe. The files of a data folder stand behind it
    (millrace.client.consume.positions), or a server elsewhere (millrace.client.remote_tables)."""

    def lock(self, group: str, pchannel: str) -> None:
        """Take a group's place on a PChannel, until `close` or the end of the process. Raises GroupBusy."""
        ...

    def get(self, group: str, pchannel: str) -> int | None:
        """The tick up to which everything is done; None for a group that never moved there."""
        ...

    def move(self, group: str, ticks: dict[str, int]) -> None:
        """Move a group, by PChannel; durable when it returns, all of it or nothing. Raises GroupBusy where its place is lost."""
        ...

    def close(self) -> None:
        """Give the places back. Idempotent."""
        ...


@dataclass(slots=True)
class _Place:
    """One PChannel: what was delivered and is not done, in order, and the position below that."""

    tick: int
    out: deque[AckState] = field(default_factory=deque)
    seen: int = 0
    """Everything up to here was read and handed out."""
    committed: int = -1

    def settle(self) -> None:
        while self.out and self.out[0].done:
            self.tick = max(self.tick, self.out.popleft().tick)
        if not self.out:
            self.tick = max(self.tick, self.seen)


class Consumer(Closeable):
    """Reads `channels` (PChannels or VChannels). One thread polls; any may acknowledge. Made by :meth:`Client.consumer`."""

    def __init__(
        self,
        channels: Sequence[str],
        *,
        wal: str | WalOpener,
        tail: TailSource,
        group: str | None = None,
        positions: GroupPositions | None = None,
        policy: DeliverPolicy | None = None,
        filters: Sequence[Filter] = (),
        until_tick: int | None = None,
        definitions: DefinitionLookup | None = None,
        imports: ImportSource | None = None,
        schema: SchemaMode = "written",
        metrics: Metrics | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        commit_interval: float = COMMIT_INTERVAL,
        log: UncommittedReader | None = None,
        patience: float = STALL_TIMEOUT,
    ) -> None:
        if schema not in get_args(SchemaMode):
            raise InvalidArgument(f"rows are given in the schema 'written' or 'current', not {schema!r}")
        if group is not None and positions is None:
            raise InvalidArgument("a group needs a place for its positions: take the consumer from Client.consumer()")
        self.group = group
        self._positions = positions
        self._definitions = definitions
        self._files = imports
        self._schema: SchemaMode = schema
        self._metrics = metrics
        self._prefetch = prefetch_bytes
        self._interval = commit_interval
        self._committed_at = time.monotonic()
        self._behind = False
        self._committing = threading.Lock()
        self._changed = threading.Condition()
        self._ready: deque[Delivery | tuple[str, int] | Exception] = deque()
        self._held = 0
        self._wakers: list[Callable[[], None]] = []
        self._closed = False
        self._newest_ms = 0
        self._caught_up: set[str] = set()
        self._places: dict[str, _Place] = {}
        self._scans: dict[str, Scan] = {}
        self._running = 0
        self._policy = policy or All()
        self._until = until_tick
        by_pchannel: dict[str, set[str]] = {}
        for channel in channels:
            pchannel, vchannel = _split(channel)
            by_pchannel.setdefault(pchannel, set()).update([vchannel] if vchannel else [])
        self._begin(
            by_pchannel, partial(scan, wal=wal, tail=tail, until_tick=until_tick, log=log, patience=patience), filters
        )

    def _begin(self, by_pchannel: dict[str, set[str]], scanned: Callable[..., Scan], filters: Sequence[Filter]) -> None:
        threads = []
        for pchannel, vchannels in by_pchannel.items():
            start = self._policy
            if self.group is not None and self._positions is not None:
                self._positions.lock(self.group, pchannel)
                tick = self._positions.get(self.group, pchannel)
                start = self._policy if tick is None else StartAfterTick(tick)
            own: list[Filter] = [VChannelFilter(vchannels)] if vchannels else []

            def opened(policy: DeliverPolicy, pchannel: str = pchannel, own: list[Filter] = own) -> Scan:
                return scanned(pchannel, policy, filters=[*own, *filters], metrics=self._metrics)

            found = self._scans[pchannel] = opened(start)
            self._places[pchannel] = _Place(found.confirmed_tick, seen=found.confirmed_tick)
            threads.append(
                threading.Thread(target=self._read, args=(pchannel, opened), name=f"consumer-{pchannel}", daemon=True)
            )
        self._running = len(threads)
        for thread in threads:
            thread.start()

    # --- what a caller does -------------------------------------------------------------------------------------------------

    def poll(self, *, timeout: float) -> Delivery | None:
        """The next unit; None where none came within `timeout` seconds, or everything up to `until_tick` was delivered.

        Raises Closed, and what a scan raised; where that is retriable, the next poll goes on.
        """
        if self._closed:
            raise Closed("this consumer is closed, and delivers nothing more: make another one")
        end = Deadline.after(timeout)
        while True:
            with self._changed:
                while not self._ready and not self._closed:
                    if end.expired() or self.ended:
                        return None
                    end.wait(self._changed, maximum=_WAIT)
                if self.closed:  # while it waited
                    return None
                item = self._ready.popleft()
                if isinstance(item, Delivery):
                    return self._delivered(item)
                if isinstance(item, tuple):
                    self._marked(*item)
            if isinstance(item, Exception):
                raise item
            self._commit_in_time()

    def __iter__(self) -> Iterator[Delivery]:
        """Units until the consumer ends: closed, or everything up to `until_tick` delivered."""
        while not self.ended:
            try:
                delivery = self.poll(timeout=_WAIT)
            except Closed:  # by another thread, a moment ago
                return
            if delivery is not None:
                yield delivery

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._closed or (not self._running and not self._ready)

    @property
    def lag(self) -> float:
        """Seconds that the newest delivered unit is old, or where none was delivered the consumer's start; 0 where everything that is
        in the log was delivered, infinite where nothing is known of its time."""
        with self._changed:
            if not self._ready and self._caught_up >= self._places.keys():
                return 0.0
            newest = self._newest_ms or tick_physical_ms(min((each.tick for each in self._places.values()), default=0))
            return max(0.0, time.time() - newest / 1000) if newest else float("inf")

    @property
    def positions(self) -> dict[str, int]:
        """By PChannel the tick up to which everything is done."""
        with self._changed:
            return {pchannel: place.tick for pchannel, place in self._places.items()}

    def acknowledge(self, delivery: Delivery) -> None:
        """The unit is done: it is not delivered to this group again, once everything before it is done and committed."""
        with self._changed:
            delivery.ack.done = True
            place = self._places[delivery.pchannel]
            place.settle()
            self._gauge(delivery.pchannel, place)
        self._commit_in_time()

    def commit(self) -> None:
        """Write the group's positions down; they are durable when this returns. Raises what keeps them from that; in between, where
        they are written by themselves, what passes (a store that is away) is no reason to stop: they are written later."""
        self._committed_at = time.monotonic()
        if self.group is None or self._positions is None:
            return
        with self._committing:
            with self._changed:
                moved = {name: place.tick for name, place in self._places.items() if place.tick > place.committed}
            if moved:
                self._positions.move(self.group, moved)
                self._behind = False
                for name, tick in moved.items():
                    self._places[name].committed = tick

    def on_ready(self, call: Callable[[], None]) -> None:
        """Have `call` called once, from any thread, when a poll would find something or the consumer has ended."""
        with self._changed:
            if not self._ready and not self.ended:
                self._wakers.append(call)
                return
        call()

    def close(self) -> None:
        """Write the positions down and end. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._wake()
        for each in self._scans.values():
            each.close()
        with self._changed:
            end = Deadline.after(10.0)
            while self._running and not end.expired():
                end.wait(self._changed)
        try:
            self.commit()
        finally:
            if self._positions is not None:
                self._positions.close()

    # --- under it -----------------------------------------------------------------------------------------------------------

    def _delivered(self, delivery: Delivery) -> Delivery:
        self._held -= delivery.held_bytes
        self._changed.notify_all()
        place = self._places[delivery.pchannel]
        place.out.append(delivery.ack)  # not the delivery: one that nobody acknowledges holds no rows here
        physical = delivery.unit.commit if isinstance(delivery.unit, ImmutableTxn) else delivery.unit
        self._newest_ms = physical.physical_ms
        delivery.lag = max(0.0, time.time() - physical.physical_ms / 1000)
        if self._metrics is not None:
            labels = (self.group or "", delivery.pchannel)
            self._metrics.consumer_lag_seconds.labels(*labels).set(delivery.lag)
            self._metrics.consumer_delivery_delay_seconds.labels(*labels).observe(delivery.lag)
        self._gauge(delivery.pchannel, place)
        return delivery

    def _marked(self, pchannel: str, tick: int) -> None:
        """Everything up to `tick` was handed out before this."""
        place = self._places[pchannel]
        place.seen = max(place.seen, tick)
        place.settle()

    def _gauge(self, pchannel: str, place: _Place) -> None:
        if self._metrics is not None:
            self._metrics.consumer_unacknowledged.labels(self.group or "", pchannel).set(len(place.out))

    def _commit_in_time(self) -> None:
        if time.monotonic() - self._committed_at < self._interval:
            return
        try:
            self.commit()
        except MillraceError as error:
            if not error.retriable:
                raise
            if not self._behind:
                _log.warning("where group %r stands is written down later: %s: %s", self.group, error.code, error)
            self._behind = True

    def _read(self, pchannel: str, opened: Callable[[DeliverPolicy], Scan]) -> None:
        """Read ahead of one PChannel, until the scan ends or fails for good."""
        found = self._scans[pchannel]
        handed = found.confirmed_tick
        try:
            while not self._closed and not found.ended:
                try:
                    rows = found.poll(timeout=_WAIT)
                    for deliveries in self._portions(pchannel, rows):
                        # All that lies before a unit was handed over with it or before it.
                        if not self._hand_over(pchannel, deliveries, deliveries[-1].tick, caught_up=False):
                            return
                        handed = deliveries[-1].tick
                    if not self._hand_over(
                        pchannel, [], found.confirmed_tick, caught_up=rows is None and found.caught_up
                    ):
                        return
                    handed = found.confirmed_tick
                except MillraceError as error:
                    with self._changed:
                        self._put([error])
                        if not error.retriable:
                            return
                        self._changed.wait(jittered(_PAUSE))
                    found.close()
                    found = self._scans[pchannel] = opened(StartAfterTick(handed))
        except Exception as error:
            with self._changed:
                self._put([error])
        finally:
            with self._changed:
                self._running -= 1
                self._wake()

    def _portions(self, pchannel: str, rows: pa.Table | None) -> Iterator[list[Delivery]]:
        """The units of a piece of a scan as deliveries, some at a time: none is made before there is room for it."""
        portion: list[Delivery] = []
        size, together = 0, BatchDecoder()
        for unit in () if rows is None else visible_units(rows):
            delivery = Delivery(
                pchannel,
                unit,
                _definitions=self._definitions,
                _files=self._files,
                _schema=self._schema,
                _together=together,
            )
            for message in delivery.bodies:
                together.add(message)
            portion.append(delivery)
            size += delivery.held_bytes
            if size >= _HAND_BYTES:
                yield portion
                portion, size, together = [], 0, BatchDecoder()
        if portion:
            yield portion

    def _hand_over(self, pchannel: str, deliveries: Sequence[Delivery], through: int, *, caught_up: bool) -> bool:
        """Put them into the queue, as soon as it has room, and that everything up to tick `through` is there with them."""
        with self._changed:
            while self._held >= self._prefetch and not self._closed:
                self._changed.wait(_WAIT)
            if self._closed:
                return False
            self._held += sum(delivery.held_bytes for delivery in deliveries)
            (self._caught_up.add if caught_up else self._caught_up.discard)(pchannel)
            if deliveries or through > self._places[pchannel].seen:
                self._put([*deliveries, (pchannel, through)])
            return True

    def _put(self, items: Sequence[Delivery | tuple[str, int] | Exception]) -> None:
        self._ready.extend(items)
        self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for call in wakers:
            call()


def _split(channel: str) -> tuple[str, str]:
    """(PChannel, VChannel or "") of a channel's name."""
    head, _, tail = channel.rpartition("_")
    collection, v, number = tail.partition("v")
    if head and v and collection.isdigit() and number.isdigit():
        return head, channel
    return channel, ""
