"""Sending: the commands of all threads that wait for a PChannel, in one entry of the log.

Each message of the entry has its own verdict, so a command that loses takes no other along. A thread that finds no
other sends at once.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from millrace.base.errors import EntryTooLarge, LogUnavailable, MillraceError
from millrace.base.group_commit import GroupCommit, Waiter
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.client.produce.rows import conform, insert_message, partition_of
from millrace.message.ids import pchannel_of
from millrace.message.model import MutableMessage
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.commands import Answer, Condition, ConditionalSender, Verdict, conditional
from millrace.streams.sourcing.groups import EVENT_SCHEMA, MAX_ENTRY_BYTES, MAX_MESSAGES, Group
from millrace.streams.sourcing.snapshots import Snapshot, Snapshots
from millrace.streams.sourcing.states import Known, States

S = TypeVar("S")

_log: Final = logging.getLogger(__name__)

Result: TypeAlias = Verdict | MillraceError
"""The chain's verdict about a message, or why it was refused."""


class GroupSender(Generic[S]):
    """Sends the groups of one event store's threads. Thread-safe.

    What waits for one PChannel is one entry: a message for each aggregate. Groups of several threads that follow each
    other on an aggregate are one message, if none of them expects a version.
    """

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
        self._lanes = {
            name: GroupCommit[list[Group[S]], list[Result]](
                _take, partial(self._commit, name), interrupted=partial(_interrupted, name), copy=_copied
            )
            for name in collection.definition.pchannels
        }

    def send(self, groups: Sequence[Group[S]]) -> list[Result]:
        """Append groups, each of another aggregate, and take their events into the cache. Returns the chain's verdict
        about each, in order.

        Raises LogUnavailable or DeadlineExceeded if outcomes are unknown.
        """
        channels: defaultdict[str, list[Group[S]]] = defaultdict(list)
        homes = self._states.vchannels([group.key for group in groups])
        for group, home in zip(groups, homes, strict=True):
            channels[pchannel_of(home)].append(group)
        parts = [(name, entry) for name, part in channels.items() for entry in _entries(part)]
        if len(parts) == 1:
            return self._lanes[parts[0][0]].commit(parts[0][1])
        found: dict[str, Result] = {}
        with ThreadPoolExecutor(min(len(parts), 8), thread_name_prefix="event-store") as pool:
            results = pool.map(lambda part: self._lanes[part[0]].commit(part[1]), parts)
            for (_, entry), verdicts in zip(parts, results, strict=True):
                found |= zip((group.key for group in entry), verdicts, strict=True)
        return [found[group.key] for group in groups]

    def _commit(self, pchannel: str, taken: Sequence[_Waiting[S]]) -> None:
        """Send the groups of several threads, and set the verdicts of each thread."""
        settled: dict[int, Result] = {}
        waiting = [group for each in taken for group in each.item]
        while waiting:
            for each in waiting:
                self._rebase(each)
            messages, later = _messages_of(waiting)
            verdicts = self._verdicts(pchannel, [message for message, _ in messages.values()])
            waiting = []
            for (key, (message, parts)), verdict in zip(messages.items(), verdicts, strict=True):
                if isinstance(verdict, MillraceError):
                    if len(parts) == 1 or verdict.retriable:
                        settled |= {id(each): copy(verdict) for each in parts}
                    else:  # it is the fault of one of them
                        for each in parts:
                            each.alone = True
                        waiting += parts
                    waiting += later.get(key, ())
                    continue
                if verdict.answer is Answer.APPENDED:
                    parts[-1].snapshot = self._taken(message, verdict.tick)
                settled |= {id(each): verdict for each in parts}
                lost = Verdict(Answer.TAKEN, verdict.tick) if verdict.answer is Answer.APPENDED else verdict
                settled |= {id(each): lost for each in later.get(key, ())}
            for thread in taken:
                if thread.answer is None and all(id(group) in settled for group in thread.item):
                    thread.answer = [settled[id(group)] for group in thread.item]

    def _rebase(self, group: Group[S]) -> None:
        """Let commands that expect no version follow what was appended while they waited."""
        known = self._states.cached(group.key)
        if known is None or known.version <= group.begin.version:
            return
        if all(each.command.expected_version is None for each in group.commands):
            group.begin = known

    def _verdicts(self, pchannel: str, groups: Sequence[Group[S]]) -> list[Result]:
        """Send a message for each group in one entry; return the chain's verdicts, in order."""
        made = self._messages(groups)
        good = [place for place, message in enumerate(made) if isinstance(message, MutableMessage)]
        messages = [message for message in made if isinstance(message, MutableMessage)]
        found: list[Result | None] = [None if isinstance(each, MutableMessage) else each for each in made]
        for place, verdict in zip(good, self._sent(messages) if messages else [], strict=True):
            found[place] = verdict
        self._states.saw(pchannel, max((each.tick for each in found if isinstance(each, Verdict)), default=0))
        return [each for each in found if each is not None]

    def _sent(self, messages: Sequence[MutableMessage]) -> Sequence[Result]:
        try:
            return self._sender.send(messages)
        except EntryTooLarge as error:
            if len(messages) == 1:
                return [error]
            half = len(messages) // 2
            return [*self._sent(messages[:half]), *self._sent(messages[half:])]

    def _messages(self, groups: Sequence[Group[S]]) -> list[MutableMessage | MillraceError]:
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

    def _taken(self, message: Group[S], tick: int) -> dict[str, Any] | None:
        """Take the events of an appended message into the cache. Returns the snapshot that is due after them."""
        before, last = message.begin, message.commands[-1].command
        if not self._states.claim(message.key, before):
            return None  # somebody else folds on this state
        try:
            state = self._folded(before, message)
        except Exception:
            # The events are in the log. Whoever loads the aggregate gets the error.
            _log.warning("aggregate %r cannot be folded at version %d", message.key, message.version, exc_info=True)
            return None
        made = None
        if self._snapshots is not None and self._snapshots.due(before.version, message.version) and not last.erases:
            # Before the cache has the state: then the next fold may change it in place.
            made = self._snapshots.row(Snapshot(message.key, message.version, last.id, state))
        self._states.keep(message.key, Known(state, message.version, tick))
        return made

    def _folded(self, before: Known[S], group: Group[S]) -> S:
        """Fold events as a rebuild does: of their stored form."""
        if group.commands[0].command.erases:
            return self._aggregate.initial()
        decode = self._aggregate.events.decode
        # A fold may change its state in place.
        begun = deepcopy(before.state) if before.lent else before.state
        return self._aggregate.apply(begun, (decode(*event) for each in group.commands for event in each.events))


