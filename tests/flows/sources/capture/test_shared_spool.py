"""A capture continues on another machine: the shared spool against a model, with kills, lost answers and zombies."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from millrace.base.errors import CaptureLost, MetaAmbiguous, StreamBusy, TablesMoved
from millrace.base.settings import Settings
from millrace.flows.sources.capture import shared_spool as shared_module
from millrace.flows.sources.capture.shared_spool import (
    FOLDER,
    Record,
    SharedSpool,
    forget_spool,
    move_spools,
    shared_spool,
)
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.meta.sql import SqlStore
from millrace.meta.store import Mutation, RevisionEquals
from millrace.storage.store import store_at
from tests import s3_server
from tests.failpoints import at_failpoints
from tests.flows.sources.capture.test_spool import TABLES, Killed, line, read

GROUP = "millrace-shop"


def machine(folder: Path, name: str, *, tables: str = "") -> Settings:
    return Settings(
        data_dir=folder / name, tables=tables or str(folder / "tables"), meta_store=f"sqlite:///{folder}/meta.db"
    )


def opened(settings: Settings) -> Spool:
    return Spool(settings.data_dir / "captures" / GROUP, write=True, shared=shared_spool(settings, GROUP))


@contextmanager
def small_files(files: int = 3) -> Iterator[None]:
    """Records of a few bytes go into files, and few files into a whole spool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_module, "SMALL_BYTES", 400)
        patch.setattr(shared_module, "BASE_FILES", files)
        yield


@contextmanager
def lost_answers(losses: list[bool]) -> Iterator[None]:
    """Commits of heads whose answers are lost: after they took effect, or before."""
    commit = SqlStore.commit

    def unsure(store: SqlStore, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        if losses:
            if losses.pop():
                commit(store, then, when=when)
            raise MetaAmbiguous("the answer was lost")
        return commit(store, then, when=when)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqlStore, "commit", unsure)
        yield


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("batch"), st.lists(st.sampled_from(TABLES), max_size=6), st.sampled_from(["", "kill", "lose"])
        ),
        st.tuples(st.just("heartbeat")),
        st.tuples(st.just("epoch")),
        st.tuples(st.just("trim"), st.sampled_from(TABLES), st.integers(0, 30)),
        st.tuples(st.just("tick")),
        st.tuples(st.just("move"), st.sampled_from("abc"), st.booleans(), st.booleans()),
        st.tuples(st.just("zombie"), st.lists(st.sampled_from(TABLES), min_size=1, max_size=3)),
    ),
    min_size=4,
    max_size=30,
)


class World:
    """A capture that moves between machines, and what it has by the model."""

    def __init__(self, folder: Path, kill: str, *, done: bool) -> None:
        self.folder, self.kill, self.done = folder, kill, done
        self.here = machine(folder, "a")
        self.spool = opened(self.here)
        self.zombies: list[Spool] = []
        """Of machines that were cut off, and do not know it."""
        self.changes: dict[int, tuple[str, int]] = {}
        self.ticks: list[int] = []
        self.number = self.identity = self.offset = 0
        self.passed = dict.fromkeys(TABLES, 0)
        self.epoch()

    def batch(self, names: list[str], trouble: str) -> None:
        lines = [line(self.identity + place, name) for place, name in enumerate(names)]
        marks = [Mark(len(names), f"0-1-{self.number}", 7)]
        more: dict[str, Any] = {"partition": {}, "offset": {"at": self.offset + 1}, "history": [f"h{self.offset}"]}
        there = True
        if trouble == "kill":
            try:
                with at_failpoints(self._killed):
                    self.spool.append(lines, marks, **more)
            except Killed:
                there = self.kill == "capture.shared"
                self.spool.close()
                self.spool = opened(self.here)
        elif trouble == "lose":
            with lost_answers([self.done]), pytest.raises(MetaAmbiguous):
                self.spool.append(lines, marks, **more)
            there = self.done
            self.spool.resume()
        else:
            self.spool.append(lines, marks, **more)
        if there:
            self.offset += 1
            self.changes |= {self.number + place: (name, self.identity + place) for place, name in enumerate(names)}
            self.number += len(names)
        self.identity += len(names)

    def _killed(self, name: str) -> None:
        if name == self.kill:
            raise Killed(name)

    def heartbeat(self) -> None:
        self.offset += 1
        self.spool.append([], [], partition={}, offset={"at": self.offset})

    def epoch(self) -> None:
        self.offset = 0
        self.spool.begin_epoch()
        self.spool.append([], [Mark(0, "", 1)], partition={}, offset={"at": 0}, complete=True)

    def trim(self, name: str, position: int) -> None:
        position = min(position, self.number)
        self.spool.trim(name, position)
        self.passed[name] = max(self.passed[name], position)

    def tick(self) -> None:
        self.ticks.append(len(self.ticks) + 1)
        self.spool.record(self.ticks[-1], Mark(self.number, "0-1-1", 5))

    def move(self, to: str, lost: bool, alive: bool) -> None:
        self.heartbeat()  # with it go the ticks
        if to != self.here.data_dir.name and alive:
            self.zombies.append(self.spool)
        else:
            self.spool.close()
            if lost:
                shutil.rmtree(self.here.data_dir)
        self.here = machine(self.folder, to)
        back = [each for each in self.zombies if each.folder.is_relative_to(self.here.data_dir)]
        for each in back:
            each.close()
            self.zombies.remove(each)
        self.spool = opened(self.here)

    def zombie(self, names: list[str]) -> None:
        for each in self.zombies:
            with pytest.raises(StreamBusy, match="taken over"):
                each.append([line(1, name) for name in names], [], partition={}, offset={"at": 99})

    def check(self) -> None:
        now = self.spool.standing()
        assert (now.next, (now.offset or {"at": 0})["at"]) == (self.number, self.offset)
        for name in TABLES:
            start = max(self.passed[name], self.spool.low(name))
            ids = [each for place, (of, each) in sorted(self.changes.items()) if of == name and place >= start]
            assert read(self.spool.folder, start, 3, name) == ids

    def close(self) -> None:
        for each in (self.spool, *self.zombies):
            each.close()


