"""What every source promises (millrace.flows.sources.source): lanes, ranges that never change, no silent loss."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Protocol

import pytest
import zmq

import millrace.testing
from millrace.base.errors import LogRegressed
from millrace.base.settings import Settings
from millrace.flows import registry
from millrace.flows.records import Record
from millrace.flows.registry import Source as Declared
from millrace.flows.registry import feeder_of, reader_of, source_of
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.direct.model import DirectSource
from millrace.flows.sources.files.model import FilesSource
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.source import LaneReader, Limits, Source, task_of
from millrace.testing import Deployment
from tests.flows.brokers_in_process import Brokers, brokers
from tests.flows.sources.direct.test_receiving import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[3]
MANY = Limits(1_000, 1 << 20, 0.2)


class World(Protocol):
    """A source that a test writes to."""

    settings: Settings
    declared: Declared

    def write(self, names: list[str]) -> None:
        """Add a row or record of each name; its lane is a function of the name."""
        ...


@dataclass
class Topic:
    kafka: Brokers
    settings: Settings
    declared: KafkaSource

    def write(self, names: list[str]) -> None:
        for name in names:
            self.kafka.send("in", [(name.encode(), name.encode(), [])], partition=len(name) % 2)


@dataclass
class Rows:
    db: Deployment
    settings: Settings
    declared: CollectionSource

    def write(self, names: list[str]) -> None:
        self.db.collection("in").upsert([{"id": name} for name in names])


@dataclass
class Files:
    """The example package's kind, registered as an entry point would do it."""

    settings: Settings
    declared: Any

    def write(self, names: list[str]) -> None:
        for name in names:
            with (Path(self.declared.folder) / f"file{len(name) % 2}.jsonl").open("a") as file:
                file.write(f"{name}\n")


@dataclass
class Fed:
    """A source that a feeder of the flow fills. Waits after each write until its lane has it."""

    settings: Settings
    declared: Any
    written: int = 0

    def write(self, names: list[str]) -> None:
        self.send([json.dumps({"id": name}).encode() for name in names])
        self.written += len(names)
        until(lambda: self.arrived() == self.written, f"{self.written} records arrive")

    def arrived(self) -> int:
        source = source_of(self.declared, self.settings, group="g")
        lanes = readers(self, source)
        try:
            return sum(len(read(lanes[lane], low, high)) for lane, (low, high) in source.ends().items())
        finally:
            source.close()
            for each in lanes.values():
                each.close()

    def send(self, documents: list[bytes]) -> None:
        raise AssertionError("each kind sends in its own way")


class Folder(Fed):
    """Files that appear in a folder, one for each write."""

    def send(self, documents: list[bytes]) -> None:
        (Path(self.declared.folder) / f"{self.written:04}.jsonl").write_bytes(b"\n".join(documents) + b"\n")


class Datagrams(Fed):
    def send(self, documents: list[bytes]) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for each in documents:
                sender.sendto(each, (self.declared.host, self.declared.port))


class Pushed(Fed):
    def send(self, documents: list[bytes]) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
            sender.connect(f"tcp://{self.declared.address}")
            for each in documents:
                sender.send(each)


FED = {
    "files": (Folder, lambda folder, port: FilesSource(folder=str(folder), settle_seconds=0, every_seconds=0.05)),
    "udp": (Datagrams, lambda folder, port: DirectSource(address=f"127.0.0.1:{port}")),
    "zeromq": (
        Pushed,
        lambda folder, port: DirectSource(
            transport="zeromq", socket="pull", connect=False, address=f"127.0.0.1:{port}"
        ),
    ),
}


@contextmanager
def fed(kind: str, folder: Path) -> Iterator[Fed]:
    """A source with its feeder, as the flow runs it."""
    made, declared = FED[kind]
    (folder / "in").mkdir()
    port = free_port(socket.SOCK_STREAM if kind == "zeromq" else socket.SOCK_DGRAM)
    world = made(Settings(data_dir=folder / "data"), declared(folder / "in", port))
    feeder = feeder_of(world.declared, world.settings, group="g")
    assert feeder is not None
    try:
        feeder.wait_complete(20.0)  # it listens
        yield world
    finally:
        feeder.close()


