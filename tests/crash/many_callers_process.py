"""Sixty-four callers in one process, each of which appends single rows and waits; the process may be killed.

    python many_callers_process.py <journal file> <first caller> <seed>

Threads and tasks share one database; some threads have connections of their own; one group shares a producer whose id
is taken over again and again. Beside them, transactions commit and roll back, and the schema and partitions change.
Some answers are lost on their way. The data folder comes from the environment (MILLRACE_DATA). SIGTERM ends the
callers after their calls.

A caller writes a line into the journal when a call begins, and one with what it was told:

    begin       the call has begun
    acked       the row is in the log once, at that tick, in that message
    rejected    it is not, and the chain said why
    invalid     it is not: the client refused it
    unresolved  it is there once or not at all
    settled     an unresolved one is decided now
    failed      it is there once or not at all, and nobody can tell
    committed, rolled-back   of a transaction's rows: all are visible, or none
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from millrace.base.errors import AppendRejected, AppendUnresolved, InvalidArgument, MillraceError
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_bundles import BundledAppends
from millrace.client.channel_router import HostStream
from millrace.client.database import Database, connect
from millrace.client.produce.async_producer import AsyncProducer
from millrace.client.produce.producer import Producer
from millrace.client.produce.written import Written
from millrace.message.keys import vchannel_index
from millrace.rpc.bundles import Answer, BundledAppend
from millrace.rpc.link import ConnectionLost
from millrace.rpc.outcome import AppendOutcome

COLLECTION = "callers"
THREADS_BY_DEFINITION, THREADS_BY_NAME, TASKS, BATCHING, OWN_CONNECTIONS, TAKEN_OVER = 16, 12, 20, 6, 6, 4
CALLERS = THREADS_BY_DEFINITION + THREADS_BY_NAME + TASKS + BATCHING + OWN_CONNECTIONS + TAKEN_OVER
TRANSACTIONS = 2
"""Callers of transactions, beside the others."""
CALLS = 1 << 20
"""Keys that one caller may use."""
LOST_ANSWERS = 0.02
SETTLE_SECONDS = 60.0

stop = threading.Event()


def key_of(caller: int, call: int) -> int:
    return caller * CALLS + call


class Journal:
    """What the callers note. A line is one write, so that a killed process leaves whole lines."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def note(self, what: str, caller: int, call: int, **more: Any) -> None:
        line = json.dumps({"what": what, "caller": caller, "call": call, **more})
        os.write(self._fd, f"{line}\n".encode())


def lose_answers(chance: random.Random, journal: Journal) -> None:
    """Have this process lose answers that have arrived, with their connections. Notes the first bundle."""
    real, real_answers = HostStream.receive, BundledAppends._answers
    seen: list[int] = []

    def answers(self: BundledAppends, appends: Sequence[BundledAppend]) -> list[Answer]:
        found = real_answers(self, appends)
        if len(appends) > 1 and not seen:
            seen.append(len(appends))
            journal.note("bundled", 0, 0)
        if chance.random() < LOST_ANSWERS:
            raise ConnectionLost("the answers are lost on purpose")
        return found

    def receive(self: HostStream, **options: Any) -> AppendOutcome:
        outcome = real(self, **options)
        if chance.random() < LOST_ANSWERS:
            raise ConnectionLost("the answer is lost on purpose")
        return outcome

    HostStream.receive = receive  # type: ignore[method-assign]
    BundledAppends._answers = answers  # type: ignore[method-assign]


@dataclass
class Op:
    """One call: a method of producers, its rows or keys, and where they go."""

    method: str
    given: list[Any]
    where: dict[str, Any] = field(default_factory=dict)
    outdated: bool = False
    """Whether the call names a partition that is dropped, by a definition from before."""


