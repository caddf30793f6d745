"""The list of the log's backends in the tables' store: machines that share no folder have one list."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings, following
from millrace.base.settings.place import TablesPlace, write_place
from millrace.log.generations.generation_file import FILE, GenerationFile, Generations
from millrace.log.generations.service import open_deployment_log
from millrace.log.generations.shared_list import KEEP, SharedList, shared_list
from millrace.message.ids import LogId
from millrace.storage import objects
from millrace.storage.store import store_at
from tests.failpoints import at_failpoints
from tests.s3_server import Faults, bucket


class Killed(BaseException):
    pass


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as proxy:
        yield proxy


@pytest.fixture
def shared(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedList]:
    with bucket(monkeypatch, faults.at) as uri:
        yield SharedList(lambda: f"{uri}/log")


def machine(folder: Path, shared: SharedList) -> GenerationFile:
    return GenerationFile(folder, "", shared=shared)


def names(generations: Generations) -> list[str]:
    return [item.url for item in generations.items]


def test_a_machine_without_a_folder_has_the_list_of_the_others(tmp_path: Path, shared: SharedList) -> None:
    one = machine(tmp_path / "one", shared)
    assert not (tmp_path / "one" / FILE).exists(), "nothing is made by looking"
    one.change(lambda list_: list_.with_next("rocksmq", {"p": LogId(0, 3)}))
    two = machine(tmp_path / "two", shared)
    assert two.generations == one.generations
    two.change(lambda list_: list_.with_end(0, "p", LogId(0, 5)))
    assert one.generations.items[0].ends == {}
    assert machine(tmp_path / "one", shared).generations.items[0].ends == {"p": LogId(0, 5)}
    one.change(lambda list_: list_.with_end(0, "p", LogId(0, 9)))
    assert one.generations.items[0].ends == {"p": LogId(0, 5)}, "the first recorded end counts, of any machine"


def test_a_process_that_outlives_a_move_of_the_tables_changes_the_list_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket(monkeypatch) as box:
        data = tmp_path / "data"
        settings = following(Settings(data_dir=data, tables=f"{box}/old"))
        shared = shared_list(settings)
        assert shared is not None
        server = machine(tmp_path / "server", shared)
        server.change(lambda list_: list_.with_next("rocksmq", {"p": LogId(0, 3)}))
        copied = store_at(f"{box}/old/log")
        for name in copied.list(""):
            store_at(f"{box}/new/log").replace(name, copied.read(name) or b"")
        server.change(lambda list_: list_.with_end(0, "p", LogId(0, 4)))  # after the move has copied the list
        write_place(data, TablesPlace(f"{box}/new", (f"{box}/old",)))
        server.change(lambda list_: list_.with_end(0, "q", LogId(0, 5)))
        node = machine(tmp_path / "node", SharedList(lambda: f"{box}/new/log"))
        assert node.generations.items[0].ends == {"p": LogId(0, 4), "q": LogId(0, 5)}
        write_place(data, TablesPlace("", (f"{box}/new",)))
        server.change(lambda list_: list_.with_end(0, "r", LogId(0, 6)))
        assert GenerationFile(tmp_path / "server", "").generations.items[0].ends["r"] == LogId(0, 6)


def test_the_list_of_an_earlier_build_goes_to_the_store(tmp_path: Path, shared: SharedList) -> None:
    GenerationFile(tmp_path / "one", "").change(lambda list_: list_.with_next("rocksmq", {}))
    assert shared.newest() == (0, b"")
    machine(tmp_path / "one", shared)
    assert names(machine(tmp_path / "two", shared).generations) == ["rocksmq", "rocksmq"]
    assert names(GenerationFile(tmp_path / "one", "").generations) == ["rocksmq", "rocksmq"]


def test_changes_of_several_machines_at_once_are_all_kept(tmp_path: Path, shared: SharedList, faults: Faults) -> None:
    chosen, guard = random.Random(7), threading.Lock()

    def broken(method: str, path: str) -> str:
        with guard:
            return chosen.choice([""] * 12 + ["503", "reset", "lost"])

    machine(tmp_path / "0", shared).ensure_written()
    faults.break_request = broken

    def work(number: int) -> None:
        file = machine(tmp_path / str(number), shared)
        left = [f"p{number}-{turn}" for turn in range(4)]
        while left:
            with suppress(LogUnavailable):  # the caller repeats it
                file.change(partial(Generations.with_end, generation=0, pchannel=left[0], end=LogId(0, 1)), timeout=60)
                left.pop(0)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    faults.break_request = lambda method, path: ""
    found = machine(tmp_path / "another", shared).generations
    assert set(found.items[0].ends) == {f"p{number}-{turn}" for number in range(3) for turn in range(4)}
    store = shared._lists()
    assert store is not None
    assert len(store.list("")) <= KEEP


def test_a_machine_that_died_before_its_copy_was_written_takes_it_later(tmp_path: Path, shared: SharedList) -> None:
    file = machine(tmp_path / "one", shared)
    file.ensure_written()

    def die(name: str) -> None:
        if name == "generations.shared":
            raise Killed

    with pytest.raises(Killed), at_failpoints(die):
        file.change(lambda list_: list_.with_next("rocksmq", {}))
    assert names(GenerationFile(tmp_path / "one", "").generations) == ["rocksmq"]
    assert names(machine(tmp_path / "one", shared).generations) == ["rocksmq", "rocksmq"]


def test_a_store_out_of_reach_stops_changes_and_a_machine_without_a_copy(
    tmp_path: Path, shared: SharedList, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path / "one", shared).ensure_written()
    monkeypatch.setattr(objects, "_retrying", objects._single)
    faults.break_request = lambda method, path: "503"
    file = machine(tmp_path / "one", shared)
    with pytest.raises(LogUnavailable, match="cannot reach the list"):
        file.change(lambda list_: list_.with_next("rocksmq", {}))
    with pytest.raises(LogUnavailable, match="cannot reach the list"):
        machine(tmp_path / "two", shared)
    assert not (tmp_path / "two" / FILE).exists()


def test_the_requests_are_few(tmp_path: Path, shared: SharedList, faults: Faults) -> None:
    file = machine(tmp_path / "one", shared)
    file.ensure_written()
    faults.requests.clear()
    machine(tmp_path / "one", shared)
    assert faults.requests.total() <= 2
    faults.requests.clear()
    file.change(lambda list_: list_.with_end(0, "p", LogId(0, 1)))
    assert faults.requests.total() <= 5
    faults.requests.clear()
    for _ in range(100):
        file.refresh()
    assert not faults.requests


def test_a_deployment_on_a_disk_has_no_shared_list_and_one_in_a_bucket_has(tmp_path: Path, shared: SharedList) -> None:
    assert shared_list(Settings(data_dir=tmp_path)) is None
    assert shared_list(Settings(data_dir=tmp_path, tables=(tmp_path / "elsewhere").as_uri())) is None
    tables = str(shared._uri()).removesuffix("/log")
    settings = Settings(data_dir=tmp_path, tables=tables)
    with open_deployment_log(tmp_path / "log", shared=shared_list(settings)) as service:
        service.create("p")
    assert store_at(f"{tables}/log").list("") == [f"{1:020d}.json"]
