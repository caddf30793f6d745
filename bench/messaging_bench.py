"""Consumer groups: deliveries/s of one member and of four processes, and what members and lanes cost the server.

A delivery is a message of one row of 1,000 bytes, decoded to Arrow and acknowledged. Members read a backlog from the
append host and the log; the time runs from the moment when the lanes are divided to the last delivery. The part beside
Kafka consumes as many messages of the same size with confluent-kafka's group consumer from the project's own broker,
with 8 partitions as Millrace has VChannels there; Kafka's client neither decodes rows nor acknowledges one by one.

``event sourcing`` appends one row for a command with an expected version, as a plain insert does without one. ``a store
of many aggregates`` has far more of them than the store's cache and the chain remember.

``division`` has no processes: members call the server's groups in this process, on a meta store in memory, whose
commits it counts.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import psutil

from bench import queues_bench
from bench.deployment import LANES, ROOT, backlog, kafka_backlog, poll_backlog
from bench.idle_consumers import idle_consumers
from millrace.base.deadline import Deadline, poll_until
from millrace.base.settings import Settings
from millrace.client.consume.delivery import CHANGES
from millrace.client.consume.membership import GroupMember
from millrace.client.database import Database, connect
from millrace.coord.consumer_positions import MetaStorePositions
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Mutation, RevisionEquals
from millrace.node.append.consumer_groups import ConsumerGroups
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.publish.definition import publish_to_end
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.events import EventTypes
from millrace.streams.sourcing.groups import Appended, Command
from millrace.streams.sourcing.store import EventStore


def groups(folder: Path, *, messages: int, members: Sequence[int] = (1, 4)) -> dict[str, Any]:
    """Measure groups of so many processes, each group on the same backlog."""
    found: dict[str, Any] = {"messages": messages, "lanes": LANES}
    with backlog(folder / "data", messages) as database:
        for count in members:
            found[f"{count} members"] = _group(database, folder / "data", messages, count)
    return found


def _group(database: Database, data: Path, messages: int, count: int) -> dict[str, float]:
    group = f"of-{count}"
    until = database.current_tick(database.definition("tasks").pchannels)
    go = data / f"go-{group}"
    command = [sys.executable, "-m", "bench.messaging_bench", str(data), group, str(until), str(go)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]

    def divided() -> bool:
        held = [each for each in database.consumer_groups() if each["group"] == group]
        return (
            bool(held)
            and sum(bool(m["lanes"]) for m in held[0]["members"]) == count
            and len(held[0]["claims"]) == LANES
        )

    assert poll_until(divided, Deadline.after(60.0), interval=0.05), "the lanes were not divided"
    start = time.time()
    go.touch()
    told = [each.communicate(timeout=600)[0].split() for each in running]
    delivered, last = sum(int(each[0]) for each in told), max(float(each[1]) for each in told)
    assert delivered >= messages, f"{delivered} of {messages}"
    return {"deliveries_per_s": round(messages / (last - start)), "delivered": delivered}


def _member(data: str, group: str, until: str, go: str) -> None:
    settings = Settings(data_dir=Path(data))
    count, last = 0, time.time()
    with (
        connect(settings=settings, start=False) as database,
        database.consumer("tasks", group=group, filters=[CHANGES], until=int(until)) as consumer,
    ):
        while not Path(go).exists():  # hand over lanes, and deliver nothing
            consumer._rebalance()
            time.sleep(0.01)
        for delivery in consumer:
            for change in delivery.changes():
                count += change.rows.num_rows
            consumer.acknowledge(delivery)
            last = time.time()
    print(count, last)


def kafka(folder: Path, *, messages: int) -> dict[str, Any]:
    """Measure confluent-kafka's group consumer on a broker of the project."""
    with kafka_backlog(folder / "kafka", messages) as servers:
        return {"deliveries_per_s": round(messages / poll_backlog(servers, messages))}


class _Counted(MemoryStore):
    commits = 0

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        self.commits += 1
        return super().commit(then, when=when)


