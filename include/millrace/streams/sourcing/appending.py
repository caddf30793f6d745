"""Appending: many commands, each judged by itself, in few entries of the log.

Commands of one aggregate that follow each other are one message, so they cost one place in the log and become visible
at one tick. If the message loses to another, or is refused, each of its commands is judged anew.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID, uuid4

import pydantic_core

from millrace.base import failpoint
from millrace.base.backoff import delay_after, jittered
from millrace.base.errors import AppendRejected, EntryTooLarge, InvalidArgument, MillraceError, VersionConflict
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.client.produce.rows import conform, insert_message, partition_of
from millrace.message.ids import pchannel_of
from millrace.message.model import MutableMessage
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
from millrace.streams.sourcing.events import ERASED
from millrace.streams.sourcing.rebuild import events_by_key
from millrace.streams.sourcing.snapshots import Snapshot, Snapshots
from millrace.streams.sourcing.states import Known, Read, States

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

MAX_MESSAGES: Final = 1_000
"""Aggregates in one entry of the log."""
MAX_ENTRY_BYTES: Final = 4 << 20
"""JSON of the events in one entry of the log; a command with more is an entry of its own."""
TURN_COMMANDS: Final = 500
"""Commands for each VChannel that are judged at once. Fewer than the aggregates that the chain remembers of a VChannel:
otherwise it forgets what a turn has read before the turn's last commands come.
"""
ATTEMPTS: Final = 10
"""How often a command is judged anew before its conflict, or the chain's refusal, is raised."""
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.25
"""Seconds between attempts, before jitter; the pause doubles from one to the other. All ten take 1.5 s at most."""


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
class _Encoded:
    """A command with its events as types, versions and JSON, and its metadata as JSON."""

    command: Command
    events: list[tuple[str, int, str]]
    metadata: str | None
    size: int
    tried: int | None = None
    """The version after which it was sent last. Its answer may be lost, and then it has taken effect."""
    outcome: Appended | MillraceError | None = None


@dataclass(slots=True)
class _Group(Generic[S]):
    """Commands that follow each other on an aggregate: one message."""

    key: str
    begin: Known[S]
    commands: list[_Encoded] = field(default_factory=list)
    version: int = 0
    """The aggregate's version after them."""
    size: int = 0

    def takes(self, one: _Encoded, *, alone: bool) -> bool:
        """Return whether a command may follow the others in their message."""
        return not self.commands or not (
            alone
            or one.command.erases
            or self.commands[-1].command.erases
            or self.size + one.size > MAX_ENTRY_BYTES
            or any(each.command.id == one.command.id for each in self.commands)
        )

    def add(self, one: _Encoded) -> None:
        one.tried = self.version
        self.commands.append(one)
        self.version += len(one.events)
        self.size += one.size


def pause_between(attempts: int) -> None:
    """Wait after so many attempts that lost to others, so that they do not meet again at the same time."""
    time.sleep(jittered(delay_after(attempts, FIRST_PAUSE, LONGEST_PAUSE)))


