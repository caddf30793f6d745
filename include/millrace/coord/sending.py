"""How a broadcast's message gets to a VChannel: made in the PChannel's term, appended, and a refusal held against what is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from millrace.base.errors import AppendRejected, EntryTooLarge, InvalidArgument, MillraceError
from millrace.catalog.collection import Collection, pchannel_of
from millrace.coord.appending import Appending
from millrace.coord.broadcast.task import Task
from millrace.coord.ddl import message, standing
from millrace.coord.store import Store
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.wal.definitions import Definition
from millrace.wal.reasons import Reason

TERMS: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})


class DdlSending:
    """The protocol Sending, by an append host and the terms in `store`."""

    def __init__(self, store: Store, append: Appending) -> None:
        self._store = store
        self._append = append

    def refused(self, error: MillraceError) -> bool:
        return isinstance(error, EntryTooLarge) or (isinstance(error, AppendRejected) and error.reason not in TERMS)

    def send(self, task: Task, target: str) -> int:
        """Raises AppendRejected, EntryTooLarge, and what the host raises."""
        collection, pchannel = self._store.collection_by_id(task.collection_id), pchannel_of(target)
        try:
            made = message(task, collection, target, self._store.term(pchannel))
        except InvalidArgument as error:  # kept by a build that did not look first
            raise AppendRejected(str(error), reason=Reason.MALFORMED) from error
        if task.kind == "drop_collection":
            there = self._there(collection, target)
            if standing(task.kind, task.change, collection, there).state == "done":
                return 0  # dropped, or another client's collection under this id
        try:
            tick = self._in_term(pchannel, made)
        except AppendRejected as rejection:
            return self._rejected(task, collection, target, rejection)
        if task.kind == "create_collection":
            self._take_back(task, collection, target)
        return tick

    def _rejected(self, task: Task, collection: Collection, target: str, rejection: AppendRejected) -> int:
        """0 where the VChannel has the effect by another; raises otherwise."""
        if rejection.reason in TERMS:
            raise rejection
        if task.kind == "manual_flush" and rejection.reason == Reason.NO_EFFECT:
            return 0
        found = standing(task.kind, task.change, collection, self._there(collection, target))
        if found.state == "done":
            return 0
        words = f"{rejection} ({target} {found.words})" if found.words else str(rejection)
        raise AppendRejected(words, reason=rejection.reason) from rejection

    def _there(self, collection: Collection, target: str) -> Definition | None:
        return self._append.definitions(pchannel_of(target), collection.id).vchannels.get(target)

    def _take_back(self, task: Task, collection: Collection, target: str) -> None:
        """Drop what was just created, where the collection was dropped while this process slept.

        A CreateCollection alone carries no identity that the chain looks at: behind the drop it makes the collection again.
        """
        if self._store.collection_by_id(collection.id).state in ("dropping", "dropped"):
            pchannel = pchannel_of(target)
            undoing = replace(task, kind="drop_collection", change={})
            try:
                self._in_term(pchannel, message(undoing, collection, target, self._store.term(pchannel)))
            except AppendRejected as rejection:
                if rejection.reason != Reason.COLLECTION_NOT_FOUND:
                    raise

    def _in_term(self, pchannel: str, made: MutableMessage) -> int:
        """Append one message; once more where a newer term was opened meanwhile."""
        try:
            return self._append.append_one(pchannel, encode_entry([made]))
        except AppendRejected as rejection:
            term = self._store.term(pchannel)
            if rejection.reason not in TERMS or term == made.term:
                raise
        return self._in_term(pchannel, replace(made, term=term))
