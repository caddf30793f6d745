"""News of commits between machines that share an object store and a meta store, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.base.settings import Settings
from millrace.base.settings.place import TablesPlace, write_place
from millrace.coord.machine.table_news import HEARD_EVERY, LEASE_SECONDS, MAX_TABLES, PREFIX, TableNews
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Mutation, RevisionEquals
from millrace.storage import log_mirror
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.log_mirror import CHECK_EVERY, announce, announced
from millrace.storage.table import create_table, table_at
from tests.s3_server import Faults, bucket

SCHEMA = pa.schema([pa.field("id", pa.int64())])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Machines:
    """Some machines, each a cache of its own. The code of a machine runs inside :meth:`on`."""

    root: Path
    meta: MemoryStore
    monkeypatch: pytest.MonkeyPatch
    tables: str
    clock: Clock
    news: dict[str, TableNews] = field(default_factory=dict)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        with self.monkeypatch.context() as patch:
            patch.setenv("MILLRACE_CACHE", str(self.root / name))
            yield

    def carrier(self, name: str) -> TableNews:
        settings = Settings(data_dir=self.root / "data" / name, tables=self.tables)
        return TableNews(settings, self.meta, folder=self.root / name / "objects", now=self.clock)

    def add(self, name: str) -> None:
        if name in self.news:
            self.news[name].close()
        self.news[name] = self.carrier(name)

    def announce(self, name: str, table: str) -> None:
        with self.on(name):
            announce(f"{self.tables}/{table}")

    def text(self, name: str, table: str) -> bytes:
        with self.on(name):
            return announced(f"{self.tables}/{table}")

    def round(self) -> None:
        for each in self.news.values():
            try:
                each.run_once()
            except (MetaUnavailable, MetaAmbiguous):
                pass

    def close(self) -> None:
        for each in self.news.values():
            each.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Machines]:
    made = Machines(tmp_path, Unsteady(clock), monkeypatch, "s3://box/tables", clock)
    yield made
    made.close()


class Unsteady(MemoryStore):
    """A meta store whose commits fail now and then, before or after they took effect."""

    dice: random.Random | None = None

    def commit(self, then: list[Mutation], *, when: tuple[RevisionEquals, ...] = ()) -> int | None:  # type: ignore[override]
        chance = 1.0 if self.dice is None else self.dice.random()
        if chance < 0.2:
            raise MetaUnavailable("away")
        found = super().commit(then, when=when)
        if chance < 0.4:
            raise MetaAmbiguous("lost")
        return found


@pytest.mark.parametrize("seed", range(8))
def test_news_of_each_machine_reach_all_others_through_faults_and_restarts(machines: Machines, seed: int) -> None:
    dice = random.Random(seed)
    names = ["a", "b", "c"]
    for name in names:
        machines.add(name)
    machines.round()
    assert isinstance(machines.meta, Unsteady)
    for _ in range(15):
        machines.meta.dice = random.Random(dice.random())
        before: dict[tuple[str, str], bytes] = {}
        news = [
            (dice.choice(names), f"collections/{dice.randrange(MAX_TABLES * 2)}")
            for _ in range(dice.choice([0, 1, 3, 300]))
        ]
        before = {(name, table): machines.text(name, table) for name in names for _, table in news}
        for name, table in news:
            machines.announce(name, table)
        if dice.random() < 0.3:
            machines.add(dice.choice(names))
        machines.round()
        machines.meta.dice = None
        machines.round()
        machines.round()
        for (name, table), text in before.items():
            assert machines.text(name, table) != text, f"{name} heard of {table}"
    quiet = {name: machines.text(name, "never") for name in names}
    machines.round()
    assert quiet == {name: machines.text(name, "never") for name in names}


def test_one_table_costs_one_look_and_news_do_not_echo(machines: Machines) -> None:
    for name in ("a", "b"):
        machines.add(name)
    for _ in range(3):
        machines.round()
    others = {name: machines.text(name, "wal") for name in ("a", "b")}
    own = machines.text("b", "rows")
    machines.announce("a", "rows")
    machines.round()
    machines.round()
    assert machines.text("b", "rows") != own
    assert {name: machines.text(name, "wal") for name in ("a", "b")} == others, "other tables are left alone"
    revision = machines.meta.list(PREFIX).revision
    for _ in range(20):
        machines.round()
    assert machines.meta.list(PREFIX).revision == revision, "no echo, and nothing to put while nothing happens"


def test_the_entry_of_a_machine_is_small_and_ends_with_it(machines: Machines, clock: Clock) -> None:
    for name in ("a", "b"):
        machines.add(name)
    for number in range(MAX_TABLES * 3):
        machines.announce("a", f"collections/{number}")
    machines.round()
    entries = machines.meta.list(PREFIX).entries
    assert len(entries) == 2
    assert max(len(each.value) for each in entries) < 64 * MAX_TABLES
    machines.news.pop("a").close()
    for _ in range(8):
        clock.now += LEASE_SECONDS / 4
        machines.round()
    assert len(machines.meta.list(PREFIX).entries) == 1, "the other one renews its own"


def test_one_process_of_a_machine_carries_and_another_takes_over(machines: Machines) -> None:
    machines.add("a")
    machines.add("b")
    machines.round()
    second = machines.carrier("a")
    second.run_once()
    assert len(machines.meta.list(PREFIX).entries) == 2
    machines.news.pop("a").close()
    machines.announce("a", "wal")
    before = machines.text("b", "wal")
    second.run_once()
    machines.round()
    assert machines.text("b", "wal") != before
    second.close()


def test_two_deployments_of_a_machine_carry_their_own_news(machines: Machines) -> None:
    other = Machines(machines.root, MemoryStore(machines.clock), machines.monkeypatch, "s3://box/more", machines.clock)
    for each in (machines, other):
        each.add("a")
        each.add("b")
    for each in (machines, other, machines, other):
        each.round()
    before = other.text("b", "wal")
    machines.announce("a", "wal")
    for each in (machines, other):
        each.round()
    assert other.text("b", "wal") == before
    other.announce("a", "wal")
    for each in (machines, other, other):
        each.round()
    assert other.text("b", "wal") != before
    other.close()


def test_a_machine_notes_that_it_hears_the_others_while_the_meta_store_answers(machines: Machines) -> None:
    machines.add("a")
    store = machines.meta
    assert isinstance(store, Unsteady)

    def heard() -> bytes:
        (path,) = (machines.root / "a" / "objects" / "heard").iterdir()
        return path.read_bytes()

    machines.round()
    first = heard()
    machines.clock.now += HEARD_EVERY
    machines.round()
    second = heard()
    assert second != first
    store.list = lambda prefix, **more: _away()  # type: ignore[method-assign,assignment]
    machines.clock.now += HEARD_EVERY
    machines.round()
    assert heard() == second


def _away() -> None:
    raise MetaUnavailable("away")


def test_files_of_news_are_bounded(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_mirror, "NEWS_FILES", 100)
    for number in range(3 * CHECK_EVERY):
        machines.announce("a", f"collections/{number}")
    assert len(list((machines.root / "a" / "objects" / "news").iterdir())) <= 100 + CHECK_EVERY
    last = f"collections/{3 * CHECK_EVERY - 1}"
    assert machines.text("a", last), "the newest stay"


def test_tables_on_a_disk_need_no_news(tmp_path: Path) -> None:
    store = MemoryStore(Clock())
    with TableNews(Settings(data_dir=tmp_path), store, folder=tmp_path / "objects") as news:
        news.run_once()
    assert not store.list("").entries
    assert not (tmp_path / "objects").exists()


def test_news_follow_a_move_of_the_tables(machines: Machines) -> None:
    machines.add("a")
    machines.add("b")
    machines.announce("a", "collections/1")
    machines.round()
    for name in ("a", "b"):
        write_place(machines.root / "data" / name, TablesPlace("s3://bucket/moved", (machines.tables,)))
    machines.tables = "s3://bucket/moved"
    machines.announce("a", "collections/2")
    machines.round()
    machines.round()
    assert machines.text("b", "collections/2")
    machines.announce("b", "collections/3")
    machines.round()
    machines.round()
    assert machines.text("a", "collections/3")


def test_a_reader_of_another_machine_sees_a_version_at_once_and_asks_nothing_while_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    idle = [log_mirror.boot_seconds()]
    monkeypatch.setattr(log_mirror, "boot_seconds", lambda: idle[0])
    with Faults() as faults, bucket(monkeypatch, faults.at) as uri:
        machines = Machines(tmp_path, MemoryStore(clock), monkeypatch, f"{uri}/tables", clock)
        for name in ("a", "b"):
            machines.add(name)
        with machines.on("a"):
            writer = create_table(f"{uri}/tables/t", SCHEMA, partition_by=[])
        machines.round()
        machines.round()
        with machines.on("b"):
            reader = table_at(f"{uri}/tables/t")
            idle[0] += 3600  # an hour without news
            reader.poll()
        faults.requests.clear()
        for _ in range(100):
            machines.round()
            with machines.on("b"):
                reader.poll()
        assert faults.requests.total() == 0, "the clock stands: nothing is asked but for news"
        for number in range(3):
            with machines.on("a"):
                sink = FileSink.at(f"{uri}/tables/t", SCHEMA, ())
                sink.write(pa.table({"id": [number]}, schema=SCHEMA), {})
                commit_fenced(writer, [CommitPart(adds=sink.finish())])
            machines.round()
            faults.requests.clear()
            with machines.on("b"):
                reader.poll()
            assert reader.version == writer.version == number + 1
            assert faults.requests.total() <= 2
        machines.close()
