"""Broadcasts of messages other than DDL: their tasks, what storing them checks, and how a message is sent.

All or nothing: a broadcast is stored only if the chain would accept every message now, its resource keys keep DDL and
other broadcasts from its VChannels, and once one VChannel has its message, the task stays open until all have theirs.

A message is numbered as DDL is (millrace.coord.ddl.kinds): the task's id is its epoch. Its barrier tick says when the
task was planned, so a chain that may have forgotten the number refuses it, and the WAL tells whether it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from millrace.base.errors import AppendRejected, LogUnavailable, MillraceError, StateDamaged, TooManyBroadcasts
from millrace.catalog.broadcast import content_digest, message_from_json, message_to_json
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.producer_recovery import AppliedLookup, AppliedMessage
from millrace.coord.append_port import AppendPort
from millrace.coord.broadcast.broadcaster import Dispatcher
from millrace.coord.broadcast.kinds import DATA, BroadcastKind, KindCalls
from millrace.coord.broadcast.ledger import BroadcastCallbacks, StalePlan
from millrace.coord.broadcast.task import (
    COLLECTION,
    MESSAGES,
    VCHANNEL,
    BroadcastDraft,
    BroadcastTask,
    ResourceKey,
    normalize_keys,
)
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.ddl.dispatcher import append_in_term
from millrace.message.ids import COORDINATOR_ID, pchannel_of
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.wal.reasons import Reason

MAX_OPEN: Final = 64
"""Open broadcasts of messages. Each holds up to 256 KiB of the catalog until every VChannel has it."""
DIGEST: Final = "digest"
"""Key of a task's change: the digest of its content."""
COLLECTIONS: Final = "collections"
"""Key of a task's change: the names of its collections, for display."""
_BARRIERS: Final = "barriers"
_GONE: Final = (Reason.COLLECTION_NOT_FOUND, Reason.VCHANNEL_NOT_FOUND)


def message_keys(messages: Iterable[MutableMessage]) -> tuple[ResourceKey, ...]:
    """Return the resource keys of a broadcast: its VChannels, exclusive, and its collections, shared.

    Two broadcasts on one VChannel would fence each other there. DDL of the collections has their exclusive keys.
    """
    keys = [ResourceKey(VCHANNEL, each.vchannel) for each in messages]
    return normalize_keys([*keys, *(ResourceKey(COLLECTION, str(each.collection_id), True) for each in messages)])


def judge_messages(append: AppendPort, store: CatalogStore, messages: Sequence[MutableMessage]) -> dict[str, int]:
    """Return by VChannel the last tick of its PChannel, if the chain would accept every message now.

    Raises AppendRejected with the first reason why it would not.
    """
    ticks: dict[str, int] = {}
    for each in messages:
        pchannel = pchannel_of(each.vchannel)
        judged = replace(each, term=store.term(pchannel))
        try:
            ticks[each.vchannel] = append.judge(pchannel, encode_entry([judged]))
        except AppendRejected as rejection:
            if not _has_nothing_to_flush(each, rejection):
                words = f"nothing was sent, because {each.vchannel} would refuse its message: {rejection}"
                raise AppendRejected(words, reason=rejection.reason) from rejection
            ticks[each.vchannel] = 0
    return ticks


def message_draft(
    kind: str,
    messages: Sequence[MutableMessage],
    collections: Mapping[int, CollectionInfo],
    data: Mapping[str, Any],
    barriers: Mapping[str, int],
    *,
    request: str,
    principal: str,
) -> BroadcastDraft:
    """Return the draft of a broadcast, planned from `collections` as they were read."""
    stored = [message_to_json(each) for each in messages]
    change = {
        MESSAGES: stored,
        DATA: data,
        DIGEST: content_digest(stored, data),
        COLLECTIONS: sorted(each.name for each in collections.values()),
        _BARRIERS: barriers,
    }
    return BroadcastDraft(
        kind,
        next(iter(collections)) if len(collections) == 1 else 0,
        change,
        tuple(each.vchannel for each in messages),
        message_keys(messages),
        request,
        snapshot=tuple(collections.values()),
        principal=principal,
    )