@pytest.mark.timeout(300)
@examples(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS, kill=st.sampled_from(["capture.spooling", "capture.shared", "capture.shared_file"]), done=st.booleans()
)
def test_another_machine_has_each_change_once_under_its_number(
    steps: list[tuple[Any, ...]], kill: str, done: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with small_files():
        world = World(tmp_path_factory.mktemp("machines"), kill, done=done)
        try:
            for name, *values in steps:
                getattr(world, name)(*values)
                world.check()
            world.move("last", False, False)
            world.check()
            assert [each.tick for each in world.spool.ticks()] == world.ticks
            (size,) = world.spool.rows_of("select coalesce(sum(bytes), 0) from parts")[0]
            assert world.spool.standing().bytes == size
            files = store_at(world.here.table_uri(f"{FOLDER}/{GROUP}")).list("")
            assert len(files) <= 3 + 1 + len(steps), "what a whole spool replaces is removed"
        finally:
            world.close()


def test_what_a_machine_had_before_there_was_a_shared_spool_is_its_beginning(tmp_path: Path) -> None:
    here, there = machine(tmp_path, "a"), machine(tmp_path, "b")
    folder = here.data_dir / "captures" / GROUP
    with Spool(folder, write=True) as spool:
        spool.append([line(1), line(2)], [Mark(2, "0-1-1", 7)], partition={}, offset={"at": 4}, complete=True)
        identity = spool.standing().identity
    opened(here).close()
    shutil.rmtree(here.data_dir)
    with opened(there) as spool:
        assert (spool.standing().identity, spool.standing().offset) == (identity, {"at": 4})
        assert read(spool.folder, 0) == [1, 2]


def test_a_removed_capture_leaves_nothing_and_its_old_copies_are_none_of_the_next_one(tmp_path: Path) -> None:
    here, there = machine(tmp_path, "a"), machine(tmp_path, "b")
    with small_files(), opened(here) as spool:
        spool.append([line(1, "d.t")] * 400, [Mark(400, "", 7)], partition={}, offset={"at": 4}, complete=True)
        spool.append([line(n, "d.t") for n in range(4000)], [], partition={}, offset={"at": 5})
    files = store_at(here.table_uri(f"{FOLDER}/{GROUP}"))
    assert files.list("")
    forget_spool(there, GROUP)
    assert not files.list("")
    with opened(there) as spool:
        assert spool.standing().next == 0
        fresh = spool.standing().identity
    with opened(here) as spool:
        assert (spool.standing().next, spool.standing().identity) == (0, fresh)


def test_while_the_tables_move_nobody_feeds_a_spool_and_it_goes_on_at_the_new_place(tmp_path: Path) -> None:
    here = machine(tmp_path, "a")
    moved = machine(tmp_path, "a", tables=str(tmp_path / "elsewhere"))
    spool = opened(here)
    with small_files():
        spool.append([line(n) for n in range(100)], [Mark(100, "", 7)], partition={}, offset={"at": 4}, complete=True)
    with SqlStore(here.meta_store, lambda: 0.0) as meta:
        assert move_spools(meta, here.tables_uri, moved.tables_uri) == [GROUP]
        assert move_spools(meta, here.tables_uri, moved.tables_uri) == [GROUP], "a move that is run again"
    with pytest.raises(StreamBusy):
        spool.append([line(101)], [], partition={}, offset={"at": 5})
    spool.close()
    with pytest.raises(TablesMoved):
        opened(here)
    shutil.rmtree(here.data_dir)
    with pytest.raises(CaptureLost, match="does not exist"):
        opened(moved)
    shutil.copytree(tmp_path / "tables", tmp_path / "elsewhere")
    with opened(moved) as spool:
        assert read(spool.folder, 0, 50) == list(range(100))


def test_on_an_object_store_in_trouble_nothing_is_lost_and_small_records_cost_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(11)
    with s3_server.Faults() as faults, s3_server.bucket(monkeypatch, faults.at) as uri:
        here, there = (machine(tmp_path, name, tables=f"{uri}/tables") for name in ("a", "b"))
        spool = opened(here)
        spool.append([line(0)], [Mark(1, "", 7)], partition={}, offset={"at": 0}, complete=True)
        faults.requests.clear()
        for at in range(20):
            spool.append([], [], partition={}, offset={"at": at})
        assert not faults.requests, "heartbeats go into the meta store"
        faults.break_request = lambda method, path: dice.choice(["", "", "503", "reset", "lost", "slow", "torn"])
        with small_files(files=4):
            for number in range(1, 16):
                lines = [line(100 * number + each) for each in range(dice.randrange(1, 30))]
                spool.append(lines, [Mark(len(lines), f"0-1-{number}", 7)], partition={}, offset={"at": number})
        wanted, standing = read(spool.folder, 0, 100), spool.standing()
        spool.close()
        shutil.rmtree(here.data_dir)
        with opened(there) as spool:
            assert spool.standing() == standing
            assert read(spool.folder, 0, 100) == wanted
        faults.break_request = lambda method, path: ""
        assert len(store_at(there.table_uri(f"{FOLDER}/{GROUP}")).list("")) <= 6
        faults.requests.clear()
        with opened(there):
            pass
        assert sum(faults.requests.values()) <= 4, "a machine that has all of it reads the files since the whole one"


def test_an_idle_capture_writes_few_files_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat each 8 s: 10,800 a day."""
    monkeypatch.setattr(
        SharedSpool, "_store", lambda self, number, body: stored.append(len(body)) or f"{number:012d}-0"
    )
    stored: list[int] = []
    offset = {"file": "mariadb-bin.000123", "pos": 4711, "gtids": "0-1-123456789", "ts_sec": 1764262800}
    with opened(machine(tmp_path, "a")) as spool:
        for number in range(200):
            spool.append(
                [], [Mark(0, "0-1-123456789", number)], partition={"server": "x"}, offset=offset | {"pos": number}
            )
    assert len(stored) * 10_800 / 200 < 600, "a day"


def test_a_large_spool_is_read_with_one_of_its_files_in_memory(tmp_path: Path) -> None:
    store = store_at(tmp_path / "files")
    with SqlStore(f"sqlite:///{tmp_path}/meta.db", lambda: 0.0) as meta:
        shared = SharedSpool(meta, store, GROUP, place="here")
        shared.take_over()
        for number in range(40):
            shared.put(Record([(f"insert {number}", [["x" * 200_000]])], {}))
        tracemalloc.start()
        found = [record.statements[0][0] for record in shared.records(3)]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found == [f"insert {number}" for number in range(3, 40)]
    assert peak < 5 * 200_000


def test_the_whole_spool_of_a_new_owner_is_not_removed_by_the_former_one(tmp_path: Path) -> None:
    """It was suspended after its commit; the next owner stores the spool whole at the same number."""
    store, spool = store_at(tmp_path / "files"), tmp_path / "spool.db"
    spool.write_bytes(b"spool")
    url = f"sqlite:///{tmp_path}/meta.db"
    with SqlStore(url, lambda: 0.0) as meta, SqlStore(url, lambda: 0.0) as other:
        former, owner = (SharedSpool(each, store, GROUP, place="here") for each in (meta, other))
        former.take_over()
        former.put(Record([("insert", [["x" * 20_000]])], {}))
        commit = SqlStore.commit

        def suspended(self: SqlStore, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
            done = commit(self, then, when=when)
            if self is meta and done:
                patch.undo()
                owner.take_over()
                assert owner.put_whole(spool)
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SqlStore, "commit", suspended)
            former.put_whole(spool)
        owner.look()
        owner.download(owner.base(), tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_bytes() == b"spool"