_Waiting: TypeAlias = Waiter[list[Group[S]], list[Result]]


def _entries(groups: Sequence[Group[S]]) -> Iterator[list[Group[S]]]:
    """Split groups into entries of the log."""
    entry: list[Group[S]] = []
    size = 0
    for group in groups:
        if entry and (len(entry) == MAX_MESSAGES or size + group.size > MAX_ENTRY_BYTES):
            yield entry
            entry, size = [], 0
        entry.append(group)
        size += group.size
    if entry:
        yield entry


def _take(waiting: deque[_Waiting[S]]) -> list[_Waiting[S]]:
    """Take what fits into one entry."""
    taken = [waiting.popleft()]
    count, size = len(taken[0].item), sum(group.size for group in taken[0].item)
    while waiting:
        count += len(waiting[0].item)
        size += sum(group.size for group in waiting[0].item)
        if count > MAX_MESSAGES or size > MAX_ENTRY_BYTES:
            break
        taken.append(waiting.popleft())
    return taken


def _messages_of(
    groups: Sequence[Group[S]],
) -> tuple[dict[str, tuple[Group[S], list[Group[S]]]], dict[str, list[Group[S]]]]:
    """Return by key the message of an aggregate with the groups that are in it, and the groups that cannot be in it."""
    messages: dict[str, tuple[Group[S], list[Group[S]]]] = {}
    later: dict[str, list[Group[S]]] = {}
    for group in groups:
        if (found := messages.get(group.key)) is None:
            if group.start != group.begin.version:
                group.restart()
            messages[group.key] = group, [group]
            continue
        message, parts = found
        if not message.takes_all(group):
            later.setdefault(group.key, []).append(group)
            continue
        if len(parts) == 1:  # the first one stays as it is
            message = Group(group.key, message.begin)
            for each in parts[0].commands:
                message.add(each)
            messages[group.key] = message, parts
        group.start = message.version
        for each in group.commands:
            message.add(each)
        parts.append(group)
    return messages, later


def _interrupted(pchannel: str) -> Exception:
    return LogUnavailable(
        f"the thread that sent this command to {pchannel} for others was interrupted: its outcome is unknown; repeat it"
        " with the same command id and expected version"
    )


def _copied(error: Exception) -> Exception:
    """Return an error of its own for one of several threads."""
    return copy(error)