class Caller:
    """The calls of one caller, and its lines in the journal."""

    def __init__(self, journal: Journal, number: int, seed: int) -> None:
        self.journal = journal
        self.number = number
        self.chance = random.Random(f"{seed} {number}")
        self.call = 0

    def next(self) -> Op:
        self.call += 1
        row = {"id": key_of(self.number, self.call), "caller": self.number, "call": self.call, "size": 1}
        kinds = {"insert": 50, "upsert": 20, "delete": 15, "bad": 3, "large": 3, "unknown": 3, "outdated": 6}
        (kind,) = self.chance.choices(list(kinds), weights=list(kinds.values()))
        self.journal.note("begin", self.number, self.call, kind=kind)
        match kind:
            case "upsert":
                return Op("upsert", [row | {"id": key_of(self.number, self.chance.randrange(self.call + 1))}])
            case "delete":
                return Op("delete", [row["id"]])
            case "bad":
                return Op("insert", [row | {"size": "many"}])
            case "large":
                return Op("insert", [row | {"size": 5000}])  # against the check
            case "unknown":
                return Op("insert", [row], {"partition": "nowhere"})
            case "outdated":
                return Op("insert", [row], {"partition": "gone"}, outdated=True)
        return Op("insert", [row])

    def answered(self, written: Written) -> None:
        [result] = written.results
        self._note("acked", tick=written.last_tick, id=list(result.message_id), duplicate=result.duplicate)

    def failed(self, error: MillraceError) -> None:
        if isinstance(error, AppendUnresolved):
            self._note("unresolved")
        elif isinstance(error, AppendRejected):
            ambiguous = "first answer was lost" in str(error)  # a retry was rejected: the first attempt may be there
            self._note("failed" if ambiguous else "rejected", reason=error.reason)
        elif isinstance(error, InvalidArgument):
            self._note("invalid")
        else:
            self._note("failed", error=f"{error.code}: {error}")

    def settle(self, producer: Producer) -> None:
        """Resolve what is unresolved. Another caller of the producer may have done it already."""
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end:
            try:
                producer.settle()
            except AppendUnresolved:
                time.sleep(0.05)
            except MillraceError as error:
                if not error.retriable:
                    return  # the producer was taken over, or closed
                time.sleep(0.05)
            else:
                self._note("settled")
                return

    def _note(self, what: str, **more: Any) -> None:
        self.journal.note(what, self.number, self.call, **more)


Way = Callable[[Op], Written]


def run(caller: Caller, way: Way, producer: Callable[[], Producer]) -> None:
    """Call, one call after the other."""
    while not stop.is_set():
        op, used = caller.next(), producer()
        try:
            caller.answered(way(op))
        except MillraceError as error:
            caller.failed(error)
            if isinstance(error, AppendUnresolved):
                caller.settle(used)


async def run_task(caller: Caller, way: Callable[[Op], Awaitable[Written]], producer: Producer) -> None:
    while not stop.is_set():
        op = caller.next()
        try:
            caller.answered(await way(op))
        except MillraceError as error:
            caller.failed(error)
            if isinstance(error, AppendUnresolved):
                await asyncio.to_thread(caller.settle, producer)


def taken(op: Op, definition: CollectionInfo) -> CollectionInfo:
    """The definition that a call uses: one that knows a dropped partition, or the collection's."""
    return replace(definition, partitions=definition.partitions | {"gone": 999}) if op.outdated else definition


def by_definition(producer: Producer, definition: CollectionInfo) -> Way:
    return lambda op: getattr(producer, op.method)(taken(op, definition), op.given, **op.where)


def by_name(producer: Producer, definition: CollectionInfo) -> Way:
    def call(op: Op) -> Written:
        collection = taken(op, definition) if op.outdated else COLLECTION
        result: Written = getattr(producer, op.method)(collection, op.given, **op.where)
        return result

    return call


def batching(producer: Producer, definition: CollectionInfo) -> Way:
    batch = producer.batch()

    def call(op: Op) -> Written:
        future: Future[Written] = getattr(batch, op.method)(op.given, collection=taken(op, definition), **op.where)
        return future.result(120).checked()

    return call


class TakenOver:
    """A producer of a chosen id, which is taken over again and again."""

    def __init__(self, db: Database, producer_id: int) -> None:
        self._db = db
        self._id = producer_id
        self.newest = db.new_producer(producer_id=producer_id)

    def keep_taking_over(self) -> None:
        while not stop.wait(0.7):
            with suppress(MillraceError):
                self.newest = self._db.new_producer(producer_id=self._id)


