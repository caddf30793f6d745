"""Appends by name take the definition from a cache, and have the effect that they would have without one."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.errors import CheckViolated, CollectionNotFound, InvalidArgument, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.definition_cache import MAX_AGE, DefinitionCache
from millrace.client.database import Database, connect
from millrace.client.nested_changes import resolve_paths
from millrace.client.produce.async_producer import AsyncProducer
from millrace.client.produce.producer import Producer
from millrace.client.schemas import alter_changes, schema
from millrace.coord.append_port import SingleEntryAppender
from millrace.coord.coordinator import Coordinator
from millrace.log.rocksmq.service import RocksMQ
from millrace.node.append.host import AppendHost
from millrace.rpc.selection import Selection
from millrace.rpc.tail import DecidedMessages
from millrace.tables.read.freshness import read_fresh
from millrace.wal.state import ChannelState
from tests.client.conftest import own_name
from tests.client.produce.test_lane import Way
from tests.in_memory import folder_in_memory
from tests.laws.profile import examples

BLOCKED_SECONDS = 0.005
"""How long one step of the event loop may take."""


@pytest.fixture(scope="module")
def other(shop: Database) -> Iterator[Database]:
    """Another client of the deployment: its DDL is unknown to the first one's cache."""
    with connect(settings=shop.settings) as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return own_name(request)


