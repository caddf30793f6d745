"""The event store: commands in, states out. One collection holds the events of all aggregates of a kind.

    with millrace.connect() as db:
        store = EventStore.open(db, "accounts", accounts)
        store.append("A-17", Opened("Ada"), Deposited(100, "EUR"), expected_version=0)
        store.execute("A-17", lambda account: [Withdrawn(30)] if account.balance >= 30 else [])
        store.load("A-17").state.balance
        store.load("A-17", at="2026-11-01T00:00:00Z").state.balance

An event is a row with the aggregate's id as its key, so an aggregate's events are on one VChannel, in order. They are
ordinary rows: SQL, consumers, flows and published tables read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, Self, TypeVar
from uuid import UUID, uuid4

import pydantic_core

from millrace.base import failpoint
from millrace.base.errors import InvalidArgument, MillraceError, VersionConflict
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.message.ids import Moment, resolve_tick
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.appending import ATTEMPTS, Appender, check_key, pause_between
from millrace.streams.sourcing.events import ERASED, Recorded
from millrace.streams.sourcing.groups import EVENT_SCHEMA, Appended, Command
from millrace.streams.sourcing.rebuild import Rebuilt, digest_of, sorted_events, split_events
from millrace.streams.sourcing.snapshots import SNAPSHOT_SCHEMA, Snapshots
from millrace.streams.sourcing.states import Known, States

S = TypeVar("S")

CACHE: Final = 10_000
"""Aggregates whose states an event store keeps in memory."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """An aggregate: its state after `version` events, as read at `tick`. Version 0 is the initial state."""

    key: str
    state: S
    version: int
    tick: int


class EventStore(Generic[S]):
    """The aggregates of one kind. Thread-safe; any number of stores, in any processes, may use one collection."""

    def __init__(
        self,
        database: Database,
        collection: Collection,
        aggregate: Aggregate[S],
        *,
        snapshots: Snapshots[S] | None = None,
        cache: int = CACHE,
    ) -> None:
        """Use an existing collection; :meth:`open` creates it. Raises InvalidArgument if it has other columns."""
        _check_columns(collection)
        self.collection = collection
        self.aggregate = aggregate
        self.snapshots = snapshots
        self._database = database
        self._states = States(database, collection, aggregate, snapshots=snapshots, size=cache)
        self._appender = Appender(database, collection, aggregate, self._states, snapshots)

    @classmethod
    def open(
        cls,
        database: Database,
        name: str,
        aggregate: Aggregate[S],
        *,
        vchannels: int = 1,
        snapshot_every: int | None = None,
        cache: int = CACHE,
    ) -> Self:
        """Open the event store in collection `name`, and create that if it does not exist.

        Commands to different VChannels are judged in parallel; `vchannels` counts when the collection is created. With
        `snapshot_every`, the states of aggregates are stored in the collection ``<name>_snapshots`` every so many
        events.

        Raises InvalidArgument, CollectionExists if the collection holds something else.
        """
        if snapshot_every is not None and snapshot_every < 1:
            raise InvalidArgument(f"snapshots are made every 1 or more events, not {snapshot_every}")
        events = database.create_collection(name, EVENT_SCHEMA, vchannels=vchannels, exist_ok=True)
        snapshots = None
        if snapshot_every is not None:
            made = database.create_collection(
                f"{events.name}_snapshots", SNAPSHOT_SCHEMA, vchannels=vchannels, exist_ok=True
            )
            snapshots = Snapshots(made, aggregate, every=snapshot_every)
        return cls(database, events, aggregate, snapshots=snapshots, cache=cache)

    # --- commands -----------------------------------------------------------------------------------------------------

    def append(
        self,
        key: str,
        *events: Any,
        expected_version: int | None = None,
        command: UUID | None = None,
        at: datetime | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Appended:
        """Append events to an aggregate, all at one tick, if it has `expected_version`.

        The events are durable and decided when the call returns. Without an expected version, they follow whatever is
        there. `command` identifies the command: repeat a call whose outcome is unknown (LogUnavailable,
        DeadlineExceeded) with the same id and expected version, and it has one effect. (Without an expected version,
        this costs a read of the aggregate; an erased one has forgotten its commands.) `at` says when the events
        happened (default: now), `metadata` is stored with each.

        Raises VersionConflict with the current version, InvalidArgument, AppendRejected, EventUndecodable.
        """
        check_key(key)
        if command is not None and expected_version is None:
            before = self._states.version_after(key, command)
            if before is not None:
                return Appended(key, before, self._states.read([key])[key].tick, repeated=True)
        made = Command(
            key, events, expected_version, command or uuid4(), at=at, metadata={} if metadata is None else metadata
        )
        [found] = self.append_all([made])
        if isinstance(found, MillraceError):
            raise found
        return found

    def execute(
        self,
        key: str,
        decide: Callable[[S], Iterable[Any] | None],
        *,
        attempts: int = ATTEMPTS,
        command: UUID | None = None,
    ) -> Loaded[S]:
        """Decide on an aggregate's state and append the events that `decide` returns, if any.

        If another command wins, the aggregate is loaded and `decide` called again, up to `attempts` times. `decide`
        must not change the state. If it returns nothing or raises, that is for a state with everything that was
        appended before the call. Returns the aggregate after its events.

        Repeat a call whose outcome is unknown with the same `command`: if its events are there, nothing is decided
        again. (An erased aggregate has forgotten its commands.)

        Raises VersionConflict after the last attempt, what `decide` raises, and the errors of :meth:`append`.
        """
        if attempts < 1:
            raise InvalidArgument(f"a command is tried 1 or more times, not {attempts}")
        check_key(key)
        if command is not None and self._states.version_after(key, command) is not None:
            return _loaded(key, self._states.read([key], lend=True)[key])
        identity = command or uuid4()
        before = self._states.cached(key, lend=True)
        fresh, conflicts = False, 0
        while True:
            if before is None:
                before, fresh = self._states.read([key], lend=True)[key], True
            try:
                events = list(decide(before.state) or ())
            except Exception:
                if fresh:
                    raise
                events = []
            if not events:
                if fresh:
                    return _loaded(key, before)
                before = None  # to do nothing, or to refuse, is decided on what is there now, not on the cache
                continue
            try:
                done = self.append(key, *events, expected_version=before.version, command=identity)
            except VersionConflict:
                conflicts += 1
                if conflicts == attempts:
                    raise
                pause_between(conflicts)
                before, fresh = None, False
                continue
            after = self._states.cached(key, lend=True)
            if after is None or after.version < done.version:
                after = self._states.read([key], lend=True)[key]
            return _loaded(key, after)

    def append_all(self, commands: Sequence[Command]) -> list[Appended | MillraceError]:
        """Append commands to different aggregates, many in one entry of the log; return each one's outcome, in order.

        Each command takes effect or not by itself; its error is in its place, as :meth:`append` would raise it. Several
        commands of one aggregate are appended one after the other.

        Raises LogUnavailable or DeadlineExceeded if outcomes are unknown: repeat the same commands. Raises
        InvalidArgument, before anything is sent, if a command is not valid.
        """
        return self._appender.append(commands)

    def erase(self, key: str, *, expected_version: int | None = None, command: UUID | None = None) -> Appended:
        """Erase the data of all events of an aggregate; its version grows by one, and its state is the initial one.

        Reads from the tick on see no earlier event. Reads before it, and the log, have them until retention removes
        them (docs/event-sourcing.md). Raises the errors of :meth:`append`.
        """
        [found] = self.append_all([Command(key, (), expected_version, command or uuid4(), erases=True)])
        if isinstance(found, MillraceError):
            raise found
        failpoint.hit("sourcing.erased")
        if self.snapshots is not None:
            self.snapshots.forget(key)
        return found

    # --- reads --------------------------------------------------------------------------------------------------------

    def load(self, key: str, *, at: Moment | None = None) -> Loaded[S]:
        """Return an aggregate now, with everything that was appended before the call, or as of `at`.

        An aggregate without events has version 0. Raises EventUndecodable, EventStreamDamaged, and the errors of
        :meth:`millrace.Collection.get`.
        """
        return self.load_all([key], at=at)[key]

    def load_all(self, keys: Iterable[str], *, at: Moment | None = None) -> dict[str, Loaded[S]]:
        """Return aggregates by key, by one read; see :meth:`load`."""
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            check_key(key)
        found = self._states.read(wanted, None if at is None else resolve_tick(at), lend=True)
        return {key: _loaded(key, found[key]) for key in wanted}

    def history(self, key: str, *, at: Moment | None = None, after: Moment | None = None) -> list[Recorded]:
        """Return an aggregate's events in order, as of `at` (default: now); with `after`, those since that moment.

        Raises EventUndecodable.
        """
        rows = sorted(
            self.collection.get([key], at=None if at is None else resolve_tick(at)).to_pylist(),
            key=lambda row: row["version"],
        )
        if after is not None:
            known = self.collection.get([key], at=resolve_tick(after), columns=["version"])
            last = max(known["version"].to_pylist(), default=0)
            rows = [row for row in rows if row["version"] > last]
        return [self._recorded(row) for row in rows]

    def states(self, *, at: Moment | None = None, passes: int = 1) -> Iterator[Loaded[S]]:
        """Yield all aggregates as of `at` (default: now), in no order, each folded from its events alone.

        Snapshots are not used. All events are read once in each pass, and a pass holds one of `passes` parts of them in
        memory: about 100 bytes and their data for each.
        """
        tick = self._tick_of_all() if at is None else resolve_tick(at)
        for part in range(self._checked(passes)):
            table = sorted_events(self.collection, tick, part, passes)
            for events in split_events(table):
                yield Loaded(events.key, events.state(self.aggregate, None), int(events.versions[-1]), tick)

    def rebuild(self, *, at: Moment | None = None, passes: int = 1) -> Rebuilt:
        """Fold all aggregates as of `at` from their events, as :meth:`states` does; return counts and a digest.

        The digest is a function of the keys, versions and states: it is equal whenever and wherever they are rebuilt.
        """
        tick = self._tick_of_all() if at is None else resolve_tick(at)
        found = Rebuilt(tick)
        for part in range(self._checked(passes)):
            table = sorted_events(self.collection, tick, part, passes)
            for events in split_events(table):
                state = self.aggregate.encode(events.state(self.aggregate, None))
                found.add(events.key, int(events.versions[-1]), state, len(events))
        return found

    def digest(self, states: Iterable[Loaded[S]]) -> str:
        """Return the digest of these aggregates, as :meth:`rebuild` computes it."""
        return digest_of((each.key, each.version, self.aggregate.encode(each.state)) for each in states)

    # --- inside: reading ----------------------------------------------------------------------------------------------

    def _checked(self, passes: int) -> int:
        if type(passes) is not int or passes < 1:
            raise InvalidArgument(f"a rebuild has 1 or more passes, not {passes!r}")
        return passes

    def _tick_of_all(self) -> int:
        return self._database.current_tick(self.collection.definition.pchannels)

    def _recorded(self, row: Mapping[str, Any]) -> Recorded:
        kind = row["type"]
        data = None if kind == ERASED else self.aggregate.events.decode(kind, row["type_version"], row["data"])
        metadata = {} if row["metadata"] is None else pydantic_core.from_json(row["metadata"])
        return Recorded(row["aggregate"], row["version"], kind, data, UUID(row["command"]), row["at"], metadata)


def _check_columns(collection: Collection) -> None:
    """Raise InvalidArgument if a collection lacks columns of events, or needs others."""
    there = {each.name: each for each in collection.schema.fields}
    own = {each.name for each in EVENT_SCHEMA.fields}
    lacking = [each.name for each in EVENT_SCHEMA.fields if there.get(each.name) != each]
    needed = [each.name for each in collection.schema.fields if each.name not in own and not each.nullable]
    if lacking or needed or collection.schema.key_names != EVENT_SCHEMA.key_names:
        raise InvalidArgument(
            f"collection {collection.name!r} has not the columns of events: create it with EventStore.open; further"
            " columns may be null"
        )


def _loaded(key: str, known: Known[S]) -> Loaded[S]:
    return Loaded(key, known.state, known.version, known.tick)