class Appender(Generic[S]):
    """Appends the commands of one event store. Thread-safe."""

    def __init__(
        self,
        database: Database,
        collection: Collection,
        aggregate: Aggregate[S],
        states: States[S],
        snapshots: Snapshots[S] | None,
    ) -> None:
        self._collection = collection
        self._aggregate = aggregate
        self._states = states
        self._snapshots = snapshots
        self._sender = ConditionalSender(database)
        self._partition = partition_of(collection.definition, None)

    def append(self, commands: Sequence[Command]) -> list[Appended | MillraceError]:
        """Append commands; return the outcome of each, in order. See :meth:`EventStore.append_all`."""
        encoded = [self._encoded(each) for each in commands]
        step = TURN_COMMANDS * len(self._collection.definition.vchannels)
        for start in range(0, len(encoded), step):
            self._turn(encoded[start : start + step])
        return [each.outcome for each in encoded if each.outcome is not None]

    def _encoded(self, command: Command) -> _Encoded:
        """Return a command with its events as they are stored. Raises InvalidArgument."""
        check_key(command.key)
        expected = command.expected_version
        if expected is not None and (type(expected) is not int or not 0 <= expected < MAX_VERSION):
            raise InvalidArgument(f"an expected version is 0 to {MAX_VERSION - 1}, not {expected!r}")
        if command.at is not None and command.at.tzinfo is None:
            raise InvalidArgument(f"the time of events needs a time zone, {command.at.isoformat()} has none")
        if command.erases:
            events = [(ERASED, 1, "{}")]
        elif command.events:
            events = [self._aggregate.events.encode(each) for each in command.events]
        else:
            raise InvalidArgument(f"a command has events, this one for {command.key!r} has none")
        return _Encoded(command, events, _metadata(command), sum(len(data) for _, _, data in events))

    def _turn(self, commands: Sequence[_Encoded]) -> None:
        """Append commands until each has its outcome."""
        waiting: dict[str, deque[_Encoded]] = {}
        for each in commands:
            waiting.setdefault(each.command.key, deque()).append(each)
        read: dict[str, Read] = {}  # of aggregates that were read and not changed since
        lost: Counter[str] = Counter()  # by aggregate, attempts in a row that lost to others
        alone: set[str] = set()  # aggregates whose message was refused: their commands are sent one by one
        while waiting:
            begin = self._begin(waiting, read, lost)
            groups = self._grouped(waiting, begin, read, alone)
            verdicts = self._sent(groups)
            if groups:
                failpoint.hit("sourcing.appended")
            progress = any(isinstance(each, Verdict) and each.answer is Answer.APPENDED for each in verdicts)
            taken: list[tuple[_Group[S], int]] = []
            for group, verdict in zip(groups, verdicts, strict=True):
                queue = waiting[group.key]
                if isinstance(verdict, MillraceError):
                    if len(group.commands) > 1:
                        alone.add(group.key)
                        continue
                    group.commands[0].outcome = verdict
                elif verdict.answer is Answer.APPENDED:
                    taken.append((group, verdict.tick))
                    read.pop(group.key, None)
                    lost.pop(group.key, None)
                    version = group.begin.version
                    for each in group.commands:
                        version += len(each.events)
                        each.outcome = Appended(group.key, version, verdict.tick)
                else:
                    # What the chain forgot for the sake of this round's other commands was not lost to anybody.
                    lost[group.key] += not (progress and verdict.answer is Answer.UNREAD)
                    if lost[group.key] < ATTEMPTS:
                        continue
                    for each in group.commands:
                        each.outcome = _refused(group)
                for _ in group.commands:
                    queue.popleft()
            self._take(taken)
            waiting = {key: queue for key, queue in waiting.items() if queue}
            if lost:
                pause_between(max(lost.values()))

    def _begin(
        self,
        waiting: dict[str, deque[_Encoded]],
        read: dict[str, Read],
        lost: Mapping[str, int],
    ) -> dict[str, Known[S]]:
        """Return the aggregates that the next commands are judged against: each was read, at its tick.

        The commands of an aggregate that cannot be loaded get the reason as their outcome, and wait no more.
        """
        found, unread = {}, []
        for key, queue in waiting.items():
            expected = queue[0].command.expected_version
            entry = None if key in lost else self._states.cached(key)
            if entry is None or (expected is not None and expected != entry.version and key not in read):
                unread.append(key)
            else:
                found[key] = entry
        failed: dict[str, MillraceError] = {}
        found |= self._states.read(unread, failed=failed, read=read)
        for key, error in failed.items():
            for each in waiting.pop(key):
                each.outcome = error
        return found

    def _grouped(
        self,
        waiting: Mapping[str, deque[_Encoded]],
        begin: Mapping[str, Known[S]],
        read: Mapping[str, Read],
        alone: set[str],
    ) -> list[_Group[S]]:
        """Judge the next commands of each aggregate; return those to append, and leave them where they wait."""
        moved = {}
        for key, queue in waiting.items():
            for each in queue:
                expected = each.command.expected_version
                version = each.tried if expected is None else expected
                if version is not None and version < begin[key].version:
                    moved[id(each)] = each, version
        repeats = self._repeats(list(moved.values()), begin, read)
        groups = []
        for key, queue in waiting.items():
            known = begin[key]
            group = _Group(key, known, version=known.version)
            rest = deque[_Encoded]()
            for each in queue:
                expected = each.command.expected_version
                repeat = repeats.get(id(each))
                follows = repeat is None and (expected is None or expected == group.version)
                if not rest and follows and group.takes(each, alone=key in alone):
                    group.add(each)
                elif rest or group.commands:  # each is judged after those before it
                    rest.append(each)
                else:
                    each.outcome = repeat or _conflict(each.command, known.version)
            queue.clear()
            queue.extend([*group.commands, *rest])
            if group.commands:
                groups.append(group)
        return groups

    def _repeats(
        self, moved: Sequence[tuple[_Encoded, int]], begin: Mapping[str, Known[S]], read: Mapping[str, Read]
    ) -> dict[int, Appended]:
        """Return by identity the outcome of commands that have appended the version after the given one before."""
        who, unread = dict(read), []
        for each, version in moved:
            key = each.command.key
            if key not in who or who[key].first > version + 1:
                unread.append(key)
        if unread:
            rows = self._collection.get(list(dict.fromkeys(unread)), columns=["aggregate", "version", "command"])
            who |= {key: Read(1, events) for key, events in events_by_key(rows, unread).items()}
        found = {}
        for each, version in moved:
            key = each.command.key
            mine = who[key].events.appended_by(each.command.id)
            if mine and min(mine) == version + 1:
                found[id(each)] = Appended(key, max(mine), begin[key].tick, repeated=True)
        return found

    def _sent(self, groups: Sequence[_Group[S]]) -> list[Verdict | MillraceError]:
        """Send the messages of groups; return the chain's verdicts, in order."""
        if not groups:
            return []
        found: dict[str, Verdict | MillraceError] = {}
        channels: defaultdict[str, list[tuple[_Group[S], MutableMessage]]] = defaultdict(list)
        for group, message in zip(groups, self._messages(groups), strict=True):
            if isinstance(message, MillraceError):
                found[group.key] = message
            else:
                channels[pchannel_of(message.vchannel)].append((group, message))

        def send(name: str, part: list[tuple[_Group[S], MutableMessage]]) -> dict[str, Verdict | MillraceError]:
            try:
                verdicts = self._sender.send([message for _, message in part])
            except EntryTooLarge as error:
                if len(part) > 1:
                    return send(name, part[: len(part) // 2]) | send(name, part[len(part) // 2 :])
                return {part[0][0].key: error}
            self._states.saw(name, max((each.tick for each in verdicts if isinstance(each, Verdict)), default=0))
            return dict(zip((group.key for group, _ in part), verdicts, strict=True))

        parts = [(name, entry) for name, part in channels.items() for entry in _entries(part)]
        if len(parts) == 1:
            found |= send(*parts[0])
        elif parts:
            with ThreadPoolExecutor(min(len(parts), 8), thread_name_prefix="event-store") as pool:
                for each in pool.map(lambda part: send(*part), parts):
                    found |= each
        return [found[group.key] for group in groups]

    def _messages(self, groups: Sequence[_Group[S]]) -> list[MutableMessage | MillraceError]:
        """Return the conditional message of each group, or why a check or another rule of the collection refuses it."""
        homes = self._states.vchannels([group.key for group in groups])
        columns: dict[str, list[Any]] = {each.name: [] for each in EVENT_SCHEMA.fields}
        now = datetime.now(UTC)
        for group in groups:
            columns["aggregate"] += [group.key] * (group.version - group.begin.version)
            columns["version"] += range(group.begin.version + 1, group.version + 1)
            for each in group.commands:
                count = len(each.events)
                for name, number in (("type", 0), ("type_version", 1), ("data", 2)):
                    columns[name] += [event[number] for event in each.events]
                columns["command"] += [each.command.id] * count
                columns["at"] += [each.command.at or now] * count
                columns["metadata"] += [each.metadata] * count
        try:
            [batch] = conform(columns, self._collection.definition).combine_chunks().to_batches()
        except MillraceError as error:
            return [error] if len(groups) == 1 else [found for each in groups for found in self._messages([each])]
        first, messages = 0, list[MutableMessage | MillraceError]()
        for group, home in zip(groups, homes, strict=True):
            count = group.version - group.begin.version
            message = insert_message(
                batch.slice(first, count),
                self._collection.definition,
                vchannel=home,
                partition_id=self._partition,
                upsert=group.commands[0].command.erases,
            )
            first += count
            messages.append(conditional(message, Condition(group.key, group.begin.version, group.begin.tick)))
        return messages

    def _take(self, appended: Sequence[tuple[_Group[S], int]]) -> None:
        """Take the events of accepted messages into the cache, and make the snapshots that are due."""
        snapshots = []
        for group, tick in appended:
            before, last = group.begin, group.commands[-1].command
            if not self._states.claim(group.key, before):
                continue  # somebody else folds on this state
            try:
                state = self._folded(before, group)
            except Exception:
                # The events are in the log. Whoever loads the aggregate gets the error.
                _log.warning("aggregate %r cannot be folded at version %d", group.key, group.version, exc_info=True)
                continue
            self._states.keep(group.key, Known(state, group.version, tick))
            if self._snapshots is not None and self._snapshots.due(before.version, group.version) and not last.erases:
                snapshots.append(Snapshot(group.key, group.version, last.id, state))
        if snapshots and self._snapshots is not None:
            self._snapshots.save(snapshots)

    def _folded(self, before: Known[S], group: _Group[S]) -> S:
        """Fold events as a rebuild does: of their stored form."""
        if group.commands[0].command.erases:
            return self._aggregate.initial()
        decode = self._aggregate.events.decode
        # A fold may change its state in place.
        begun = deepcopy(before.state) if before.lent else before.state
        return self._aggregate.apply(begun, (decode(*event) for each in group.commands for event in each.events))


def check_key(key: Any) -> None:
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
    part: Sequence[tuple[_Group[S], MutableMessage]],
) -> Iterator[list[tuple[_Group[S], MutableMessage]]]:
    """Split messages into entries of the log."""
    entry: list[tuple[_Group[S], MutableMessage]] = []
    size = 0
    for group, message in part:
        if entry and (len(entry) == MAX_MESSAGES or size + group.size > MAX_ENTRY_BYTES):
            yield entry
            entry, size = [], 0
        entry.append((group, message))
        size += group.size
    if entry:
        yield entry


def _refused(group: _Group[Any]) -> AppendRejected:
    return AppendRejected(
        f"the chain refused the events of {group.key!r} at version {group.begin.version} {ATTEMPTS} times: the"
        " aggregate is changed all the time, or shares its hash with one that is (try again); or something else than"
        " an event store deleted events of it",
        reason="PRODUCER_FENCED",
    )


def _conflict(command: Command, version: int) -> VersionConflict:
    assert command.expected_version is not None
    words = (
        f"aggregate {command.key!r} has version {version}, not {command.expected_version}: nothing was appended;"
        " load it and decide again"
    )
    return VersionConflict(words, key=command.key, expected_version=command.expected_version, current_version=version)