def division(*, members: int, lanes: int, seconds: float) -> dict[str, float]:
    """Measure the server's part: `members` that each move all their lanes every 0.2 s and call every second."""
    store = _Counted(time.monotonic)
    server = ConsumerGroups(Path("unused"), lambda: ["p0"], positions=lambda: MetaStorePositions(store, seconds=15.0))
    names = [f"p0_7v{number}" for number in range(lanes)]
    made = [GroupMember(server.handle, "bench", names, name=f"m{number}") for number in range(members)]
    begun = time.perf_counter()
    rounds = 0
    claims: list[dict[str, int]] = [{} for _ in made]
    while rounds < 100:
        rounds += 1
        for number, each in enumerate(made):
            found = each.sync(claims[number])
            each.release(found.held.keys() - found.share)
            claims[number] = {lane: its.claim for lane, its in found.held.items() if lane in found.share}
        if sum(map(len, claims)) == lanes and (all(claims) or members > lanes):
            break
    held = [sorted(each) for each in claims]
    joined = time.perf_counter() - begun
    before, begun, ticks, moves, spent = store.commits, time.perf_counter(), 1, 0, 0.0
    while time.perf_counter() - begun < seconds:
        turn = time.perf_counter()
        for each, mine in zip(made, held, strict=True):
            each.move(dict.fromkeys(mine, ticks), later=True)
            moves += 1
            if ticks % 5 == 0:
                each.sync(claims[made.index(each)])
        ticks += 1
        used = time.perf_counter() - turn
        spent += used
        threading.Event().wait(max(0.0, 0.2 - used))
    elapsed = time.perf_counter() - begun
    figures = {
        "seconds_to_divide": round(joined, 3),
        "moves_per_s": round(moves / elapsed, 1),
        "store_commits_per_s": round((store.commits - before) / elapsed, 1),
        "server_busy_percent": round(100 * spent / elapsed, 1),
    }
    server.close()
    return figures


class _Paid(msgspec.Struct):
    amount: int
    to: str


def _paid(state: dict[str, int], event: _Paid) -> dict[str, int]:
    state["sum"] = state.get("sum", 0) + event.amount
    return state


def _payments() -> Aggregate[dict[str, int]]:
    types = EventTypes()
    types.register()(_Paid)
    return Aggregate(events=types, initial=dict, fold=_paid)


def _row(name: str, version: int = 1) -> dict[str, Any]:
    """An event as a row, for a plain insert."""
    event = {"type": "_Paid", "type_version": 1, "data": '{"amount":7,"to":"Ada"}', "command": uuid4()}
    return event | {"aggregate": name, "version": version, "at": datetime.now(UTC)}


