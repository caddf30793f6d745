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

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar
from uuid import UUID, uuid4

import pyarrow as pa
import pydantic_core

from millrace.base.errors import (
    AppendRejected,
    EntryTooLarge,
    EventStreamDamaged,
    EventUndecodable,
    InvalidArgument,
    MillraceError,
    TickTooOld,
    VersionConflict,
)
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.client.produce.rows import conform, insert_message, key_rows, partition_of
from millrace.message.ids import Moment, pchannel_of, resolve_tick
from millrace.message.keys import vchannel_index
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.commands import (
    MAX_VERSION,
    Answer,
    Condition,
    ConditionalSender,
    Verdict,
    conditional,
)
from millrace.streams.sourcing.events import ERASED, Recorded
from millrace.streams.sourcing.rebuild import Rebuilt, StreamFolder, digest_of, sorted_events
from millrace.streams.sourcing.snapshots import SNAPSHOT_SCHEMA, Snapshot, Snapshots

S = TypeVar("S")

_log: Final = logging.getLogger(__name__)

EVENT_SCHEMA: Final = CollectionSchema(
    (
        FieldSpec("aggregate", "string", False),
        FieldSpec("version", "int64", False),
        FieldSpec("type", "string", False),
        FieldSpec("type_version", "int32", False),
        FieldSpec("data", "json", False),
        FieldSpec("command", "uuid", False),
        FieldSpec("at", "timestamp", False),
        FieldSpec("metadata", "json", True),
    ),
    "aggregate",
    event_time="at",
)
"""The columns of an event collection. The field types need chain version 4, as conditional appends do."""

_COLUMNS: Final = ("aggregate", "version", "type", "type_version", "data", "command")
CACHE: Final = 10_000
"""Aggregates whose states an event store keeps in memory."""
MAX_COMMANDS: Final = 1_000
"""Commands in one entry of the log."""
MAX_ENTRY_BYTES: Final = 4 << 20
"""JSON of the events in one entry of the log; a command with more is an entry of its own."""
TURN_COMMANDS: Final = 10_000
"""Commands that are judged at once. Bounds the states that one call holds."""
ATTEMPTS: Final = 10
"""How often a command is judged anew before its conflict, or the chain's refusal, is raised."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """An aggregate: its state after `version` events, as read at `tick`. Version 0 is the initial state."""

    key: str
    state: S
    version: int
    tick: int


@dataclass(frozen=True, slots=True)
class Appended:
    """The outcome of a command: the aggregate's version after it."""

    key: str
    version: int
    tick: int
    """The tick at which the events became visible; of a repeated command, one after it."""
    repeated: bool = False
    """Whether the command had been appended before, and this call appended nothing."""


@dataclass(frozen=True, slots=True)
class Command:
    """Events to append to one aggregate, at once or not at all.

    Without an `expected_version`, they follow whatever the aggregate has. A command with the `id` of one that took
    effect changes nothing and gets its outcome, if the expected version is that command's.
    """

    key: str
    events: Sequence[Any]
    expected_version: int | None = None
    id: UUID = field(default_factory=uuid4)
    at: datetime | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    erases: bool = False


@dataclass(slots=True)
class _Entry(Generic[S]):
    """An aggregate in the cache: it had `version` at `tick`."""

    state: S
    version: int
    tick: int
    lent: bool = False
    """Whether a caller may hold the state: then the next events are folded on a copy."""
    claimed: bool = False
    """Whether somebody folds further events on the state. Nobody else may use it then, nor its version's successor."""

    def loaded(self, key: str) -> Loaded[S]:
        return Loaded(key, self.state, self.version, self.tick)