@contextmanager
def example(group: str, folder: str, package: str) -> Iterator[Any]:
    """The KIND of an example package, as an installed one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / folder)
        point = EntryPoint(package, f"{package}:KIND", group)
        patch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
        registry.source_kinds.cache_clear()
        try:
            yield point.load()
        finally:
            registry.source_kinds.cache_clear()
            sys.modules.pop(package, None)


@pytest.fixture(params=["kafka", "collection", "lines", *FED])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "lines":
        with example(registry.SOURCE_GROUP, "lines_source", "millrace_lines_source") as kind:
            yield Files(Settings(), kind.model(folder=str(tmp_path)))
        return
    if request.param in FED:
        with fed(request.param, tmp_path) as made:
            yield made
        return
    if request.param == "kafka":
        with brokers() as kafka:
            kafka.send("in", [])
            reached = {"bootstrap": (kafka.address,), "socket_timeout_ms": 2_000, "poll_timeout_ms": 50}
            yield Topic(kafka, Settings(), KafkaSource(topics=("in",), **reached))
        return
    with millrace.testing.deployment() as db:
        db.create_collection("in", {"id": "string"}, key="id", vchannels=2)
        yield Rows(db, db.settings, CollectionSource(collection="in"))


def opened(world: World) -> Source:
    return source_of(world.declared, world.settings, group="g")


def readers(world: World, source: Source) -> dict[str, LaneReader]:
    return {
        task_of(topic, partition): reader_of(
            world.declared, world.settings, group="g", topic=topic, partition=partition
        )
        for topic, partition in source.partitions()
    }


def read(reader: LaneReader, start: int, end: int, limits: Limits = MANY) -> list[Record]:
    """All of a range, batch by batch; positions follow one another."""
    found: list[Record] = []
    place = start
    while place < end:
        before = place
        for batch in reader.batches(place, end, limits):
            assert batch.start == before
            assert before <= batch.end <= end
            found += batch.records or ()
            place = batch.end
        assert place > before
    return found


def name_of(record: Record) -> str:
    """Of a source without keys, the value."""
    text = (record.value or b"" if record.key is None else record.key).decode()
    return str(json.loads(text)["id"]) if text.startswith("{") else text


def names(records: list[Record]) -> set[str]:
    return set(map(name_of, records))


def by_key(records: list[Record]) -> dict[str, list[Record]]:
    """The records of each key in their order, which is what a lane promises; those of a collection merge VChannels."""
    found: dict[str, list[Record]] = {}
    for each in records:
        found.setdefault(name_of(each), []).append(each)
    return found


def test_each_record_is_in_one_lane_once_and_ranges_stay_what_they_are(world: World) -> None:
    written = ["a", "bb", "ccc", "dddd", "eeeee"]
    world.write(written)
    source = opened(world)
    first = source.ends()
    assert set(first) == {task_of(*each) for each in source.partitions()}
    lanes = readers(world, source)
    try:
        before = {lane: read(lanes[lane], low, high) for lane, (low, high) in first.items()}
        assert sorted(name for records in before.values() for name in names(records)) == written
        source.close()
        world.write(["a", "ffffff"])
        source = opened(world)
        later = source.ends()
        for lane, (low, high) in first.items():
            assert later[lane].low == low
            assert later[lane].high >= high
            again = read(lanes[lane], low, high)
            assert by_key(again) == by_key(before[lane]), "a range that is read again is the same"
        world.write(["a"])
        source.close()
        source = opened(world)
        for lane, (_, high) in source.ends().items():
            offsets = [each.offset for each in read(lanes[lane], first[lane].low, high) if name_of(each) == "a"]
            assert offsets == sorted(set(offsets)), "records of a key are in order"
        after = [read(lanes[lane], first[lane].high, later[lane].high) for lane in later]
        assert set().union(*map(names, after)) == {"a", "ffffff"}
    finally:
        source.close()
        for each in lanes.values():
            each.close()


def test_a_range_in_small_batches_is_the_range(world: World) -> None:
    world.write([f"{number:04}" for number in range(40)])
    source = opened(world)
    lanes = readers(world, source)
    try:
        for lane, (low, high) in source.ends().items():
            whole = by_key(read(lanes[lane], low, high))
            assert by_key(read(lanes[lane], low, high, Limits(3, 1 << 20, 0.0))) == whole
            assert by_key(read(lanes[lane], low, high, Limits(1_000, 1, 0.0))) == whole
    finally:
        source.close()
        for each in lanes.values():
            each.close()


def test_a_moment_is_a_position(world: World) -> None:
    world.write(["a", "bb"])
    source = opened(world)
    try:
        assert set(source.at(0)) == set(source.ends())
        assert all(place >= source.ends()[lane].low for lane, place in source.at(0).items())
    finally:
        source.close()
        source.close()


@pytest.mark.parametrize("world", ["kafka", "lines", "files", "udp"], indirect=True)  # ticks have no end
def test_a_position_beyond_the_end_is_an_error(world: World) -> None:
    world.write(["bb"])
    source = opened(world)
    lanes = readers(world, source)
    try:
        for reader in lanes.values():
            with pytest.raises(LogRegressed, match=r"beyond the end|is after the newest change"):
                read(reader, 1_000, 1_001)
    finally:
        source.close()
        for each in lanes.values():
            each.close()