@contextmanager
def requests(db: Database) -> Iterator[list[str]]:
    """The catalog's calls in the block."""
    made: list[str] = []
    real = db.connection.catalog

    def catalog(call: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        made.append(call)
        return real(call, *arguments, **options)

    db.connection.catalog = catalog  # type: ignore[method-assign]
    try:
        yield made
    finally:
        del db.connection.catalog  # type: ignore[method-assign]


def made(db: Database, name: str, **options: Any) -> None:
    db.create_collection(name, {"id": "int64", "note": "string?"}, key="id", **options)


def rows_of(db: Database, name: str) -> list[dict[str, Any]]:
    return sorted(db.collection(name).read().to_pylist(), key=lambda row: str(sorted(row.items())))


def test_appends_by_name_make_no_request_and_producers_of_a_database_share_the_names(shop: Database, name: str) -> None:
    made(shop, name)
    first, second = shop.new_producer(), shop.new_producer()
    first.insert(name, [{"id": 0}])
    second.insert(name, [{"id": 100}])
    with requests(shop) as asked:
        for number in range(1, 20):
            first.insert(name, [{"id": number}])
            second.upsert(name, [{"id": number, "note": "b"}])
            second.delete(name, [number + 1])
        with first.batch() as batch:
            batch.insert([{"id": 50}], collection=name).result()
    assert len(asked) <= 2, asked  # in the background, if this takes more than a second
    first.close()
    second.close()


def test_ddl_of_the_same_database_counts_at_once(shop: Database, name: str) -> None:
    made(shop, name)
    with shop.new_producer() as producer:
        producer.insert(name, [{"id": 1}])
        changes = resolve_paths(alter_changes(set_default={"note": "new"}), lambda: shop.definition(name).schema)
        shop.catalog.alter(name, changes)
        producer.insert(name, [{"id": 2}])
        assert [row["note"] for row in rows_of(shop, name)] == [None, "new"]
        shop.drop_collection(name)
        with pytest.raises(CollectionNotFound):
            producer.insert(name, [{"id": 3}])
        made(shop, name)
        producer.insert(name, [{"id": 4}])
    assert rows_of(shop, name) == [{"id": 4, "note": None}]


def test_a_column_that_another_client_added_is_known_to_the_first_row_that_has_it(
    shop: Database, other: Database, name: str
) -> None:
    made(shop, name)
    with shop.new_producer() as producer:
        producer.insert(name, [{"id": 1}])
        other.collection(name).add_field("n", "int64?")
        producer.insert(name, [{"id": 2, "n": 5}])
        with requests(shop) as asked, pytest.raises(InvalidArgument, match="has no column 'm'"):
            producer.insert(name, [{"id": 3, "m": 5}])
        assert asked == ["collection"], "the catalog is asked once before the rows are refused"
    assert [row["n"] for row in rows_of(shop, name)] == [None, 5]


def test_a_collection_that_another_client_made_anew_gets_the_rows(shop: Database, other: Database, name: str) -> None:
    made(shop, name, vchannels=3)
    with shop.new_producer() as producer:
        producer.insert(name, [{"id": number} for number in range(20)])
        other.drop_collection(name)
        other.create_collection(name, {"id": "int64", "size": "int32?"}, key="id", vchannels=2)
        producer.insert(name, [{"id": number} for number in range(20, 40)])
        producer.upsert(name, [{"id": 40, "size": 7}])
        other.drop_collection(name)
        with pytest.raises(CollectionNotFound):
            producer.insert(name, [{"id": 50}])
        with pytest.raises(CollectionNotFound):
            producer.insert(name, [{"id": 50}])
        made(other, name)
        assert producer.insert(name, [{"id": 60}], raise_rejected=False).rejections == []
    assert [row["id"] for row in rows_of(shop, name)] == [60]


def test_partitions_and_checks_of_another_client_hold_for_the_next_row(
    shop: Database, other: Database, name: str
) -> None:
    made(shop, name, partitions=["_default", "old"])
    there = other.collection(name)
    with shop.new_producer() as producer:
        producer.insert(name, [{"id": 1}], partition="old")
        there.create_partition("new")
        producer.insert(name, [{"id": 2}], partition="new")
        there.drop_partition("old")
        with pytest.raises(InvalidArgument, match="old"):
            producer.insert(name, [{"id": 3}], partition="old")
        there.alter(add_check={"small": "id < 10"})
        with pytest.raises(CheckViolated):
            producer.insert(name, [{"id": 11}])
        there.alter(drop_check="small")
        producer.insert(name, [{"id": 12}])
    assert [row["id"] for row in rows_of(shop, name)] == [12, 2]


def test_a_call_of_which_a_part_took_effect_is_not_made_again(shop: Database, other: Database, name: str) -> None:
    made(shop, name, vchannels=2, partitions=["even", "odd"])
    with shop.new_producer() as producer:
        rows = [{"id": number, "note": ("even", "odd")[number % 2]} for number in range(20)]
        producer.insert(name, rows, partition_by="note")
        other.collection(name).drop_partition("odd")
        written = producer.insert(name, rows, partition_by="note", raise_rejected=False)
        assert set(written.rejected_by_reason) == {"PARTITION_NOT_FOUND"}
        with pytest.raises(InvalidArgument, match="odd"):
            producer.insert(name, rows, partition_by="note")
    assert Counter(row["note"] for row in rows_of(shop, name)) == {"even": 20}


def test_a_batch_by_name_takes_rows_that_another_client_made_room_for(
    shop: Database, other: Database, name: str
) -> None:
    made(shop, name)
    with shop.new_producer() as producer, producer.batch() as batch:
        batch.insert([{"id": 1}], collection=name).result(30)
        other.collection(name).add_field("n", "int64?")
        there = other.collection(name)
        there.create_partition("new")
        kept = [
            batch.insert([{"id": 2, "n": 5}], collection=name),
            batch.upsert([{"id": 3}], collection=name, partition="new"),
            batch.delete([1], collection=name),
        ]
        assert not any(each.result(30).rejections for each in kept)
        with pytest.raises(InvalidArgument, match="has no column 'm'"):
            batch.insert([{"id": 4, "m": 5}], collection=name)
        batch.insert([{"id": 5, "m": 5}], collection=name, evolve=True).result(30)
        other.drop_collection(name)
        rejected = batch.insert([{"id": 6}], collection=name).result(30)
        assert set(rejected.rejected_by_reason) == {"COLLECTION_NOT_FOUND"}


def test_rows_of_a_definition_are_judged_by_it_alone(shop: Database, other: Database, name: str) -> None:
    made(shop, name)
    users = shop.collection(name)
    other.collection(name).add_field("n", "int64?")
    with requests(shop) as asked, pytest.raises(InvalidArgument, match="has no column 'n'"):
        users.insert([{"id": 1, "n": 5}])
    assert asked == []


def test_schemas_evolve_by_name_also_where_the_name_is_another_collection_now(
    shop: Database, other: Database, name: str
) -> None:
    made(shop, name)
    with shop.new_producer() as producer:
        producer.insert(name, [{"id": 1}])
        other.drop_collection(name)
        made(other, name)
        producer.insert(name, [{"id": 2, "n": 5}], evolve=True)
        producer.upsert(name, [{"id": 3, "m": "x"}], evolve=True)

        async def write() -> None:
            async with AsyncProducer(producer) as writing:
                other.drop_collection(name)
                made(other, name)
                await writing.insert(name, [{"id": 4, "k": 1.5}], evolve=True)

        asyncio.run(write())
    assert rows_of(shop, name) == [{"id": 4, "note": None, "k": 1.5}]


# --- in an event loop -------------------------------------------------------------------------------------------------


@contextmanager
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The seconds of each step of the event loops in the block, without those in which it waited for a core."""
    took: list[float] = []
    real = asyncio.events.Handle._run
    interval = sys.getswitchinterval()

    def delayed() -> float:
        return int(Path("/proc/thread-self/schedstat").read_text("ascii").split()[1]) / 1e9

    def run(self: asyncio.events.Handle) -> None:
        began, before = time.perf_counter(), delayed()
        real(self)
        took.append(time.perf_counter() - began - (delayed() - before))

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.events.Handle, "_run", run)
        sys.setswitchinterval(0.0002)  # a step may wait so long for the interpreter's lock, which other threads have
        try:
            yield took
        finally:
            sys.setswitchinterval(interval)


def test_the_catalog_never_blocks_an_event_loop(
    shop: Database, other: Database, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(shop, name)
    threads: list[int] = []

    def fetch(name: str) -> CollectionInfo:
        threads.append(threading.get_ident())
        time.sleep(0.05)  # a catalog far away
        return other.catalog.collection(name)

    number = count()

    async def write(producer: Producer, collection: CollectionInfo | str) -> None:
        async with AsyncProducer(producer) as writing:

            async def task() -> None:
                for _ in range(50):
                    await writing.insert(collection, [{"id": next(number)}])
                await writing.upsert(collection, [{"id": 0, "note": "again"}])
                await writing.delete(collection, [next(number)])
                with pytest.raises(InvalidArgument):
                    await writing.insert(collection, [{"id": 1, "unknown": 1}])

            await asyncio.gather(*(task() for _ in range(4)))

    def longest(collection: CollectionInfo | str) -> float:
        """The longest step of the loop. The cached definition grows old while it runs."""
        names = DefinitionCache(fetch, max_age=0.2)
        with (
            Producer(shop.connection, shop.catalog, shop.settings, definitions=names) as producer,
            steps(monkeypatch) as took,
        ):
            asyncio.run(write(producer, collection))
        return max(took)

    definition = shop.definition(name)
    found: list[tuple[float, float]] = []
    for _ in range(5):  # a step also waits for the locks of threads that have lost their core; by definition, too
        found.append((longest(name), longest(definition)))
        usual = max(BLOCKED_SECONDS, *(by_definition for _, by_definition in found))
        if found[-1][0] < usual:
            break
    assert found[-1][0] < usual, f"steps of the loop by name, by definition: {found}"
    assert len(threads) > 1, "the catalog was asked, several times"
    assert threading.get_ident() not in threads


def test_tasks_follow_a_collection_that_another_client_made_anew(shop: Database, other: Database, name: str) -> None:
    made(shop, name)

    async def write() -> None:
        async with AsyncProducer(shop.producer) as producer:
            await producer.insert(name, [{"id": 1}])
            other.drop_collection(name)
            made(other, name)
            await asyncio.gather(*(producer.insert(name, [{"id": key}]) for key in range(10)))
            other.collection(name).add_field("n", "int64?")
            await producer.upsert(name, [{"id": 3, "n": 5}])
            other.drop_collection(name)
            with pytest.raises(CollectionNotFound):
                await producer.delete(name, [1])

    made(other, name + "_kept")
    asyncio.run(write())


# --- any changes of another client ------------------------------------------------------------------------------------

BASE = {"id": "int64", "n": "int32", "note": "string?"}
Op = tuple[Any, ...]
COLUMNS = ("n", "note", "c1", "c2", "price")
ROW = st.fixed_dictionaries(
    {"id": st.integers(0, 5)},
    optional={each: st.sampled_from([1, 5_000_000_000]) if each != "note" else st.just("x") for each in COLUMNS},
)
APPENDS = st.one_of(
    st.tuples(st.sampled_from(["insert", "upsert"]), ROW, st.sampled_from([None, None, "p", "q"])),
    st.tuples(st.just("delete"), st.integers(0, 5), st.sampled_from([None, "p"])),
)
AT_ONCE = st.one_of(
    st.tuples(st.just("recreate"), st.sampled_from([BASE, {"id": "int64", "c1": "int64?"}, BASE | {"c2": "int64"}])),
    st.tuples(st.just("drop"), st.none()),
    st.tuples(st.just("alter"), st.sampled_from(["c1", "c2"]).map(lambda name: {"add": {name: "int64?"}})),
    st.tuples(st.just("alter"), st.just({"add": {"c1": "int64?"}, "set_default": {"c1": 7}})),
    st.tuples(st.just("alter"), st.just({"widen": {"n": "int64"}})),
    st.tuples(st.just("alter"), st.just({"relax": "n"})),
    st.tuples(st.just("alter"), st.just({"add_check": {"few": "id < 3"}})),
    st.tuples(st.just("alter"), st.just({"drop_check": "few"})),
    st.tuples(st.sampled_from(["create_partition", "drop_partition"]), st.sampled_from(["p", "q"])),
)
"""Changes that hold for the next append by name, whatever is cached."""
SLOW: list[Op] = [
    ("alter", {"set_default": {"n": 3}}),
    ("alter", {"drop_default": "n"}),
    ("alter", {"drop": "c1"}),
    ("alter", {"drop": "note"}),
    ("alter", {"rename": {"n": "price"}}),
]
"""Changes that hold once the cached definition is too old."""


class InProcess:
    """A log, its chain and its catalog in this process; implements TickSource."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=folder, cache_dir=folder, append_retry_delay=0.0)
        self.service = RocksMQ(folder / "log")
        self.host = AppendHost(self.service, ChannelState.new)
        self.catalog = Coordinator(self.settings, log=self.service, append=SingleEntryAppender(self.host, 30.0))
        self.catalog.ensure_pchannels(1)

    def tick(self, pchannel: str, *, persist: bool = True) -> int:
        return self.host.tick(pchannel, persist=persist)

    def decided(
        self, collection_id: int, after: Mapping[str, int], *, at: int | None, max_bytes: int
    ) -> DecidedMessages:
        return self.host.decided(collection_id, after, at=at, max_bytes=max_bytes)

    def writer(self, collection: str, names: DefinitionCache) -> Writer:
        producer = Producer(Way(self.host, self.catalog), self.catalog, self.settings, definitions=names)
        return Writer(self, collection, producer)

    def close(self) -> None:
        self.catalog.close()
        self.host.close()
        self.service.close()


@dataclass
class Writer:
    """Appends by name to one of two collections that are changed alike."""

    system: InProcess
    collection: str
    producer: Producer
    results: list[str] = field(default_factory=list)

    def append(self, op: Op) -> None:
        kind, what, partition = op
        given = [what] if kind == "delete" else [dict(what)]
        self.results.append(outcome(lambda: getattr(self.producer, kind)(self.collection, given, partition=partition)))

    def change(self, op: Op) -> str:
        kind, what = op
        catalog = self.system.catalog
        if kind == "recreate":
            with suppress(CollectionNotFound):
                catalog.drop_collection(self.collection)
            return outcome(lambda: catalog.create_collection(self.collection, schema(what, key="id"), vchannels=2))
        if kind == "drop":
            return outcome(lambda: catalog.drop_collection(self.collection))
        if kind == "alter":
            made = alter_changes(**what)
            return outcome(
                lambda: catalog.alter(
                    self.collection, resolve_paths(made, lambda: catalog.collection(self.collection).schema)
                )
            )
        return outcome(lambda: getattr(catalog, kind)(self.collection, what))

    def rows(self) -> list[dict[str, Any]] | None:
        """What is visible at the end; None if there is no collection."""
        try:
            found = self.system.catalog.collection(self.collection)
        except CollectionNotFound:
            return None
        read = read_fresh(
            self.system.settings, found.name, found.id, found.pchannels, self.system,  # type: ignore[arg-type]
            at=None, seconds=10.0, selection=Selection.of(), from_log=True,
        )  # fmt: skip
        return sorted(read.to_pylist(), key=lambda row: str(sorted(row.items())))


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except MillraceError as error:
        return f"{type(error).__name__} {getattr(error, 'reason', '')}"
    return "done"


@examples(60)
@given(ops=st.lists(st.one_of(APPENDS, APPENDS, AT_ONCE, st.sampled_from(SLOW)), min_size=2, max_size=14))
@example(ops=[("insert", {"id": 1, "n": 1}, None), ("recreate", {"id": "int64"}), ("delete", 1, None)])
def test_appends_by_a_cached_name_have_the_effect_of_appends_that_ask_each_time(ops: list[Op]) -> None:
    now = [0.0]
    with folder_in_memory() as folder, closing(InProcess(folder)) as system:
        cached = DefinitionCache(system.catalog.collection, clock=lambda: now[0])
        asking = DefinitionCache(system.catalog.collection, max_age=-1.0)
        writers = system.writer("cached", cached), system.writer("asking", asking)
        for writer in writers:
            writer.change(("recreate", BASE))
        for op in ops:
            if len(op) == 3:
                for writer in writers:
                    writer.append(op)
                continue
            first, second = (writer.change(op) for writer in writers)
            assert first == second
            if op in SLOW:
                now[0] += MAX_AGE + 0.001
        assert writers[0].results == writers[1].results
        assert writers[0].rows() == writers[1].rows()
        for writer in writers:
            writer.producer.close()