class _Appenders(NamedTuple):
    """Who appended an aggregate's events, as a call has read them."""

    first: int
    """The first version that is known."""
    versions: Mapping[UUID, Sequence[int]]
    """By command."""


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
        if cache < 1:
            raise InvalidArgument(f"an event store caches 1 or more aggregates, not {cache}")
        self.collection = collection
        self.aggregate = aggregate
        self.snapshots = snapshots
        self._database = database
        self._sender = ConditionalSender(database)
        self._partition = partition_of(collection.definition, None)
        self._size = cache
        self._guard = threading.Lock()
        self._entries: OrderedDict[str, _Entry[S]] = OrderedDict()
        self._ticks: dict[str, int] = {}
        """By PChannel a tick that was decided already."""

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
        DeadlineExceeded) with the same id and expected version, and it has one effect. `at` says when the events
        happened (default: now), `metadata` is stored with each.

        Raises VersionConflict with the current version, InvalidArgument, AppendRejected, EventUndecodable.
        """
        made = Command(
            key, events, expected_version, command or uuid4(), at=at, metadata={} if metadata is None else metadata
        )
        [found] = self.append_all([made])
        if isinstance(found, MillraceError):
            raise found
        return found

    def execute(
        self, key: str, decide: Callable[[S], Iterable[Any]], *, attempts: int = ATTEMPTS, command: UUID | None = None
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
        if command is not None and command in self._commands_of(key):
            return self._read([key], lend=True)[key].loaded(key)
        identity = command or uuid4()
        before = self._cached(key, lend=True)
        fresh, conflicts = False, 0
        while True:
            if before is None:
                before, fresh = self._read([key], lend=True)[key], True
            try:
                events = list(decide(before.state))
            except Exception:
                if fresh:
                    raise
                events = []
            if not events:
                if fresh:
                    return before.loaded(key)
                before = None  # to do nothing, or to refuse, is decided on what is there now, not on the cache
                continue
            try:
                done = self.append(key, *events, expected_version=before.version, command=identity)
            except VersionConflict:
                conflicts += 1
                if conflicts == attempts:
                    raise
                before, fresh = None, False
                continue
            after = self._cached(key, lend=True)
            if after is None or after.version != done.version:
                after = self._read([key], lend=True)[key]
            return after.loaded(key)

    def append_all(self, commands: Sequence[Command]) -> list[Appended | MillraceError]:
        """Append commands to different aggregates, many in one entry of the log; return each one's outcome, in order.

        Each command takes effect or not by itself; its error is in its place, as :meth:`append` would raise it. Several
        commands of one aggregate are appended one after the other.

        Raises LogUnavailable or DeadlineExceeded if outcomes are unknown: repeat the same commands. Raises
        InvalidArgument, before anything is sent, if a command is not valid.
        """
        encoded = [self._encoded(each) for each in commands]
        found: list[Appended | MillraceError | None] = [None] * len(commands)
        for start in range(0, len(commands), TURN_COMMANDS):
            waiting = list(range(start, min(start + TURN_COMMANDS, len(commands))))
            read: dict[str, _Appenders] = {}
            while waiting:
                turn: dict[str, int] = {}
                later = []
                for place in waiting:
                    later.append(place) if commands[place].key in turn else turn.setdefault(commands[place].key, place)
                for place, outcome in self._round(commands, encoded, list(turn.values()), read).items():
                    found[place] = outcome
                waiting = later
        return [each for each in found if each is not None]

    def erase(self, key: str, *, expected_version: int | None = None, command: UUID | None = None) -> Appended:
        """Erase the data of all events of an aggregate; its version grows by one, and its state is the initial one.

        Reads from the tick on see no earlier event. Reads before it, and the log, have them until retention removes
        them (docs/event-sourcing.md). Raises the errors of :meth:`append`.
        """
        [found] = self.append_all([Command(key, (), expected_version, command or uuid4(), erases=True)])
        if isinstance(found, MillraceError):
            raise found
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
            _check_key(key)
        found = self._read(wanted, None if at is None else resolve_tick(at), lend=True)
        return {key: found[key].loaded(key) for key in wanted}

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
            for key, state, version, _ in StreamFolder(self.aggregate).folded(table):
                yield Loaded(key, state, version, tick)

    def rebuild(self, *, at: Moment | None = None, passes: int = 1) -> Rebuilt:
        """Fold all aggregates as of `at` from their events, as :meth:`states` does; return counts and a digest.

        The digest is a function of the keys, versions and states: it is equal whenever and wherever they are rebuilt.
        """
        tick = self._tick_of_all() if at is None else resolve_tick(at)
        found = Rebuilt(tick)
        for part in range(self._checked(passes)):
            table = sorted_events(self.collection, tick, part, passes)
            for key, state, version, events in StreamFolder(self.aggregate).folded(table):
                found.add(key, version, self.aggregate.encode(state), events)
        return found

    def digest(self, states: Iterable[Loaded[S]]) -> str:
        """Return the digest of these aggregates, as :meth:`rebuild` computes it."""
        return digest_of((each.key, each.version, self.aggregate.encode(each.state)) for each in states)

    # --- inside: reading ----------------------------------------------------------------------------------------------

    def _checked(self, passes: int) -> int:
        if passes < 1:
            raise InvalidArgument(f"a rebuild has 1 or more passes, not {passes}")
        return passes

    def _tick_of_all(self) -> int:
        return self._database.current_tick(self.collection.definition.pchannels)

    def _cached(self, key: str, *, lend: bool = False) -> _Entry[S] | None:
        with self._guard:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                found.lent |= lend
            return found

    def _keep(self, key: str, entry: _Entry[S]) -> None:
        with self._guard:
            known = self._entries.get(key)
            if known is None or (known.version, known.tick) <= (entry.version, entry.tick):
                self._entries[key] = entry
                self._entries.move_to_end(key)
                while len(self._entries) > self._size:
                    self._entries.popitem(last=False)

    def _claim(self, key: str, entry: _Entry[S]) -> bool:
        """Take an aggregate out of the cache to fold further events on its state. Returns whether nobody else does."""
        with self._guard:
            if self._entries.get(key) is entry:
                del self._entries[key]
            mine, entry.claimed = not entry.claimed, True
            return mine

    def _read(
        self,
        keys: Sequence[str],
        at: int | None = None,
        *,
        lend: bool = False,
        failed: dict[str, MillraceError] | None = None,
        read: dict[str, _Appenders] | None = None,
    ) -> dict[str, _Entry[S]]:
        """Return aggregates by key as of a tick, or now; then they are in the cache.

        Of an aggregate in the cache, only the events since are read. With `failed`, what cannot be folded is there
        instead of raised. `read` takes who appended the events that were read.
        """
        if not keys:
            return {}
        if at is not None:
            return self._read_whole(keys, dict.fromkeys(keys, at), at, lend, failed, read)
        observed = self._observed(keys)
        found = self._read_further(keys, observed, lend, failed, read)
        rest = [key for key in keys if key not in found and (failed is None or key not in failed)]
        return found | self._read_whole(rest, observed, None, lend, failed, read)

    def _read_whole(
        self,
        keys: Sequence[str],
        observed: Mapping[str, int],
        at: int | None,
        lend: bool,
        failed: dict[str, MillraceError] | None,
        read: dict[str, _Appenders] | None,
    ) -> dict[str, _Entry[S]]:
        """Return aggregates folded from all their events."""
        if not keys:
            return {}
        # Before the events: a snapshot is then never newer than they are.
        taken = {} if self.snapshots is None else self.snapshots.load(keys, at)
        rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.collection.get(list(keys), at=at, columns=list(_COLUMNS)).to_pylist():
            rows[row["aggregate"]].append(row)
        folder = StreamFolder(self.aggregate)
        found = {}
        for key in keys:
            try:
                state, version = folder.fold(key, rows[key], taken.get(key))
            except (EventStreamDamaged, EventUndecodable) as error:
                if failed is None:
                    raise
                failed[key] = error
                continue
            found[key] = _Entry(state, version, observed[key], lend)
            if read is not None:
                read[key] = _appenders(1, rows[key])
            if at is None:
                self._keep(key, found[key])
                if key in taken and self.snapshots is not None and _outlived(taken[key], rows[key]):
                    self.snapshots.forget(key)  # an erasure stopped before it could
        return found

    def _read_further(
        self,
        keys: Sequence[str],
        observed: Mapping[str, int],
        lend: bool,
        failed: dict[str, MillraceError] | None,
        read: dict[str, _Appenders] | None,
    ) -> dict[str, _Entry[S]]:
        """Return those of the aggregates that are in the cache, with the events that were appended since.

        Leaves out an aggregate whose later changes do not follow on the cached version.
        """
        begun = {key: entry for key in keys if (entry := self._cached(key)) is not None}
        if not begun:
            return {}
        definition = self.collection.definition
        rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        try:
            changes = self._database.tables.history(
                definition,
                key_rows(list(begun), definition),
                after=min(entry.tick for entry in begun.values()),
                until=None,
                seconds=self._database.settings.read_deadline,
                columns=_COLUMNS,
            )
        except TickTooOld:  # compaction folded what follows the cached tick
            return {}
        for row in changes.to_pylist():
            if row["_time_tick"] > begun[row["aggregate"]].tick:
                rows[row["aggregate"]].append(row)
        folder = StreamFolder(self.aggregate)
        found = {}
        for key, entry in begun.items():
            # The cached state may have events of after its tick, which was decided before they were read.
            newer = [row for row in rows[key] if row["version"] is None or row["version"] > entry.version]
            versions = sorted(row["version"] or 0 for row in newer)
            follow = all(row["_change"] in ("insert", "upsert") for row in newer)
            if not follow or versions != list(range(entry.version + 1, entry.version + 1 + len(newer))):
                continue
            lent = entry.lent
            if not self._claim(key, entry):
                continue
            try:
                state = folder.extend(deepcopy(entry.state) if lent or entry.lent else entry.state, newer)
            except EventUndecodable as error:
                if failed is None:
                    raise
                failed[key] = error
                continue
            found[key] = _Entry(state, entry.version + len(newer), observed[key], lend)
            if read is not None:
                read[key] = _appenders(entry.version + 1, newer)
            self._keep(key, found[key])
        return found

    def _commands_of(self, key: str) -> set[UUID]:
        """Return the commands that have appended the events of an aggregate."""
        _check_key(key)
        rows = self.collection.get([key], columns=["command"])
        return {UUID(str(each)) for each in rows["command"].to_pylist()}

    def _observed(self, keys: Sequence[str]) -> dict[str, int]:
        """Return by key a tick that is decided already: a read that follows has everything up to it."""
        channels = dict(zip(keys, map(pchannel_of, self._vchannels(keys)), strict=True))
        for name in sorted(set(channels.values()) - self._ticks.keys()):
            self._saw(name, self._database.current_tick([name]))
        return {key: self._ticks[name] for key, name in channels.items()}

    def _saw(self, pchannel: str, tick: int) -> None:
        with self._guard:
            self._ticks[pchannel] = max(tick, self._ticks.get(pchannel, 0))

    def _vchannels(self, keys: Sequence[str]) -> list[str]:
        names = self.collection.definition.vchannels
        return [names[place] for place in vchannel_index(pa.array(keys, pa.utf8()), len(names)).tolist()]

    def _recorded(self, row: Mapping[str, Any]) -> Recorded:
        kind = row["type"]
        data = None if kind == ERASED else self.aggregate.events.decode(kind, row["type_version"], row["data"])
        metadata = {} if row["metadata"] is None else pydantic_core.from_json(row["metadata"])
        return Recorded(row["aggregate"], row["version"], kind, data, UUID(row["command"]), row["at"], metadata)

    # --- inside: appending --------------------------------------------------------------------------------------------

    def _encoded(self, command: Command) -> list[tuple[str, int, str]]:
        """Return the events of a command as types, versions and JSON. Raises InvalidArgument."""
        _check_key(command.key)
        expected = command.expected_version
        if expected is not None and (type(expected) is not int or not 0 <= expected < MAX_VERSION):
            raise InvalidArgument(f"an expected version is 0 to {MAX_VERSION - 1}, not {expected!r}")
        if command.at is not None and command.at.tzinfo is None:
            raise InvalidArgument(f"the time of events needs a time zone, {command.at.isoformat()} has none")
        _metadata(command)
        if command.erases:
            return [(ERASED, 1, "{}")]
        if not command.events:
            raise InvalidArgument(f"a command has events, this one for {command.key!r} has none")
        return [self.aggregate.events.encode(each) for each in command.events]

    def _round(
        self,
        commands: Sequence[Command],
        encoded: Sequence[list[tuple[str, int, str]]],
        places: Sequence[int],
        read: dict[str, _Appenders],
    ) -> dict[int, Appended | MillraceError]:
        """Append the commands at `places`, each of another aggregate. Returns the outcome of each.

        `read` has the aggregates that the call has read and not changed since.
        """
        found: dict[int, Appended | MillraceError] = {}
        begin: dict[int, _Entry[S]] = {}
        waiting = list(places)
        for attempt in range(ATTEMPTS):
            # An earlier attempt may have taken effect: its answer was lost, and it was sent again.
            before = {place: begin[place].version for place in waiting} if attempt else {}
            begin, failed = self._conditions(commands, waiting, read, fresh=attempt > 0)
            ready, moved = [], {}
            for place in waiting:
                if place in failed:
                    found[place] = failed[place]
                    continue
                entry, expected = begin[place], commands[place].expected_version
                version = before.get(place) if expected is None else expected
                if version is not None and version < entry.version:
                    moved[place] = version
                elif expected is not None and expected > entry.version:
                    found[place] = _conflict(commands[place], entry)
                else:
                    ready.append(place)
            for place, repeat in self._repeats(commands, moved, begin, read).items():
                if repeat is not None:
                    found[place] = repeat
                elif commands[place].expected_version is None:
                    ready.append(place)
                else:
                    found[place] = _conflict(commands[place], begin[place])
            verdicts = self._sent(commands, encoded, ready, begin)
            again = []
            for place in ready:
                verdict = verdicts[place]
                if isinstance(verdict, MillraceError):
                    found[place] = verdict
                elif verdict.answer is Answer.APPENDED:
                    read.pop(commands[place].key, None)
                    found[place] = self._appended(commands[place], begin[place], verdict.tick)
                else:
                    again.append(place)
            if not again:
                return found
            waiting = again
        for place in waiting:
            entry = begin[place]
            found[place] = AppendRejected(
                f"the chain refused the events of {commands[place].key!r} at version {entry.version} {ATTEMPTS} times:"
                " the aggregate is changed all the time, or shares its hash with one that is (try again); or something"
                " else than an event store deleted events of it",
                reason="PRODUCER_FENCED",
            )
        return found

    def _conditions(
        self, commands: Sequence[Command], places: Sequence[int], read: dict[str, _Appenders], *, fresh: bool
    ) -> tuple[dict[int, _Entry[S]], dict[int, MillraceError]]:
        """Return by place the aggregate that the command is judged against: one that was read, at its tick.

        Also returns by place why an aggregate cannot be loaded.
        """
        found, unread = {}, []
        for place in places:
            key, expected = commands[place].key, commands[place].expected_version
            entry = None if fresh else self._cached(key)
            if entry is None or (expected is not None and expected != entry.version and key not in read):
                unread.append(place)
            else:
                found[place] = entry
        failed: dict[str, MillraceError] = {}
        loaded = self._read([commands[place].key for place in unread], failed=failed, read=read)
        found |= {place: loaded[key] for place in unread if (key := commands[place].key) in loaded}
        return found, {place: failed[key] for place in unread if (key := commands[place].key) in failed}

    def _sent(
        self,
        commands: Sequence[Command],
        encoded: Sequence[list[tuple[str, int, str]]],
        places: Sequence[int],
        begin: Mapping[int, _Entry[S]],
    ) -> dict[int, Verdict | MillraceError]:
        if not places:
            return {}
        homes = self._vchannels([commands[place].key for place in places])
        batch = self._rows(commands, encoded, places, begin)
        channels: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        first = 0
        for place, home in zip(places, homes, strict=True):
            command, entry, count = commands[place], begin[place], len(encoded[place])
            message = insert_message(
                batch.slice(first, count),
                self.collection.definition,
                vchannel=home,
                partition_id=self._partition,
                upsert=command.erases,
            )
            first += count
            condition = Condition(command.key, entry.version, entry.tick)
            channels[pchannel_of(home)].append((place, conditional(message, condition)))

        def send(name: str, part: list[tuple[int, Any]]) -> dict[int, Verdict | MillraceError]:
            try:
                verdicts = self._sender.send([message for _, message in part])
            except EntryTooLarge as error:
                if len(part) > 1:
                    return send(name, part[: len(part) // 2]) | send(name, part[len(part) // 2 :])
                return {part[0][0]: error}
            self._saw(name, max((each.tick for each in verdicts if isinstance(each, Verdict)), default=0))
            return dict(zip((place for place, _ in part), verdicts, strict=True))

        parts = [(name, few) for name, part in channels.items() for few in _entries(part, encoded)]
        found: dict[int, Verdict | MillraceError] = {}
        if len(parts) == 1:
            return send(*parts[0])
        with ThreadPoolExecutor(min(len(parts), 8), thread_name_prefix="event-store") as pool:
            for each in pool.map(lambda part: send(*part), parts):
                found |= each
        return found

    def _rows(
        self,
        commands: Sequence[Command],
        encoded: Sequence[list[tuple[str, int, str]]],
        places: Sequence[int],
        begin: Mapping[int, _Entry[S]],
    ) -> pa.RecordBatch:
        """Return the rows of the commands' events, in order, as one batch."""
        columns: dict[str, list[Any]] = {each.name: [] for each in EVENT_SCHEMA.fields}
        now = datetime.now(UTC)
        for place in places:
            command, version = commands[place], begin[place].version
            metadata = _metadata(command)
            count = len(encoded[place])
            columns["aggregate"] += [command.key] * count
            columns["version"] += range(version + 1, version + count + 1)
            for name, number in (("type", 0), ("type_version", 1), ("data", 2)):
                columns[name] += [event[number] for event in encoded[place]]
            columns["command"] += [command.id] * count
            columns["at"] += [command.at or now] * count
            columns["metadata"] += [metadata] * count
        [batch] = conform(columns, self.collection.definition).combine_chunks().to_batches()
        return batch

    def _appended(self, command: Command, before: _Entry[S], tick: int) -> Appended:
        """Take the events of an accepted command into the cache, and make a snapshot if one is due."""
        version = before.version + (1 if command.erases else len(command.events))
        done = Appended(command.key, version, tick)
        if not self._claim(command.key, before):
            return done  # somebody else folds on this state
        try:
            # A fold may change its state in place.
            begun = deepcopy(before.state) if before.lent else before.state
            state = self.aggregate.initial() if command.erases else self._applied(begun, command)
            entry = _Entry(state, version, tick)
            if self.snapshots is not None and self.snapshots.due(before.version, version) and not command.erases:
                self.snapshots.save([Snapshot(command.key, version, command.id, state)])
            self._keep(command.key, entry)
        except Exception:
            # The events are in the log. Whoever loads the aggregate gets the error.
            _log.warning("aggregate %r has version %d, which cannot be folded", command.key, version, exc_info=True)
        return done

    def _applied(self, state: S, command: Command) -> S:
        """Fold a command's events as a rebuild does: of their stored form."""
        types = self.aggregate.events
        return self.aggregate.apply(state, (types.decode(*types.encode(each)) for each in command.events))

    def _repeats(
        self,
        commands: Sequence[Command],
        moved: Mapping[int, int],
        now: Mapping[int, _Entry[S]],
        read: Mapping[str, _Appenders],
    ) -> dict[int, Appended | None]:
        """Return by place the outcome of each command that has appended the version after that in `moved` before."""
        known = {place: read[key] for place in moved if (key := commands[place].key) in read}
        known = {place: each for place, each in known.items() if each.first <= moved[place] + 1}
        keys = [commands[place].key for place in moved if place not in known]
        if keys:
            rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
            for row in self.collection.get(keys, columns=["aggregate", "version", "command"]).to_pylist():
                rows[row["aggregate"]].append(row)
            known |= {place: _appenders(1, rows[commands[place].key]) for place in moved if place not in known}
        found: dict[int, Appended | None] = {}
        for place, version in moved.items():
            mine = known[place].versions.get(commands[place].id, [])
            found[place] = None
            if mine and min(mine) == version + 1:
                found[place] = Appended(commands[place].key, max(mine), now[place].tick, repeated=True)
        return found


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


