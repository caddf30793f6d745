"""The ledger in the coordinator's file, beside the catalog, so that one transaction changes a task and its effect.

Tables and rows are those of earlier builds. A task that an early build stored without keys is exclusive on its
collection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millrace.coord.broadcast.task import (
    MESSAGES,
    BroadcastDraft,
    BroadcastTask,
    ResourceKey,
    TaskState,
    collection_keys,
    keys_conflict,
)
from millrace.coord.catalog.database import CoordinatorDb, repeated
from millrace.message.ids import pchannel_of

MAX_CLOSED: Final = 1_000
"""Number of closed broadcasts to keep, so that repeated requests find theirs."""
MAX_ABANDONED: Final = 100
"""Number of abandoned broadcasts whose reason is kept."""
MAX_REASON_CHARS: Final = 1_000
_PRINCIPAL: Final = "principal"
"""Key in the stored change. Builds without principals ignore it; they could not read documents with one more column."""
_ABANDONED: Final = 2
"""Value of `broadcast.done`."""
_ID_EPOCH: Final = 1_577_836_800
"""2020 in Unix seconds. Ids of broadcasts grow with the clock from there, and fit 31 bits until 2088."""

_TASKS: Final = (
    "select b.id, coalesce(r.name, ''), b.kind, b.collection_id, b.change, r.keys, b.done, coalesce(g.at, 0.0),"
    " coalesce(t.words, ''), coalesce(t.at_ms, 0) from broadcast b left join request r on r.broadcast_id = b.id"
    " left join begun g on g.broadcast_id = b.id left join trouble t on t.broadcast_id = b.id"
)


@dataclass(frozen=True, slots=True)
class NamedBroadcast:
    """A broadcast with its collection's name, for display."""

    collection: str
    task: BroadcastTask