def message_callbacks(store: CatalogStore, kind: BroadcastKind, calls: KindCalls) -> BroadcastCallbacks:
    """Return the broadcaster's callbacks for a kind of message broadcast; `calls` runs those of the kind."""

    def check(task: BroadcastTask, seen: Sequence[CollectionInfo]) -> None:
        if not all(store.is_unchanged(each) for each in seen):
            raise StalePlan
        if sum(MESSAGES in each.change for each in store.broadcasts.open_tasks()) >= MAX_OPEN:
            raise TooManyBroadcasts(
                f"{MAX_OPEN} broadcasts are open, which is the limit: nothing was stored. `millrace broadcasts`"
                " shows what they wait for"
            )
        calls.check(kind, task)

    return BroadcastCallbacks(
        check,
        lambda task: None,
        lambda task: None,
        before_close=lambda task: calls.callback(kind, task),
        must_complete=True,
    )


def without_wal(pchannel: str, producer_id: int, after: int) -> Iterable[AppliedMessage]:
    """Fail, in a process that does not read the WAL (an AppliedLookup). Raises LogUnavailable."""
    raise LogUnavailable(
        f"{pchannel} may have forgotten a broadcast, and this process cannot look it up: the log's server completes it"
    )


class MessageDispatcher:
    """Dispatcher (broadcaster) of all tasks: messages here, DDL by `ddl`."""

    def __init__(self, store: CatalogStore, append: AppendPort, ddl: Dispatcher, applied: AppliedLookup) -> None:
        self._store = store
        self._append = append
        self._ddl = ddl
        self._applied = applied

    def is_permanent(self, error: MillraceError) -> bool:
        return self._ddl.is_permanent(error)

    def send(self, task: BroadcastTask, target: str) -> int:
        """Append the task's message to `target`; return its time tick.

        Raises AppendRejected, EntryTooLarge, and errors of the append host.
        """
        if MESSAGES not in task.change:
            return self._ddl.send(task, target)
        pchannel = pchannel_of(target)
        made = replace(
            _message_for(task, target),
            term=self._store.term(pchannel),
            producer_id=COORDINATOR_ID,
            epoch=task.id,
            sequence=0,
            barrier_tick=task.change[_BARRIERS][target],
        )
        try:
            return append_in_term(self._append, self._store, pchannel, made, task.principal)
        except AppendRejected as rejection:
            if _has_nothing_to_flush(made, rejection):
                return 0
            if rejection.reason in _GONE and task.ticks:
                return 0  # another client dropped the collection past the coordinator, with whatever it got
            if rejection.reason != Reason.UNKNOWN_PRODUCER:
                raise
        return self._after_forgetting(task, made, pchannel)

    def _after_forgetting(self, task: BroadcastTask, made: MutableMessage, pchannel: str) -> int:
        """Find the message in the WAL, or send it as new, where the chain may have forgotten its number.

        A copy that is still on its way has the old barrier tick: the chain refuses it for good, or as a repeat.
        """
        for each in self._applied(pchannel, COORDINATOR_ID, made.barrier_tick):
            if (each.vchannel, each.epoch) == (made.vchannel, task.id):
                return each.result.time_tick
        judged = replace(made, producer_id=0, epoch=0, barrier_tick=0)
        now = self._append.judge(pchannel, encode_entry([judged]))
        return append_in_term(self._append, self._store, pchannel, replace(made, barrier_tick=now), task.principal)


def _message_for(task: BroadcastTask, target: str) -> MutableMessage:
    for each in task.change[MESSAGES]:
        if each["vchannel"] == target:
            return message_from_json(each)
    raise StateDamaged(f"the broadcast {task.id} has no message for its target {target}")


def _has_nothing_to_flush(message: MutableMessage, rejection: AppendRejected) -> bool:
    return message.type == MessageType.MANUAL_FLUSH and rejection.reason == Reason.NO_EFFECT