def _check_key(key: Any) -> None:
    """Raise InvalidArgument for what is no key of an aggregate."""
    try:
        good = isinstance(key, str) and bool(key.encode())
    except UnicodeEncodeError:
        good = False
    if not good:
        raise InvalidArgument(f"the key of an aggregate is a text, not {key!r}")


def _metadata(command: Command) -> str | None:
    """Return a command's metadata as JSON. Raises InvalidArgument."""
    if not isinstance(command.metadata, Mapping):
        raise InvalidArgument(f"metadata has names and values, this is {type(command.metadata).__name__}")
    try:
        return pydantic_core.to_json(command.metadata).decode() if command.metadata else None
    except (pydantic_core.PydanticSerializationError, ValueError) as error:
        raise InvalidArgument(f"the metadata of a command for {command.key!r} has no JSON form: {error}") from None


def _entries(
    part: Sequence[tuple[int, Any]], encoded: Sequence[list[tuple[str, int, str]]]
) -> Iterator[list[tuple[int, Any]]]:
    """Split messages, with their places, into entries of the log."""
    entry: list[tuple[int, Any]] = []
    size = 0
    for place, message in part:
        more = sum(len(data) for _, _, data in encoded[place])
        if entry and (len(entry) == MAX_COMMANDS or size + more > MAX_ENTRY_BYTES):
            yield entry
            entry, size = [], 0
        entry.append((place, message))
        size += more
    if entry:
        yield entry


def _appenders(first: int, rows: Iterable[Mapping[str, Any]]) -> _Appenders:
    versions: defaultdict[UUID, list[int]] = defaultdict(list)
    for row in rows:
        versions[UUID(str(row["command"]))].append(row["version"])
    return _Appenders(first, versions)


def _outlived(snapshot: Snapshot[Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a snapshot has the data of events that were erased."""
    return any(row["type"] == ERASED and row["version"] > snapshot.version for row in rows)


def _conflict(command: Command, now: _Entry[Any]) -> VersionConflict:
    assert command.expected_version is not None
    words = (
        f"aggregate {command.key!r} has version {now.version}, not {command.expected_version}: nothing was appended;"
        " load it and decide again"
    )
    return VersionConflict(
        words, key=command.key, expected_version=command.expected_version, current_version=now.version
    )
