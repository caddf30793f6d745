"""A consumer of one or more channels: units in the order of each VChannel, with positions that a group keeps.

    with client.consumer("users", group="mailer") as consumer:
        for delivery in consumer:
            for change in delivery.changes():
                ...
            consumer.acknowledge(delivery)

A unit is a message outside transactions or a whole committed transaction (:mod:`millrace.wal.scanner`). A group's
position on a PChannel is the greatest tick below which every delivered unit is acknowledged, so it never skips a gap.
It is committed every `commit_interval` seconds, on `commit` and on `close`. A new consumer of the group starts right
after it: units that were delivered but not acknowledged are delivered again (at least once).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, get_args

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import Closed, InvalidArgument, MillraceError
from millrace.base.metrics import Metrics
from millrace.client.consume.batch_decoder import BatchDecoder
from millrace.client.consume.delivery import AckState, DefinitionLookup, Delivery, SchemaMode
from millrace.client.consume.scan import STALL_TIMEOUT, Scan, UncommittedReader, WalOpener, scan
from millrace.client.consume.shared_tail import SharedTail, SharedUnits, VisibleRows
from millrace.message.bodies import ImportSource
from millrace.message.ids import split_channel, tick_physical_ms
from millrace.message.model import ImmutableMessage
from millrace.rpc.tail import TailSource
from millrace.wal.scanner import All, DeliverPolicy, Filter, ImmutableTxn, StartAfterTick, VChannelFilter

PREFETCH_BYTES: Final = 16 << 20
"""Approximate bytes of units to read ahead; a larger unit alone may exceed it.

One piece of a scan is in Arrow's memory in addition.
"""

_HAND_BYTES: Final = 512 << 10
"""Approximate bytes of units that are queued at a time."""

_log: Final = logging.getLogger(__name__)

COMMIT_INTERVAL: Final = 0.2

_WAIT: Final = 0.5
_PAUSE: Final = 0.2


class GroupPositions(Protocol):
    """Positions of consumer groups, one for each group and PChannel. Thread-safe.

    Implementations are the files of a data folder (millrace.client.consume.positions) and a remote server
    (millrace.client.remote_tables).
    """

    def lock(self, group: str, pchannel: str) -> None:
        """Lock a group's position on a PChannel until `close` or the end of the process. Raises GroupBusy."""
        ...

    def get(self, group: str, pchannel: str) -> int | None:
        """Return the tick up to which everything is done; None for a group that never moved there."""
        ...

    def move(self, group: str, ticks: dict[str, int]) -> None:
        """Move a group, by PChannel; durable and atomic. Raises GroupBusy if its lock is lost."""
        ...

    def close(self) -> None:
        """Release the locks. Idempotent."""
        ...


@dataclass(slots=True)
class _Place:
    """Progress of one PChannel: delivered units that are not done, in order, and the position below them."""

    tick: int
    out: deque[AckState] = field(default_factory=deque)
    seen: int = 0
    """Everything up to this tick was read and delivered."""
    queued: int = 0
    """Everything up to this tick was read and queued."""
    committed: int = -1

    def settle(self) -> None:
        while self.out and self.out[0].done:
            self.tick = max(self.tick, self.out.popleft().tick)
        if not self.out:
            self.tick = max(self.tick, self.seen)


