"""Snapshots: one state for each aggregate, so that loading it need not decode and fold all its events.

A snapshot is a cache. It counts if it was made by the same code (the aggregate's fingerprint) and by the event that
the aggregate has at its version; otherwise it is ignored, and the next one replaces it. Deleting snapshots is safe at
any time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from millrace.base.errors import InvalidArgument, MillraceError
from millrace.client.collection import Collection
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.streams.sourcing.aggregate import Aggregate

_log: Final = logging.getLogger(__name__)

S = TypeVar("S")

SNAPSHOT_SCHEMA: Final = CollectionSchema(
    (
        FieldSpec("aggregate", "string", False),
        FieldSpec("version", "int64", False),
        FieldSpec("command", "uuid", False),
        FieldSpec("fold", "string", False),
        FieldSpec("state", "json", False),
    ),
    "aggregate",
    on_duplicate="replace",
)
MAX_STATE_BYTES: Final = 1 << 20
"""States whose JSON is larger have no snapshot."""


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[S]):
    """A state, and the event that led to it."""

    key: str
    version: int
    command: UUID
    state: S


class Snapshots(Generic[S]):
    """The snapshots of one event store. Thread-safe."""

    def __init__(self, collection: Collection, aggregate: Aggregate[S], *, every: int) -> None:
        """`every`: a snapshot is made whenever an aggregate's version passes a multiple of it."""
        if every < 1:
            raise InvalidArgument(f"snapshots are made every 1 or more events, not {every}")
        self._collection = collection
        self._aggregate = aggregate
        self.every = every
        self.skipped = 0
        """Snapshots that were not made: the state was too large, or could not be written."""

    def due(self, before: int, after: int) -> bool:
        """Return whether a snapshot follows a step from one version to another."""
        return before // self.every < after // self.every

    def row(self, snapshot: Snapshot[S]) -> dict[str, Any] | None:
        """Return a snapshot as it is stored. None, which is counted, if the state is too large, or is another after its
        JSON form.
        """
        text = self._aggregate.encode(snapshot.state)
        if self._encoded_again(text) != text:
            self.skipped += 1
            _log.warning(
                "the state of %r is another after JSON, so it has no snapshot: give its class types for all its values",
                snapshot.key,
            )
            return None
        if len(text.encode()) > MAX_STATE_BYTES:
            self.skipped += 1
            return None
        return {
            "aggregate": snapshot.key,
            "version": snapshot.version,
            "command": snapshot.command,
            "fold": self._aggregate.fingerprint,
            "state": text,
        }

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write snapshots. If they cannot be written, count them: their events are in the log already."""
        if not rows:
            return
        try:
            self._collection.upsert(rows)
        except MillraceError as error:
            self.skipped += len(rows)
            _log.warning("snapshots were not written (%s): the next ones follow %d events later", error, self.every)

    def forget(self, key: str) -> None:
        """Delete the snapshot of an aggregate whose events were erased. Raises the errors of a delete."""
        self._collection.delete([key])

    def load(self, keys: Sequence[str], at: int | None) -> Mapping[str, Snapshot[S]]:
        """Return the snapshots that this code made, as of `at`; of damaged ones none.

        If they cannot be read (no role allows it, they were dropped, or compaction folded what `at` needs), there are
        none: the events tell the same.
        """
        try:
            rows: list[dict[str, Any]] = self._collection.get(list(keys), at=at).to_pylist()
        except MillraceError as error:
            _log.warning("snapshots were not read (%s): all events are", error)
            return {}
        found = {}
        for row in rows:
            if row["fold"] != self._aggregate.fingerprint:
                continue
            try:
                state = self._aggregate.decode(row["state"])
            except ValueError as error:
                _log.warning("the snapshot of %r is ignored: %s", row["aggregate"], error)
                continue
            found[row["aggregate"]] = Snapshot(row["aggregate"], row["version"], row["command"], state)
        return found

    def _encoded_again(self, text: str) -> str:
        try:
            return self._aggregate.encode(self._aggregate.decode(text))
        except ValueError:
            return ""
