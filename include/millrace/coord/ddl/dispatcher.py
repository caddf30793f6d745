"""Sends a DDL message to one VChannel: builds it in the PChannel's term, appends it, and interprets a rejection."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, EntryTooLarge, InvalidArgument, MillraceError
from millrace.catalog.collection import CollectionInfo
from millrace.coord.append_port import AppendPort
from millrace.coord.broadcast.task import BroadcastTask
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.ddl.kinds import build_message, effect_status
from millrace.message.ids import pchannel_of
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.wal.definitions import VChannelDefinition
from millrace.wal.reasons import Reason

TERM_REJECTIONS: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})
_PASSING: Final = TERM_REJECTIONS | {Reason.UNKNOWN_PRODUCER}
"""Rejections after which a retry can succeed."""
OPENING_SECONDS: Final = 3.0
"""Time to wait for a term that its owner has not opened in the log yet."""
_PAUSE: Final = 0.05


class DdlDispatcher:
    """Dispatcher (broadcaster) on an append host and the terms in `store`."""

    def __init__(self, store: CatalogStore, append: AppendPort) -> None:
        self._store = store
        self._append = append

    def is_permanent(self, error: MillraceError) -> bool:
        return isinstance(error, EntryTooLarge) or (isinstance(error, AppendRejected) and error.reason not in _PASSING)

    def send(self, task: BroadcastTask, target: str) -> int:
        """Append the task's message to `target`; return its time tick.

        Raises AppendRejected, EntryTooLarge, and errors of the append host.
        """
        collection, pchannel = self._store.collection_by_id(task.collection_id), pchannel_of(target)
        try:
            made = build_message(task, collection, target, self._store.term(pchannel))
        except InvalidArgument as error:  # stored by an older build that did not validate
            raise AppendRejected(str(error), reason=Reason.MALFORMED) from error
        if task.kind == "drop_collection":
            there = self._definition(collection, target)
            if effect_status(task.kind, task.change, collection, there).state == "done":
                return 0  # dropped, or another client's collection under this id
        try:
            tick = append_in_term(self._append, self._store, pchannel, made, task.principal)
        except AppendRejected as rejection:
            return self._rejected(task, collection, target, rejection)
        if task.kind == "create_collection":
            self._take_back(task, collection, target)
        return tick

    def _rejected(self, task: BroadcastTask, collection: CollectionInfo, target: str, rejection: AppendRejected) -> int:
        """Return 0 if the VChannel has the effect from another message; raise otherwise."""
        if rejection.reason in TERM_REJECTIONS:
            raise rejection
        if task.kind == "manual_flush" and rejection.reason == Reason.NO_EFFECT:
            return 0
        found = effect_status(task.kind, task.change, collection, self._definition(collection, target))
        if found.state == "done":
            return 0
        words = f"{rejection} ({target} {found.detail})" if found.detail else str(rejection)
        raise AppendRejected(words, reason=rejection.reason) from rejection

    def _definition(self, collection: CollectionInfo, target: str) -> VChannelDefinition | None:
        return self._append.definitions(pchannel_of(target), collection.id).vchannels.get(target)

    def _take_back(self, task: BroadcastTask, collection: CollectionInfo, target: str) -> None:
        """Drop a collection that was just created although it was dropped while this process slept.

        The chain cannot recognise a repeated CreateCollection by its producer: after the drop it creates the
        collection again.
        """
        if self._store.collection_by_id(collection.id).state in ("dropping", "dropped"):
            pchannel = pchannel_of(target)
            undoing = replace(task, kind="drop_collection", change={})
            try:
                made = build_message(undoing, collection, target, self._store.term(pchannel))
                append_in_term(self._append, self._store, pchannel, made, task.principal)
            except AppendRejected as rejection:
                if rejection.reason != Reason.COLLECTION_NOT_FOUND:
                    raise


def append_in_term(append: AppendPort, store: CatalogStore, pchannel: str, made: MutableMessage, principal: str) -> int:
    """Append one message in the name of `principal`; retry in the newer term if one was opened meanwhile.

    A new owner of the PChannel takes its term from the catalog before it opens it in the log: that is waited for.
    """
    end = Deadline.after(OPENING_SECONDS)
    while True:
        try:
            return append.append_one(pchannel, encode_entry([made]), principal=principal)
        except AppendRejected as rejection:
            term = store.term(pchannel)
            opening = rejection.reason == Reason.TERM_NOT_OPENED and term == made.term
            if rejection.reason not in TERM_REJECTIONS or (term == made.term and not opening):
                raise
            if opening and not end.pause(_PAUSE):
                raise
        made = replace(made, term=term)