class Consumer(Closeable):
    """Reads `channels` (PChannels or VChannels). One thread polls; any may acknowledge.

    Made by :meth:`Database.consumer`.
    """

    def __init__(
        self,
        channels: Sequence[str],
        *,
        wal: str | WalOpener,
        tail: TailSource | SharedTail,
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
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        if schema not in get_args(SchemaMode):
            raise InvalidArgument(f"schema is 'written' or 'current', not {schema!r}")
        if group is not None and positions is None:
            raise InvalidArgument("a group needs a store for its positions: make the consumer with Database.consumer()")
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
            pchannel, vchannel = split_channel(channel)
            by_pchannel.setdefault(pchannel, set()).update([vchannel] if vchannel else [])
        self._begin(
            by_pchannel,
            partial(scan, wal=wal, tail=tail, until_tick=until_tick, log=log, stall_timeout=stall_timeout),
            filters,
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

    # --- public methods -----------------------------------------------------------------------------------------------

    def poll(self, *, timeout: float) -> Delivery | None:
        """Return the next unit; None after `timeout` seconds, or once everything up to `until_tick` is delivered.

        Raises Closed, and the errors of a scan; after a retriable one, the next poll continues.
        """
        if self._closed:
            raise Closed("this consumer is closed: make a new one")
        end = Deadline.after(timeout)
        while True:
            with self._changed:
                while not self._ready and not self._closed:
                    if end.expired() or self.ended:
                        return None
                    end.wait(self._changed, maximum=_WAIT)
                if self.closed:  # during the wait
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
        """Yield units until the consumer is closed or has delivered everything up to `until_tick`."""
        while not self.ended:
            try:
                delivery = self.poll(timeout=_WAIT)
            except Closed:  # another thread closed it just now
                return
            if delivery is not None:
                yield delivery

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether the consumer will deliver no more units."""
        return self._closed or (not self._running and not self._ready)

    @property
    def lag(self) -> float:
        """Age in seconds of the newest delivered unit, or of the start position if nothing was delivered.

        It is 0 if everything in the log, or up to `until_tick`, was delivered; infinite if no time is known.
        """
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
        """Mark a unit as done.

        The group does not get it again once all units before it are done and the position is committed.
        """
        with self._changed:
            delivery.ack.done = True
            place = self._places[delivery.pchannel]
            place.settle()
            self._gauge(delivery.pchannel, place)
        self._commit_in_time()

    def commit(self) -> None:
        """Commit the group's positions; they are durable when this returns.

        Raises what prevents that. Automatic commits in between ignore retriable errors, such as an unavailable store,
        and try again later.
        """
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
        """Call `call` once, from any thread, when a poll would return at once or the consumer has ended."""
        with self._changed:
            if not self._ready and not self.ended:
                self._wakers.append(call)
                return
        call()

    def close(self) -> None:
        """Commit the positions and close. Idempotent."""
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

    # --- reading ahead ------------------------------------------------------------------------------------------------

    def _delivered(self, delivery: Delivery) -> Delivery:
        self._held -= delivery.held_bytes
        self._changed.notify_all()
        place = self._places[delivery.pchannel]
        place.out.append(delivery.ack)  # not the delivery, whose rows would stay in memory until it is acknowledged
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
        """Note that everything up to `tick` was delivered before this."""
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
        """Read ahead on one PChannel until the scan ends or fails with an error that is not retriable."""
        found = self._scans[pchannel]
        self._places[pchannel].queued = found.confirmed_tick
        take = partial(self._take, pchannel)
        found.hand_to(take, has_room=self._has_room)
        try:
            while not self._closed and not found.ended:
                try:
                    parts = found.poll_parts(timeout=_WAIT)
                    portion: list[Delivery] = []
                    for following in self._portions(pchannel, parts):
                        # Everything before a unit was queued with it or earlier.
                        if portion and not self._hand_over(pchannel, portion, portion[-1].tick, caught_up=False):
                            return
                        portion = following
                    caught_up = not parts and found.caught_up
                    if not self._hand_over(pchannel, portion, found.confirmed_tick, caught_up=caught_up):
                        return
                except MillraceError as error:
                    with self._changed:
                        self._put([error])
                        if not error.retriable:
                            return
                        self._changed.wait(jittered(_PAUSE))
                    found.close()
                    found = self._scans[pchannel] = opened(StartAfterTick(self._places[pchannel].queued))
                    found.hand_to(take, has_room=self._has_room)
            with self._changed:
                self._caught_up.add(pchannel)  # the scan has reached `until_tick`
        except Exception as error:
            with self._changed:
                self._put([error])
        finally:
            with self._changed:
                self._running -= 1
                self._wake()

    def _portions(self, pchannel: str, parts: Sequence[VisibleRows]) -> Iterator[list[Delivery]]:
        """Yield the units of parts of a scan as lists of deliveries, each made once the queue has room for it."""
        for part in parts:
            if isinstance(part, SharedUnits):
                yield [self._delivery(pchannel, unit, part.decoder) for unit in part.units()]
                continue
            portion: list[Delivery] = []
            size, decoder = 0, BatchDecoder()
            for unit in part.units():
                delivery = self._delivery(pchannel, unit, decoder)
                for message in delivery.bodies:
                    decoder.add(message)
                portion.append(delivery)
                size += delivery.held_bytes
                if size >= _HAND_BYTES:
                    yield portion
                    portion, size, decoder = [], 0, BatchDecoder()
            if portion:
                yield portion

    def _delivery(self, pchannel: str, unit: ImmutableMessage | ImmutableTxn, decoder: BatchDecoder) -> Delivery:
        return Delivery(
            pchannel,
            unit,
            _definitions=self._definitions,
            _files=self._files,
            _schema=self._schema,
            _together=decoder,
        )

    def _hand_over(self, pchannel: str, deliveries: Sequence[Delivery], through: int, *, caught_up: bool) -> bool:
        """Queue deliveries once there is room, and note that everything up to tick `through` is queued."""
        with self._changed:
            while self._held >= self._prefetch and not self._closed:
                self._changed.wait(_WAIT)
            if self._closed:
                return False
            self._queue(pchannel, deliveries, through, caught_up=caught_up)
            return True

    def _has_room(self) -> bool:
        return self._held < self._prefetch and not self._closed

    def _take(self, pchannel: str, found: Scan, parts: Sequence[VisibleRows]) -> None:
        """Queue what another consumer's thread got for this one."""
        try:
            deliveries = [delivery for portion in self._portions(pchannel, parts) for delivery in portion]
            with self._changed:
                self._queue(pchannel, deliveries, found.confirmed_tick, caught_up=False)
        except Exception as error:  # the other consumer has no part in it
            with self._changed:
                self._put([error])
            found.close()

    def _queue(self, pchannel: str, deliveries: Sequence[Delivery], through: int, *, caught_up: bool) -> None:
        place = self._places[pchannel]
        self._held += sum(delivery.held_bytes for delivery in deliveries)
        (self._caught_up.add if caught_up else self._caught_up.discard)(pchannel)
        place.queued = through
        if deliveries or through > place.seen:
            self._put([*deliveries, (pchannel, through)])

    def _put(self, items: Sequence[Delivery | tuple[str, int] | Exception]) -> None:
        self._ready.extend(items)
        self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for call in wakers:
            call()