def transact(caller: Caller, producer: Producer, definition: CollectionInfo) -> None:
    """Transactions of two rows with one home; their calls in the journal are one each."""
    while not stop.is_set():
        caller.call += 2
        first = key_of(caller.number, caller.call)
        rows = [{"id": first, "caller": caller.number, "call": caller.call, "size": 1}]
        rows.append(rows[0] | {"size": 2})
        home = int(vchannel_index(_keys([first]), len(definition.vchannels))[0])
        commits, told = caller.chance.random() < 0.7, "failed"
        caller.journal.note("begin", caller.number, caller.call, kind="transaction")
        tick = 0
        try:
            with producer.transaction(definition, vchannel=home) as txn:
                for row in rows:
                    txn.insert([row])
                if not commits:
                    raise _OnPurpose
            told, tick = "committed", txn.commit_tick or 0
        except _OnPurpose:
            told = "rolled-back"
        except AppendUnresolved:
            told = "unresolved"
        except AppendRejected:  # its lease ran out, or DDL rolled it back
            told = "rolled-back"
        except MillraceError:
            pass
        caller.journal.note(told, caller.number, caller.call, tick=tick)
        if told == "unresolved":
            caller.settle(producer)
        stop.wait(0.05)


class _OnPurpose(Exception):
    """Rolls a transaction back."""


def _keys(keys: list[int]) -> Any:
    import pyarrow as pa

    return pa.array(keys)


def change(db: Database, chance: random.Random) -> None:
    """Add fields and partitions, and drop partitions, beside the callers."""
    there = db.collection(COLLECTION)
    while not stop.wait(chance.uniform(0.2, 0.8)):
        with suppress(MillraceError):
            match chance.randrange(3):
                case 0:
                    there.add_field(f"f{chance.randrange(1 << 40)}", "int64?")
                case 1:
                    there.create_partition(f"p{chance.randrange(1 << 40)}")
                case _:
                    there.refresh()
                    for name in [each for each in there.partitions if each.startswith("p")]:
                        there.drop_partition(name)


def main() -> None:
    """Call until SIGTERM or death."""
    journal, first, seed = Journal(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    lose_answers(random.Random(f"{seed} {first} answers"), journal)
    with connect() as db:
        newest = db.definition(COLLECTION)
        definition = replace(newest, schemas=newest.schemas[:1])  # from before the check: the chain judges by it
        producer = db.producer
        callers = [Caller(journal, first + number, seed) for number in range(CALLERS + TRANSACTIONS)]
        rest = iter(callers)
        work: list[Callable[[], None]] = []

        def add(count: int, way: Way, used: Callable[[], Producer]) -> None:
            work.extend(partial(run, caller, way, used) for caller in islice(rest, count))

        add(THREADS_BY_DEFINITION, by_definition(producer, definition), lambda: producer)
        add(THREADS_BY_NAME, by_name(producer, definition), lambda: producer)
        add(BATCHING, batching(producer, definition), lambda: producer)
        others = [connect() for _ in range(OWN_CONNECTIONS)]
        for other in others:
            add(1, by_definition(other.producer, definition), lambda other=other: other.producer)  # type: ignore[misc]
        shared = TakenOver(db, 7_000_001)
        add(TAKEN_OVER, lambda op: by_definition(shared.newest, definition)(op), lambda: shared.newest)
        tasks = list(islice(rest, TASKS))

        async def in_tasks() -> None:
            async with AsyncProducer(producer) as writing:

                async def way(op: Op) -> Written:
                    collection = taken(op, definition) if op.outdated else COLLECTION
                    result: Written = await getattr(writing, op.method)(collection, op.given, **op.where)
                    return result

                await asyncio.gather(*(run_task(caller, way, producer) for caller in tasks))

        work += [lambda: asyncio.run(in_tasks()), shared.keep_taking_over]
        work += [partial(transact, caller, db.new_producer(), definition) for caller in rest]
        work.append(lambda: change(db, random.Random(f"{seed} {first} changes")))
        threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for other in others:
            other.close()


if __name__ == "__main__":
    main()