class SqliteLedger:
    """The ledger in one file. Thread-safe."""

    def __init__(
        self, database: CoordinatorDb, *, max_closed: int = MAX_CLOSED, wall: Callable[[], float] = time.time
    ) -> None:
        self._db = database
        self._max_closed = max_closed
        self._wall = wall

    # -- queries ------------------------------------------------------------------------------------------------------

    def task(self, number: int) -> BroadcastTask | None:
        return next(iter(self._tasks("where b.id = ?", (number,))), None)

    def find_request(self, request: str) -> BroadcastTask | None:
        return next(iter(self._tasks("where r.name = ?", (request,))), None)

    def open_tasks(self) -> list[BroadcastTask]:
        return self._tasks("where not b.done order by b.id")

    def list_recent(self, *, limit: int, closed: bool = True) -> list[NamedBroadcast]:
        """Return open broadcasts and, with `closed`, the newest closed ones, up to `limit` in all; newest first."""
        found = self._tasks("where not b.done order by b.id desc")
        if closed and len(found) < limit:
            found += self._tasks("where b.done order by b.id desc limit ?", (limit - len(found),))
        return self._named(sorted(found, key=lambda each: -each.id))

    def list_unresolved(self) -> list[NamedBroadcast]:
        """Return broadcasts that are open, or abandoned with their reason still stored; oldest first."""
        return self._named(self._tasks("where not b.done or t.words is not null order by b.id"))

    def _named(self, tasks: Iterable[BroadcastTask]) -> list[NamedBroadcast]:
        return [NamedBroadcast(self._collection_name(task.collection_id), task) for task in tasks]

    def _collection_name(self, number: int) -> str:
        row = self._db.fetch_one("select name from collection where id = ?", (number,))
        return "" if row is None else str(row[0])

    def _tasks(self, where: str, values: tuple[Any, ...] = ()) -> list[BroadcastTask]:
        return self._db.with_connection(
            lambda db: [self._task(row) for row in db.execute(f"{_TASKS} {where}", values).fetchall()]
        )

    def _task(self, row: tuple[Any, ...]) -> BroadcastTask:
        number, request, kind, collection_id, change, keys, done, at, words, reason_at_ms = row
        targets = {
            vchannel: tick if acked else None
            for vchannel, acked, tick in self._db.execute(
                "select vchannel, acked, time_tick from target where broadcast_id = ? order by rowid", (number,)
            )
        }
        if done:  # 1 with a reason: abandoned by an earlier build
            state = TaskState.ABANDONED if done == _ABANDONED or words else TaskState.DONE
        else:
            state = TaskState.PENDING if None in targets.values() else TaskState.ACKNOWLEDGED
        resources = (
            collection_keys(collection_id) if keys is None else tuple(ResourceKey(*key) for key in json.loads(keys))
        )
        stored = json.loads(change)
        principal = stored.pop(_PRINCIPAL, "")
        return BroadcastTask(
            number,
            request,
            kind,
            collection_id,
            stored,
            resources,
            targets,
            state,
            at=at,
            reason=words,
            reason_at_ms=reason_at_ms,
            principal=principal,
        )

    # -- the protocol Ledger ------------------------------------------------------------------------------------------

    @repeated
    def add(
        self, draft: BroadcastDraft, check: Callable[[BroadcastTask, Any], None]
    ) -> BroadcastTask | tuple[BroadcastTask, ...]:
        with self._db.transaction():
            known = self.find_request(draft.request) if draft.request else None
            if known is not None:
                return known
            blocking = tuple(each for each in self.open_tasks() if keys_conflict(each.keys, draft.keys))
            if blocking:
                return blocking
            task = self._next(draft)
            check(task, draft.snapshot)
            self._insert(task)
            return task

    def _next(self, draft: BroadcastDraft) -> BroadcastTask:
        # Also above every id that a newer copy of this file can have allocated: the log has seen those.
        (newest,) = self._db.fetch_one("select coalesce(max(id), 0) from broadcast")
        now = self._wall()
        number = max(newest + 1, int(now) - _ID_EPOCH)
        targets: dict[str, int | None] = dict.fromkeys(draft.targets)
        request = draft.request or f"#{number}"
        return BroadcastTask(
            number,
            request,
            draft.kind,
            draft.collection_id,
            draft.change,
            draft.keys,
            targets,
            at=now,
            principal=draft.principal,
        )

    def _insert(self, task: BroadcastTask) -> None:
        change = task.change | {_PRINCIPAL: task.principal} if task.principal else task.change
        self._db.execute(
            "insert into broadcast (id, collection_id, kind, change) values (?, ?, ?, ?)",
            (task.id, task.collection_id, task.kind, json.dumps(change)),
        )
        self._db.execute_many(
            "insert into target (broadcast_id, vchannel, pchannel) values (?, ?, ?)",
            [(task.id, target, pchannel_of(target)) for target in task.targets],
        )
        keys = json.dumps([[key.domain, key.name, key.shared] for key in task.keys])
        self._db.execute("insert into request values (?, ?, ?)", (task.id, task.request, keys))
        self._db.execute("insert into begun values (?, ?)", (task.id, task.at))

    def _collect(self) -> None:
        """Delete closed tasks except the newest."""
        oldest = self._db.fetch_one(
            "select id from broadcast where done order by id desc limit 1 offset ?", (self._max_closed - 1,)
        )
        if oldest is None:
            return
        closed = "select id from broadcast where done and id < ?"
        for table in ("target", "request", "begun", "trouble"):
            self._db.execute(f"delete from {table} where broadcast_id in ({closed})", oldest)
        self._db.execute("delete from broadcast where done and id < ?", oldest)

    @repeated
    def acknowledge(self, number: int, ticks: Mapping[str, int]) -> None:
        with self._db.transaction():
            self._db.execute_many(
                "update target set acked = 1, time_tick = max(time_tick, ?) where broadcast_id = ? and vchannel = ?",
                [(tick, number, target) for target, tick in ticks.items()],
            )

    @repeated
    def finish(self, number: int, acked: Callable[[BroadcastTask], None]) -> BroadcastTask | None:
        with self._db.transaction():
            task = self.task(number)
            if task is not None and task.state is TaskState.ACKNOWLEDGED:
                acked(task)
                self._close(number, 1)
                self._db.execute("delete from trouble where broadcast_id = ?", (number,))
            found = self.task(number)
            self._collect()
            return found

    @repeated
    def abandon(
        self, number: int, words: str, refused: Callable[[BroadcastTask], BroadcastDraft | None]
    ) -> BroadcastTask | None:
        with self._db.transaction():
            task = self.task(number)
            if task is None or not task.open:
                return None
            self._close(number, _ABANDONED)
            self._note(number, words)
            self._db.execute(
                "delete from trouble where broadcast_id not in (select id from broadcast where not done)"
                " and broadcast_id not in (select broadcast_id from trouble order by broadcast_id desc limit ?)",
                (MAX_ABANDONED,),
            )
            self._collect()
            draft = refused(task)
            if draft is None:
                return None
            undoing = self._next(draft)
            self._insert(undoing)
            return undoing

    def _close(self, number: int, done: int) -> None:
        self._db.execute(
            f"update broadcast set done = ?, change = json_remove(change, '$.{MESSAGES}') where id = ?", (done, number)
        )

    @repeated
    def note_reason(self, number: int, words: str) -> None:
        with self._db.transaction():
            if self._db.fetch_one("select 1 from broadcast where id = ? and not done", (number,)):
                self._note(number, words)

    def _note(self, number: int, words: str) -> None:
        self._db.execute(
            "insert or replace into trouble values (?, ?, ?)",
            (number, int(self._wall() * 1000), words[:MAX_REASON_CHARS].encode("utf-8", "replace").decode()),
        )