def _rate(names: Sequence[str], work: Callable[[str], Any], writers: int) -> int:
    """Calls a second of one call for each name, by so many writers at once."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(writers) as pool:
        for _ in pool.map(lambda first: [work(name) for name in names[first::writers]], range(writers)):
            pass
    return round(len(names) / (time.perf_counter() - begun))


def sourcing(folder: Path, *, commands: int, keys: int) -> dict[str, Any]:
    """Measure commands with expected versions beside plain appends, and a rebuild beside a bare loop over its events.

    A command and a plain insert are one row of the same columns. Writers are threads of one process; each has its own
    aggregates. In batches, each command is judged by itself.
    """
    settings = Settings(data_dir=folder / "sourcing", cache_dir=Settings.load().cache_dir)
    found: dict[str, Any] = {"commands": commands, "aggregates": keys}
    with connect(settings=settings, create=True) as database:
        store = EventStore.open(database, "payments", _payments(), vchannels=LANES)
        plain = database.create_collection("plain", store.collection.schema, vchannels=LANES)
        names = [f"account-{number}" for number in range(keys)]
        store.append_all([Command(name, [_Paid(0, "?")], 0) for name in names])
        for writers in (1, 8, 64):
            few = max(256, commands // 20) if writers == 1 else commands // 8
            names = [f"account-{writers}-{number}" for number in range(few)]
            store.append_all([Command(name, [_Paid(0, "?")], 0) for name in names])
            found[f"plain appends_per_s, {writers} writers"] = _rate(
                names, lambda name: plain.insert([_row(name)]), writers
            )
            found[f"commands_per_s, {writers} writers"] = _rate(
                names, lambda name: store.append(name, _Paid(7, "Ada"), expected_version=1), writers
            )
        names = [f"account-{number}" for number in range(keys)]
        batches = [range(start, start + keys) for start in range(0, commands, keys)]
        begun = time.perf_counter()
        for batch in batches:
            plain.insert([_row(names[number % keys]) for number in batch])
        found["plain rows_per_s, in batches"] = round(len(batches) * keys / (time.perf_counter() - begun))
        for what, order in (
            ("one command an aggregate", [[number % keys for number in batch] for batch in batches]),
            ("20 commands an aggregate", [[place % (keys // 20) for place in range(keys)] for _ in batches]),
        ):
            begun = time.perf_counter()
            for places in order:
                outcomes = store.append_all([Command(names[place], [_Paid(7, "Ada")]) for place in places])
                assert all(isinstance(each, Appended) for each in outcomes)
            found[f"commands_per_s, in batches, {what}"] = round(len(batches) * keys / (time.perf_counter() - begun))
        begun = time.perf_counter()
        rebuilt = store.rebuild()
        found["rebuild events_per_s"] = round(rebuilt.events / (time.perf_counter() - begun))
        rows = store.collection.read(columns=["aggregate", "version", "data"], order_by=["aggregate", "version"])
        begun = time.perf_counter()
        decoder, states = msgspec.json.Decoder(_Paid), dict[str, dict[str, int]]()
        for key, text in zip(rows["aggregate"].to_pylist(), rows["data"].to_pylist(), strict=True):
            states[key] = _paid(states.get(key, {}), decoder.decode(text))
        found["loop of decode and fold events_per_s"] = round(rows.num_rows / (time.perf_counter() - begun))
        assert (rows.num_rows, len(states)) == (rebuilt.events, rebuilt.aggregates)
        database.connection.service.shutdown()
    return found


def aggregates(folder: Path, *, count: int) -> dict[str, Any]:
    """Measure a store of so many aggregates, far more than its cache and the chain remember.

    A tenth of them is made by commands, the rest by plain inserts of first events. Then the jobs run, so that reads of
    cold aggregates go by the published table and its key index.
    """
    settings = Settings(data_dir=folder / "aggregates", cache_dir=Settings.load().cache_dir)
    found: dict[str, Any] = {"aggregates": count}
    with connect(settings=settings, create=True) as database:
        store = EventStore.open(database, "many", _payments(), vchannels=LANES, snapshot_every=1)
        quiet = EventStore.open(database, "many", _payments())
        names = [f"account-{number}" for number in range(count)]
        plain = database.create_collection("plain", store.collection.schema, vchannels=LANES)
        step = 10_000
        begun = time.perf_counter()
        for start in range(0, count // 10, step):
            plain.insert([_row(name) for name in names[start : start + step]])
        found["plain rows_per_s, in batches"] = round(count // 10 / (time.perf_counter() - begun))
        begun = time.perf_counter()
        made = count // 10
        for start in range(0, made, step):
            commands = [Command(name, [_Paid(1, "?")], 0) for name in names[start : min(made, start + step)]]
            assert all(isinstance(each, Appended) for each in quiet.append_all(commands))
        found["first commands_per_s, in batches"] = round(made / (time.perf_counter() - begun))
        for start in range(made, count, step):
            store.collection.insert([_row(name) for name in names[start : start + step]])
            if start % (10 * step) == 0:
                ingest_to_end(settings, database.log)
                flush_to_end(settings)
        ingest_to_end(settings, database.log)
        flush_to_end(settings)
        begun = time.perf_counter()
        publish_to_end(settings)
        found["publish_s"] = round(time.perf_counter() - begun, 1)
        found["writer_mib"] = round(psutil.Process().memory_info().rss / 2**20)
        begun = time.perf_counter()
        cold = EventStore.open(database, "many", _payments(), snapshot_every=1)
        found["open_ms"] = round(1000 * (time.perf_counter() - begun), 1)
        chosen = random.Random(1).sample(names, 400)
        for what, work in (
            ("cold load", cold.load),
            ("cold command with its snapshot", lambda name: cold.append(name, _Paid(2, "B"), expected_version=1)),
            ("hot command with its snapshot", lambda name: cold.append(name, _Paid(2, "B"), expected_version=2)),
        ):
            some = chosen[:200] if "load" in what else chosen[200:]
            took = []
            for name in some:
                begun = time.perf_counter()
                work(name)
                took.append(time.perf_counter() - begun)
            found[f"{what}_ms, p50"] = round(1000 * float(np.median(took)), 1)
        begun = time.perf_counter()
        assert len(EventStore(database, cold.collection, _payments()).load_all(names[: count // 100])) == count // 100
        found["cold loads_per_s, a hundredth at once"] = round(count / 100 / (time.perf_counter() - begun))
        begun = time.perf_counter()
        rebuilt = cold.rebuild(passes=4)
        found["rebuild events_per_s, four passes"] = round(rebuilt.events / (time.perf_counter() - begun))
        assert rebuilt.aggregates == count
        database.connection.service.shutdown()
    return found


def parts(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return the parts of the section."""
    messages = 5_000 if quick else 50_000
    return {
        "groups": partial(groups, folder, messages=messages),
        "64 members x 64 lanes": partial(division, members=64, lanes=64, seconds=3.0 if quick else 20.0),
        "one member x 64 lanes": partial(division, members=1, lanes=64, seconds=3.0 if quick else 20.0),
        "a store of many aggregates": partial(aggregates, folder, count=20_000 if quick else 1_000_000),
        "event sourcing": partial(sourcing, folder, commands=4_000 if quick else 40_000, keys=1_000),
        "kafka": partial(kafka, folder, messages=messages),
        **queues_bench.parts(folder / "queues", quick),
        **{
            f"idle consumers of {name}": partial(
                idle_consumers,
                folder,
                mode=mode,
                consumers=100 if quick else 1_000,
                lanes=16 if quick else 64,
                seconds=10.0 if quick else 20.0,
            )
            for name, mode in (("queues", "queue"), ("groups", "stream"))
        },
    }


if __name__ == "__main__":
    _member(*sys.argv[1:])
