"""A consumer of one or more channels: units in the order of each VChannel, with positions that a group keeps.

    with client.consumer("users", group="mailer") as consumer:
        for delivery in consumer:
            for change in delivery.changes():
                ...
            consumer.acknowledge(delivery)

A unit is a message outside transactions or a whole committed transaction (:mod:`millrace.wal.scanner`). A group's
position on a lane, a VChannel or a PChannel, is the greatest tick below which every delivered unit is acknowledged, so
it never skips a gap. It is committed every `commit_interval` seconds, on `commit` and on `close`. A new consumer of the
group starts right after it: units that were delivered but not acknowledged are delivered again (at least once).

The consumers of a group divide its lanes (millrace.client.consume.membership). A lane that another member shall have
is drained first: the consumer delivers no more of it, waits up to DRAIN_SECONDS for acknowledgements, commits, and
releases it in the next `poll`. A lane whose lease is over is dropped: its units come to the new owner, perhaps a second
time.

The consumers of a connection share a few threads and one call for their heartbeats
(millrace.client.consume.consumer_threads). One without news costs none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, get_args

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import Closed, CollectionNotFound, GroupBusy, InvalidArgument, MillraceError
from millrace.base.job_pool import Job
from millrace.base.metrics import Metrics
from millrace.client.consume.batch_decoder import BatchDecoder
from millrace.client.consume.consumer_threads import Answer, ConsumerThreads
from millrace.client.consume.delivery import DefinitionLookup, Delivery, SchemaMode
from millrace.client.consume.lane_progress import ChannelReader, LaneProgress, Mark
from millrace.client.consume.membership import HEARTBEAT_SECONDS, SETTLING_SECONDS, GroupMember, GroupShare
from millrace.client.consume.scan import STALL_TIMEOUT, Scan, UncommittedReader, WalOpener, scan
from millrace.client.consume.shared_tail import SharedTail, SharedUnits, VisibleRows
from millrace.message.bodies import ImportSource
from millrace.message.ids import Moment, collection_id_of, split_channel, tick_physical_ms
from millrace.message.model import ImmutableMessage
from millrace.rpc.tail import TailSource
from millrace.wal.scanner import All, DeliverPolicy, Filter, ImmutableTxn, StartAfterTick, VChannelFilter

if TYPE_CHECKING:
    from millrace.client.consume.positions import GroupPositions  # imports sqlite3

PREFETCH_BYTES: Final = 16 << 20
"""Approximate bytes of units to read ahead; a larger unit alone may exceed it.

One piece of a scan is in Arrow's memory in addition.
"""

_HAND_BYTES: Final = 512 << 10
"""Approximate bytes of units that are queued at a time."""

_log: Final = logging.getLogger(__name__)

COMMIT_INTERVAL: Final = 0.2
PROGRESS_SECONDS: Final = 5.0
"""Seconds between two commits of a consumer that has acknowledged nothing: messages of others have passed."""
DRAIN_SECONDS: Final = 5.0
"""How long a lane that another member shall have waits for the acknowledgement of what was delivered of it."""
DROP_SECONDS: Final = 2.0
"""Time from a collection's drop on one lane until a lane without one counts as past it, once it is read to its end.

