"""Appending: many commands, each judged by itself, in few entries of the log.

Commands of one aggregate that follow each other are one message, so they cost one place in the log and become visible
at one tick. If the message loses to another, or is refused, each of its commands is judged anew. Each thread judges and
reads for itself; what is to be appended is sent together with that of other threads.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import pydantic_core

from millrace.base import failpoint
from millrace.base.backoff import delay_after, jittered
from millrace.base.errors import AppendRejected, InvalidArgument, MillraceError, VersionConflict
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.commands import MAX_VERSION, Answer, Verdict
from millrace.streams.sourcing.events import ERASED
from millrace.streams.sourcing.groups import Appended, Command, Encoded, Group
from millrace.streams.sourcing.rebuild import events_by_key
from millrace.streams.sourcing.sending import GroupSender
from millrace.streams.sourcing.snapshots import Snapshots
from millrace.streams.sourcing.states import Known, Read, States

S = TypeVar("S")

_log: Final = logging.getLogger(__name__)

TURN_COMMANDS: Final = 500
"""Commands for each VChannel that are judged at once. Fewer than the aggregates that the chain remembers of a VChannel:
otherwise it forgets what a turn has read before the turn's last commands come.
"""
ATTEMPTS: Final = 10
"""How often a command is judged anew before its conflict, or the chain's refusal, is raised."""
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.25
"""Seconds between attempts, before jitter; the pause doubles from one to the other. All ten take 1.5 s at most."""


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
        self._sender = GroupSender(database, collection, aggregate, states, snapshots)

    def append(self, commands: Sequence[Command]) -> list[Appended | MillraceError]:
        """Append commands; return the outcome of each, in order. See :meth:`EventStore.append_all`."""
        encoded = [self._encoded(each) for each in commands]
        step = TURN_COMMANDS * len(self._collection.definition.vchannels)
        for start in range(0, len(encoded), step):
            self._turn(encoded[start : start + step])
        return [each.outcome for each in encoded if each.outcome is not None]

    def _encoded(self, command: Command) -> Encoded:
        """Return a command with its events as they are stored. Raises InvalidArgument."""
        check_key(command.key)
        expected = command.expected_version
        if expected is not None and (type(expected) is not int or not 0 <= expected < MAX_VERSION):
            raise InvalidArgument(f"an expected version is 0 to {MAX_VERSION - 1}, not {expected!r}")
        for what, value, kind in (("id of a command", command.id, UUID), ("time of events", command.at, datetime)):
            if not isinstance(value, kind) and (value is not None or kind is UUID):
                raise InvalidArgument(f"the {what} is a {kind.__name__}, not {str(value)[:100]!r}")
        if command.at is not None and command.at.tzinfo is None:
            raise InvalidArgument(f"the time of events needs a time zone, {command.at.isoformat()} has none")
        if command.erases:
            events = [(ERASED, 1, "{}")]
        elif command.events:
            events = [self._aggregate.events.encode(each) for each in command.events]
        else:
            raise InvalidArgument(f"a command has events, this one for {command.key!r} has none")
        return Encoded(command, events, _metadata(command), sum(len(data) for _, _, data in events))

    def _turn(self, commands: Sequence[Encoded]) -> None:
        """Append commands until each has its outcome."""
        waiting: dict[str, deque[Encoded]] = {}
        for each in commands:
            waiting.setdefault(each.command.key, deque()).append(each)
        read: dict[str, Read] = {}  # of aggregates that were read and not changed since
        lost: Counter[str] = Counter()  # by aggregate, attempts in a row that lost to others
        alone: set[str] = set()  # aggregates whose message was refused: their commands are sent one by one
        while waiting:
            begin = self._begin(waiting, read, lost)
            groups = self._grouped(waiting, begin, read, alone)
            verdicts = self._sender.send(groups) if groups else []
            if groups:
                failpoint.hit("sourcing.appended")
            progress = any(isinstance(each, Verdict) and each.answer is Answer.APPENDED for each in verdicts)
            for group, verdict in zip(groups, verdicts, strict=True):
                queue = waiting[group.key]
                if isinstance(verdict, MillraceError):
                    if len(group.commands) > 1 and not verdict.retriable:  # it is the fault of one of them
                        alone.add(group.key)
                        continue
                    for each in group.commands:
                        each.outcome = verdict
                elif verdict.answer is Answer.APPENDED:
                    read.pop(group.key, None)
                    lost.pop(group.key, None)
                    version = group.start
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
            if self._snapshots is not None:
                self._snapshots.write([each.snapshot for each in groups if each.snapshot is not None])
            waiting = {key: queue for key, queue in waiting.items() if queue}
            if lost:
                pause_between(max(lost.values()))

    def _begin(
        self,
        waiting: dict[str, deque[Encoded]],
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
        waiting: Mapping[str, deque[Encoded]],
        begin: Mapping[str, Known[S]],
        read: Mapping[str, Read],
        alone: set[str],
    ) -> list[Group[S]]:
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
            group = Group(key, known, alone=key in alone)
            rest = deque[Encoded]()
            for each in queue:
                expected = each.command.expected_version
                repeat = repeats.get(id(each))
                follows = repeat is None and (expected is None or expected == group.version)
                if not rest and follows and group.takes(each):
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
        self, moved: Sequence[tuple[Encoded, int]], begin: Mapping[str, Known[S]], read: Mapping[str, Read]
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


def _refused(group: Group[Any]) -> AppendRejected:
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