The drop may be decided later there; or another member has had it, and no message of the lane says so.
"""
SILENT_SECONDS: Final = 10.0
"""A lane is given up without a `poll` if its consumer has not polled for so long since another member shall have it."""

_WAIT: Final = 0.5
_PAUSE: Final = 0.2


LaneCallback: TypeAlias = Callable[[frozenset[str]], None]
"""Called with the names of lanes."""


class StreamOptions(TypedDict, total=False):
    """Options of a consumer of a stream (:meth:`Database.consumer`)."""

    group: str | None
    start: DeliverPolicy | None
    until: Moment | None
    filters: Sequence[Filter]
    schema: SchemaMode
    metrics: Metrics | None
    commit_interval: float
    exclusive: bool
    lease: float | None
    on_assigned: LaneCallback | None
    on_revoked: LaneCallback | None
    on_lost: LaneCallback | None


_Item: TypeAlias = Delivery | Mark | Exception


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
        member: GroupMember | None = None,
        on_assigned: LaneCallback | None = None,
        on_revoked: LaneCallback | None = None,
        on_lost: LaneCallback | None = None,
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
        threads: ConsumerThreads | None = None,
    ) -> None:
        """With a group, give either `positions`, for exclusive use, or `member`, which is closed with the consumer.

        `threads`: those of the connection; None: its own.
        """
        if schema not in get_args(SchemaMode):
            raise InvalidArgument(f"schema is 'written' or 'current', not {schema!r}")
        if not _is_seconds(commit_interval):
            raise InvalidArgument(f"commit_interval is a number of seconds from 0 on, not {commit_interval!r}")
        if group is not None and positions is None and member is None:
            raise InvalidArgument("a group needs a store for its positions: make the consumer with Database.consumer()")
        self.group = group
        self._positions = positions
        self._member = member
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._definitions = definitions
        self._files = imports
        self._schema: SchemaMode = schema
        self._metrics = metrics
        self._prefetch = prefetch_bytes
        self._interval = commit_interval
        self._committed_at = time.monotonic()
        self._behind = False
        self._acknowledged = False
        """Whether something was acknowledged since the last commit."""
        self._committing = threading.RLock()
        self._changed = threading.Condition()
        self._ready: deque[_Item] = deque()
        self._held = 0
        self._wakers: list[Callable[[], None]] = []
        self._closed = False
        self._newest_ms = 0
        self._places: dict[str, LaneProgress] = {}
        self._readers: dict[str, ChannelReader] = {}
        self._running = 0
        self._policy = policy or All()
        self._until = until_tick
        self._lanes = frozenset(_lanes(channels))
        """What the consumer reads, or divides with the other members of its group."""
        self._filters = tuple(filters)
        self._scanned = partial(
            scan,
            wal=wal,
            tail=tail,
            until_tick=until_tick,
            log=log,
            stall_timeout=stall_timeout,
            metrics=metrics,
        )
        self._claims: dict[str, int] = {}
        self._assigned: set[str] = set()
        """Lanes that are new to the user, and the ones that were lost: the next poll tells."""
        self._lost: set[str] = set()
        self._drops: dict[int | None, int] = {}
        """By collection the tick at which it was dropped, once that was delivered."""
        self._dropped_at = 0.0
        """When that was delivered last."""
        self._drop_over: Job | None = None
        """Wakes a waiting poll DROP_SECONDS later."""
        self._draining = False
        self._waiting = False
        """Whether other members have yet to release lanes for this one."""
        self._others_done = member is None
        """Whether the rest of the group has reached `until_tick`."""
        self.idle_reason = ""
        """Why this member of a group has no lane; "" if it has one."""
        self._polled = time.monotonic()
        self._full: list[ChannelReader] = []
        """Readers that wait for room."""
        self._threads = threads or ConsumerThreads()
        self._own_threads = threads is None
        self._heart = None if member is None else _Heart(self, member)
        self._tending: Job | None = None
        """Commits and gives up lanes after heartbeats, where that is due."""
        self._sending: dict[str, tuple[LaneProgress, int]] = {}
        """What the heartbeat that was begun commits."""
        self._refused = False
        """Whether the last heartbeat was refused, which is raised once."""
        self._begins = False
        """Whether there are lanes whose first position is to be committed."""
        try:
            self._begin()
        except BaseException:
            if self._own_threads:
                self._threads.close()
            raise

    def _begin(self) -> None:
        if self._member is not None:
            self._tending = self._threads.pool.start(self._tend, name=f"group {self.group!r}", at_once=False)
            try:
                self._follow(self._member.sync(self._claims), first=True)
            except BaseException:
                self._tending.stop()
                raise
            if self._heart is not None:
                self._threads.heartbeats.add(self._heart)
            return
        for lane in sorted(self._lanes):
            tick = None
            if self.group is not None and self._positions is not None:
                self._positions.lock(self.group, lane)
                tick = self._positions.get(self.group, lane)
            self._places[lane] = LaneProgress.at(tick, committed=None)
        self._read_lanes({split_channel(lane)[0] for lane in self._lanes}, at_once=True)

    # --- public methods -----------------------------------------------------------------------------------------------

    def poll(self, *, timeout: float) -> Delivery | None:
        """Return the next unit; None after `timeout` seconds, or once everything up to `until_tick` is delivered.

        Raises Closed, and the errors of a scan; after a retriable one, the next poll continues. Raises
        CollectionNotFound after the last unit of a collection that was dropped. A member of a group takes and gives up
        lanes here, and calls `on_assigned`, `on_revoked` and `on_lost`.
        """
        if self._closed:
            raise Closed("this consumer is closed: make a new one")
        found = self._next(Deadline.after(timeout))
        if found is None and not self._closed:
            self._commit_in_time()  # what was done last, although nothing comes any more
        return found

    def _next(self, end: Deadline) -> Delivery | None:
        self._polled = time.monotonic()
        while True:
            self._rebalance()
            with self._changed:
                while not self._deliverable() and not self._closed:
                    if self._dropped():
                        raise self._not_found()
                    if end.expired() or self.ended:
                        return None
                    if self._assigned or self._lost or self._drained():
                        break
                    end.wait(self._changed, maximum=_WAIT)
                if self.closed:  # during the wait
                    return None
                if not self._deliverable() or self._assigned or self._lost:
                    continue
                item = self._ready.popleft()
                if isinstance(item, Delivery):
                    if (found := self._delivered(item)) is not None:
                        return found
                    continue
                if isinstance(item, Mark):
                    self._marked(item)
                else:
                    for reader in self._readers.values():
                        if reader.failure is item:
                            reader.failure = None
            if isinstance(item, Exception):
                raise item
            self._commit_in_time()

    def _dropped(self) -> bool:
        """Return whether the collection was dropped and everything before was delivered."""
        if not self._drops or not self._places or self._until is not None or self._ready:
            return False
        over = time.monotonic() - self._dropped_at >= DROP_SECONDS
        return all(
            place.dropped or (over and collection_id_of(lane) in self._drops and self._caught_up(lane))
            for lane, place in self._places.items()
        )

    def _caught_up(self, lane: str) -> bool:
        reader = self._readers.get(split_channel(lane)[0])
        return reader is not None and reader.caught_up

    def _not_found(self) -> CollectionNotFound:
        tick = max(self._drops.values())
        group = f"; `millrace groups drop {self.group}` forgets its group" if self.group else ""
        return CollectionNotFound(
            f"the collection of {', '.join(sorted(self._places)[:3])} was dropped at tick {tick}, and this consumer has"
            f" delivered everything before: close it{group}"
        )

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
        if self._closed:
            return True
        idle = not self._running and not self._ready
        return idle and (self._member is None or (self._until is not None and self._others_done))

    @property
    def assignment(self) -> frozenset[str]:
        """The lanes that this consumer reads now: VChannels, or PChannels if it was made for PChannels."""
        with self._changed:
            return frozenset(lane for lane, place in self._places.items() if place.open)

    @property
    def lag(self) -> float:
        """Age in seconds of the newest delivered unit, or of the start position if nothing was delivered.

        It is 0 if everything in the log, or up to `until_tick`, was delivered; infinite if no time is known.
        """
        with self._changed:
            if not self._ready and all(each.caught_up for each in self._readers.values()):
                return 0.0
            newest = self._newest_ms or tick_physical_ms(min((each.tick for each in self._places.values()), default=0))
            return max(0.0, time.time() - newest / 1000) if newest else float("inf")

    @property
    def positions(self) -> dict[str, int]:
        """By lane the tick up to which everything is done."""
        with self._changed:
            return {lane: place.tick for lane, place in self._places.items()}

    def acknowledge(self, delivery: Delivery) -> None:
        """Mark a unit as done.

        The group does not get it again once all units before it are done and the position is committed. If its lane
        has become another member's, this has no effect.
        """
        with self._changed:
            self._acknowledged = True
            delivery.ack.done = True
            for place in delivery.places:
                assert isinstance(place, LaneProgress)
                place.settle()
                if place.drain_until is not None and not place.out:
                    self._wake()
            self._gauge(delivery.pchannel)
        self._commit_in_time()

    def commit(self) -> None:
        """Commit the group's positions; they are durable when this returns.

        Raises what prevents that. Raises GroupBusy if a lane with progress has become another member's; the others are
        committed then. Automatic commits in between ignore retriable errors, such as an unavailable store, and try
        again later.
        """
        self._committed_at = time.monotonic()
        with self._committing:
            lost: GroupBusy | None = None
            try:
                self._commit()
            except GroupBusy as error:
                if self._member is None:
                    raise
                lost = error
                self._follow(self._member.sync(self._claims))
                self._commit()  # what is left
            if lost is not None:
                raise lost

    def _commit(self, *, later: bool = False, lanes: frozenset[str] | None = None) -> None:
        if self.group is None:
            return
        with self._committing:
            moved = self._moved(later=later, lanes=lanes)
            ticks = {lane: tick for lane, (_, tick) in moved.items()}
            if not ticks:
                return
            try:
                if self._member is not None:
                    self._member.move(ticks, later=later)
                elif self._positions is not None:
                    self._positions.move(self.group, ticks)
            except BaseException:
                self._acknowledged = True
                raise
            self._behind = False
            for place, tick in moved.values():
                place.sent = tick
                if self._member is None or not later:
                    place.committed = tick

    def _moved(self, *, later: bool, lanes: frozenset[str] | None = None) -> dict[str, tuple[LaneProgress, int]]:
        """Return the lanes with progress that is to be committed, and their ticks."""
        with self._changed:
            if lanes is None:
                self._acknowledged = False
            return {
                lane: (place, place.tick)
                for lane, place in self._places.items()
                if place.started
                and place.tick > (place.sent if later else place.committed)
                and (lanes is None or lane in lanes)
            }

    def on_ready(self, call: Callable[[], None]) -> None:
        """Call `call` once, from any thread, when a poll would return at once or the consumer has ended."""
        with self._changed:
            due = self._assigned or self._lost or self._drained() or self._dropped()
            if not self._deliverable() and not self.ended and not due:
                self._wakers.append(call)
                return
        call()

    def close(self) -> None:
        """Commit the positions, leave the group and close. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            readers = list(self._readers.values())
            self._wake()
        if self._heart is not None:
            self._threads.heartbeats.remove(self._heart)
        for job in (self._tending, self._drop_over):
            if job is not None:
                job.stop()
        for each in readers:
            each.stop()
        with self._changed:
            end = Deadline.after(10.0)
            while self._running and not end.expired():
                end.wait(self._changed)
        try:
            with self._committing:  # after a heartbeat that was begun
                self._commit()
        except GroupBusy:
            if self._member is None:
                raise
            self._commit_each()
        finally:
            if self._own_threads:
                self._threads.close()
            if self._positions is not None:
                self._positions.close()
            if self._member is not None:
                self._member.leave()

    def _commit_each(self) -> None:
        """Commit what is still this consumer's."""
        for lane in sorted(self._places):
            try:
                self._commit(lanes=frozenset({lane}))
            except GroupBusy as error:
                _log.warning("group %r: what was acknowledged last is delivered again: %s", self.group, error)

    # --- lanes --------------------------------------------------------------------------------------------------------

    def _begin_heartbeat(self, member: GroupMember) -> dict[str, Any] | None:
        """Begin to renew the membership; return the request, or None if another call is under way or it is closed.

        An answer is followed before the next one, and before a lane is released: nothing is committed until
        :meth:`_end_heartbeat`, which the same thread calls.
        """
        if not self._committing.acquire(blocking=False):
            return None
        if self.closed:
            self._committing.release()
            return None
        try:
            self._sending = {}
            if self._commit_is_due():
                self._committed_at = time.monotonic()
                self._sending = self._moved(later=True)
            return member.asking(self._claims, {lane: tick for lane, (_, tick) in self._sending.items()})
        except BaseException:
            self._committing.release()
            raise

    def _end_heartbeat(self, member: GroupMember, answer: Answer) -> None:
        """Follow the answer to a request that was begun."""
        try:
            moved = not isinstance(answer, Exception) and bool(answer.get("moved"))
            for place, tick in self._sending.values() if moved else ():
                place.sent = max(place.sent, tick)
            if self._sending and not moved:  # the call or a lane was lost, or a server of an earlier build was called
                self._acknowledged = True
            if isinstance(answer, Exception):
                self._not_renewed(answer)
            else:
                self._follow(member.followed(answer), later=True)
                self._refused = False
        finally:
            self._committing.release()
        silent = self._draining and time.monotonic() - self._polled > SILENT_SECONDS
        if self._tending is not None and (self._begins or silent or (self._commit_is_due() and self._uncommitted())):
            self._tending.wake()

    def _not_renewed(self, error: Exception) -> None:
        code = error.code if isinstance(error, MillraceError) else type(error).__name__
        _log.info("the membership of group %r was not renewed: %s: %s", self.group, code, error)
        if not (isinstance(error, MillraceError) and error.retriable) and not self._refused:
            self._refused = True
            with self._changed:
                self._put([error])

    def _uncommitted(self) -> bool:
        """Return whether something was done that is not committed, although nothing comes any more."""
        with self._changed:
            return any(place.started and place.tick > place.sent for place in self._places.values())

    def _tend(self) -> None:
        """Commit what is due, and give up lanes that a consumer which does not poll shall give up."""
        if self._closed:
            return
        try:
            if self._begins:
                self._begins = False
                self._commit_quietly(later=False)
            self._commit_in_time()
            if time.monotonic() - self._polled > SILENT_SECONDS:
                self._release_drained(notify=False)
        except MillraceError as error:
            self._not_renewed(error)

    def _follow(self, found: GroupShare, *, first: bool = False, later: bool = False) -> None:
        """Take the lanes that are new, drop those that are lost, and drain those that another member shall have.

        `later`: the first position of a new lane is committed by :meth:`_tend`.
        """
        changed: set[str] = set()
        came = False
        with self._changed:
            if self._closed:
                return
            for lane, place in list(self._places.items()):
                held = found.held.get(lane)
                if held is None or (held.claim != self._claims.get(lane)):
                    self._drop(lane, place)
                    self._lost.add(lane)
                    changed.add(split_channel(lane)[0])
            for lane, held in found.held.items():
                if lane not in self._places:
                    self._places[lane] = LaneProgress.at(held.start, committed=held.tick)
                    self._assigned.add(lane)
                    changed.add(split_channel(lane)[0])
                    came = True
            self._claims = {lane: held.claim for lane, held in found.held.items()}
            for lane, place in self._places.items():
                if lane not in found.share and place.drain_until is None:
                    place.drain_until = time.monotonic() + DRAIN_SECONDS
            self._draining = any(place.drain_until is not None for place in self._places.values())
            self._waiting = bool(found.share - found.held.keys())
            self.idle_reason = found.reason
            self._others_done = found.done
            self._wake()
        if changed:
            self._read_lanes(changed, at_once=first)
        if came:  # a first start is written at once: nothing before the first commit is skipped by the next
            self._begins = self._begins or later
            if not later:
                self._commit_quietly(later=False)

    @property
    def _heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats: fewer while lanes change hands."""
        interval = HEARTBEAT_SECONDS if self._member is None else self._member.heartbeat
        return min(interval, SETTLING_SECONDS) if self._draining or self._waiting else interval

    def _drop(self, lane: str, place: LaneProgress) -> None:
        place.gone = True
        place.out.clear()
        del self._places[lane]
        self._assigned.discard(lane)

    def _drained(self) -> bool:
        """Return whether a lane can be released."""
        if not self._draining:
            return False
        now = time.monotonic()
        return any(
            place.drain_until is not None and (not place.out or now >= place.drain_until)
            for place in self._places.values()
        )

    def _rebalance(self) -> None:
        """Tell the user of lanes that came and went, and release those that are drained."""
        if self._lost:
            with self._changed:
                lost, self._lost = frozenset(self._lost), set()
            if self._on_lost is not None:
                self._on_lost(lost)
        if self._draining:
            with self._changed:
                drained = self._drained()
            if drained:
                self._release_drained(notify=True)
        if self._assigned:
            with self._changed:
                came, self._assigned = frozenset(self._assigned), set()
            if self._on_assigned is not None:
                self._on_assigned(came)

    def _release_drained(self, *, notify: bool) -> None:
        assert self._member is not None
        now = time.monotonic()
        with self._changed:
            lanes = frozenset(
                lane
                for lane, place in self._places.items()
                if place.drain_until is not None and (not place.out or now >= place.drain_until or not notify)
            )
        if not lanes:
            return
        if notify and self._on_revoked is not None:
            self._on_revoked(lanes)
        with self._committing:
            try:
                self._commit(lanes=lanes)
                self._member.release(lanes)
            except GroupBusy:
                return  # lost meanwhile: the next answer of the group says so
            except MillraceError as error:
                if not error.retriable:
                    raise
                _log.info("group %r: lanes are given up later: %s: %s", self.group, error.code, error)
                with self._changed:
                    self._changed.wait(jittered(_PAUSE))
                return
            with self._changed:
                for lane in lanes:
                    if (place := self._places.get(lane)) is not None:
                        self._drop(lane, place)
                        self._claims.pop(lane, None)
                if not notify:
                    self._lost |= lanes
                self._draining = any(place.drain_until is not None for place in self._places.values())
        self._read_lanes({split_channel(lane)[0] for lane in lanes})

    def _commit_quietly(self, *, later: bool) -> None:
        try:
            self._commit(later=later)
        except MillraceError as error:
            if not error.retriable and not (self._member is not None and isinstance(error, GroupBusy)):
                raise
            if not self._behind:
                _log.warning("the position of group %r is committed later: %s: %s", self.group, error.code, error)
            self._behind = True

    # --- reading ahead ------------------------------------------------------------------------------------------------

    def _deliverable(self) -> bool:
        """Return whether there is an item to deliver. A member of a group also needs an unexpired lease."""
        return bool(self._ready) and not (self._member is not None and self._member.expired)

    def _delivered(self, delivery: Delivery) -> Delivery | None:
        """Note that a unit is delivered; None if its lanes are no longer delivered here."""
        self._held -= delivery.held_bytes
        if self._full and self._held < self._prefetch:
            for reader in self._full:
                if reader.job is not None:
                    reader.job.wake()
            self._full.clear()
        places = tuple(place for place in delivery.places if isinstance(place, LaneProgress) and place.open)
        if not places:
            return None
        delivery.places = places
        for place in places:
            place.out.append(delivery.ack)  # not the delivery, whose rows would stay in memory until it is acknowledged
        if delivery.drops_collection and delivery.vchannel in self._places:
            for place in places:
                place.dropped = True
            self._drops[collection_id_of(delivery.vchannel)] = delivery.tick
            self._dropped_at = time.monotonic()
            if self._drop_over is None:
                self._drop_over = self._threads.pool.start(
                    self._tell_waiting, name=f"group {self.group!r}", at_once=False
                )
            self._drop_over.wake(DROP_SECONDS)
        physical = delivery.unit.commit if isinstance(delivery.unit, ImmutableTxn) else delivery.unit
        self._newest_ms = physical.physical_ms
        delivery.lag = max(0.0, time.time() - physical.physical_ms / 1000)
        if self._metrics is not None:
            labels = (self.group or "", delivery.pchannel)
            self._metrics.consumer_lag_seconds.labels(*labels).set(delivery.lag)
            self._metrics.consumer_delivery_delay_seconds.labels(*labels).observe(delivery.lag)
        self._gauge(delivery.pchannel)
        return delivery

    def _marked(self, mark: Mark) -> None:
        """Note that everything up to a tick was delivered before this."""
        mark.queued = False
        for place in mark.places:
            if place.open:
                place.seen = max(place.seen, mark.tick)
                place.settle()

    def _gauge(self, pchannel: str) -> None:
        if self._metrics is not None and pchannel in self._readers:
            count = sum(len(place.out) for place in self._readers[pchannel].places.values())
            self._metrics.consumer_unacknowledged.labels(self.group or "", pchannel).set(count)

    def _commit_in_time(self) -> None:
        if self._commit_is_due():
            self._committed_at = time.monotonic()
            self._commit_quietly(later=True)

    def _commit_is_due(self) -> bool:
        waits = self._acknowledged or self._until is not None  # others may wait for the group's end
        interval = self._interval if waits else max(self._interval, PROGRESS_SECONDS)
        return time.monotonic() - self._committed_at >= interval

    def _read_lanes(self, pchannels: Collection[str], *, at_once: bool = False) -> None:
        """Read the present lanes of these PChannels, from where each was queued.

        `at_once` opens the scans in this thread, which raises their errors.
        """
        made: list[ChannelReader] = []
        with self._changed:
            for pchannel in sorted(pchannels):
                before = self._readers.pop(pchannel, None)
                if before is not None:
                    before.stop()
                places = {
                    lane: place
                    for lane, place in self._places.items()
                    if split_channel(lane)[0] == pchannel and not place.gone
                }
                if places and not self._closed:
                    reader = self._readers[pchannel] = ChannelReader(pchannel, places)
                    made.append(reader)
            self._wake()
        if at_once:
            for reader in made:
                self._open(reader)
        with self._changed:
            self._running += len(made)
        for reader in made:
            reader.steps = self._reading(reader)
            named = f"group {self.group!r} at {reader.pchannel}"
            reader.job = self._threads.pool.start(partial(self._read_on, reader), name=named, at_once=False)
            reader.job.wake()

    def _open(self, reader: ChannelReader) -> Scan:
        """Open the scan of a reader where the first of its lanes is."""
        vchannels = {lane for lane in reader.places if lane != reader.pchannel}
        own: list[Filter] = [VChannelFilter(vchannels)] if vchannels else []
        opened = partial(self._scanned, reader.pchannel, filters=[*own, *self._filters])
        new = [place for place in reader.places.values() if not place.started]
        found: Scan | None = None
        if new:
            found = opened(self._policy)
            with self._changed:
                for place in new:
                    place.tick = place.seen = place.queued = found.confirmed_tick
                    place.started = True
        if found is None or len(new) < len(reader.places):
            if found is not None:
                found.close()
            with self._changed:
                start = min(place.queued for place in reader.places.values())
            found = opened(StartAfterTick(start))
        with self._changed:
            reader.scan = found
            stopped = reader.stopped or self._closed
        if stopped:
            found.close()
        return found

    def _read_on(self, reader: ChannelReader) -> float | None:
        """Make the next step of reading ahead; see :attr:`ChannelReader.steps`."""
        assert reader.steps is not None
        try:
            return next(reader.steps)
        except StopIteration:
            if reader.job is not None:
                reader.job.stop()
            return None

    def _reading(self, reader: ChannelReader) -> Iterator[float | None]:
        """Read ahead on one PChannel until the scan ends or fails with an error that is not retriable."""
        found = reader.scan
        try:
            while not self._closed and not reader.is_stopped() and (found is None or not found.ended):
                try:
                    if found is None:
                        found = self._open(reader)
                        if self.group is not None:
                            self._commit_quietly(later=False)
                    parts = found.poll_once()
                    portion: list[Delivery] = []
                    for following in self._portions(reader.pchannel, parts or ()):
                        # Everything before a unit was queued with it or earlier.
                        if portion:
                            yield from self._room(reader)
                            if not self._hand_over(reader, portion, portion[-1].tick, caught_up=False):
                                return
                        portion = following
                    if portion:
                        yield from self._room(reader)
                    caught_up = not parts and found.caught_up
                    if not self._hand_over(reader, portion, found.confirmed_tick, caught_up=caught_up):
                        return
                    yield 0.0 if parts is not None or reader.job is None else found.on_news(reader.job.wake)
                except MillraceError as error:
                    with self._changed:
                        if reader.is_stopped():
                            return
                        if not error.retriable:
                            self._put([error])
                            return
                        if reader.failure is None:  # nobody may poll for as long as it lasts
                            reader.failure = error
                            self._put([error])
                    if found is not None:
                        found.close()
                    found = None
                    yield jittered(_PAUSE)
            with self._changed:
                reader.caught_up = True  # the scan has reached `until_tick`
        except Exception as error:
            with self._changed:
                if not reader.stopped:
                    self._put([error])
        finally:
            with self._changed:
                self._running -= 1
                self._wake()

    def _room(self, reader: ChannelReader) -> Iterator[float | None]:
        """Wait until there is room for deliveries."""
        while True:
            with self._changed:
                if self._held < self._prefetch or self._closed or reader.stopped:
                    return
                self._full.append(reader)
            yield None

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
            _decoder=decoder,
        )

    def _hand_over(
        self, reader: ChannelReader, deliveries: Sequence[Delivery], through: int, *, caught_up: bool
    ) -> bool:
        """Queue deliveries, and note that everything up to tick `through` is queued; return whether it goes on."""
        with self._changed:
            if self._closed or reader.stopped:
                return False
            self._queue(reader, deliveries, through, caught_up=caught_up)
            return True

    def _queue(self, reader: ChannelReader, deliveries: Sequence[Delivery], through: int, *, caught_up: bool) -> None:
        new: list[_Item] = []
        for delivery in deliveries:
            delivery.places = reader.of(delivery.vchannel, delivery.tick)
            if delivery.places:
                self._held += delivery.held_bytes
                new.append(delivery)
        reader.caught_up = caught_up
        behind = tuple(place for place in reader.places.values() if place.seen < through)
        for place in reader.places.values():
            place.queued = max(place.queued, through)
        if not new and reader.mark is not None and reader.mark.queued:  # nobody polls, and no delivery is in between
            reader.mark.places, reader.mark.tick = behind, through
        elif new or behind:
            reader.mark = Mark(behind, through)
            self._put([*new, reader.mark])

    def _put(self, items: Sequence[_Item]) -> None:
        self._ready.extend(items)
        self._wake()

    def _tell_waiting(self) -> None:
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for call in wakers:
            call()


class _Heart:
    """A consumer as its connection's heartbeats need it (implements Heart)."""

    def __init__(self, consumer: Consumer, member: GroupMember) -> None:
        self._consumer = consumer
        self._member = member

    @property
    def interval(self) -> float:
        return self._consumer._heartbeat_seconds

    def begin(self) -> dict[str, Any] | None:
        return self._consumer._begin_heartbeat(self._member)

    def end(self, answer: Answer) -> None:
        self._consumer._end_heartbeat(self._member, answer)

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._member.send(request)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0  # NaN is not


def _lanes(channels: Sequence[str]) -> Iterator[str]:
    """Yield the lanes of channels: a PChannel's VChannels are part of it."""
    for channel in channels:
        pchannel, vchannel = split_channel(channel)
        if not vchannel or pchannel not in channels:
            yield channel
