"""A spool that waited longer than the chain remembers its producer.

What was never sent goes out as another one's, once and in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.producer import Producer
from millrace.client.spool.producer_remap import ProducerRemap
from millrace.client.spool.queue import Spool, SpoolChannel
from millrace.client.spool.sender import SpoolSender
from millrace.message import builders
from tests.client.conftest import ITEMS, item_rows, opened_shop, own_name
from tests.client.spool.test_sender import Breakable, Stored, producer_with


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A deployment whose chain remembers two producers of a VChannel, and has small messages."""
    for client in opened_shop(tmp_path_factory.mktemp("renamed")):
        for each in client.catalog.pchannels():
            client.catalog.open_term(each.name, config={"max_producers": 2, "max_message_bytes": 10_000})
        yield client


@pytest.fixture
def way(shop: Database) -> Breakable:
    return Breakable(shop)


@pytest.fixture
def items(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    """A collection of one VChannel."""
    return shop.catalog.create_collection(own_name(request), ITEMS, vchannels=1)


def others_write(shop: Database, items: CollectionInfo, first: int) -> None:
    """So many that the chain forgets whoever wrote before."""
    for key in range(first, first + 3):
        with shop.new_producer() as other:
            other.insert(items, item_rows(key, name="another's"))


def written(producer: Producer, items: CollectionInfo) -> None:
    """What comes out right in one order alone: 2 is "second"."""
    for name in ("first", "second"):
        producer.delete(items, [2])
        producer.insert(items, item_rows(2, name=name))


def cut_off(producer: Producer, way: Breakable, items: CollectionInfo) -> None:
    """One row goes out, one perhaps, what is `written` does not: the way to the log is gone."""
    producer.insert(items, item_rows(0, name="direct"))
    way.down = True
    producer.insert(items, item_rows(1, name="perhaps sent"))
    written(producer, items)


def sent(producer: Producer) -> None:
    assert producer.spool is not None
    assert producer.spool.wait_empty(timeout=10), producer.spool.error


def rejected(folder: Path) -> list[str]:
    path = folder / "rejected.jsonl"
    return [json.loads(line)["reason"] for line in path.read_text().splitlines()] if path.exists() else []


def test_what_was_never_sent_arrives_and_what_perhaps_was_is_recorded(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    with producer_with(shop, way, tmp_path) as producer:
        cut_off(producer, way, items)
        others_write(shop, items, 100)
        way.down = False
        sent(producer)
        producer.insert(items, item_rows(3, name="direct"))
        assert not list(tmp_path.rglob("renamed.json"))
    found = stored(items)
    assert {key: found[key] for key in found if key < 100} == {0: "direct", 2: "second", 3: "direct"}
    assert rejected(tmp_path) == ["UNKNOWN_PRODUCER"]


@pytest.mark.parametrize("forgotten_again", [False, True])
def test_a_process_that_dies_behind_the_append_doubles_nothing(
    shop: Database,
    way: Breakable,
    items: CollectionInfo,
    tmp_path: Path,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    forgotten_again: bool,
) -> None:
    with producer_with(shop, way, tmp_path) as producer:
        cut_off(producer, way, items)
    others_write(shop, items, 100)
    way.down = False
    settle = SpoolChannel.settle

    def dies(self: SpoolChannel, number: int) -> None:
        if number > 0:
            way.down = True
            raise OSError("killed behind the append")
        settle(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(SpoolChannel, "settle", dies)
        with producer_with(shop, way, tmp_path) as killed:
            assert killed.spool is not None
            assert not killed.spool.wait_empty(timeout=0.5)
    assert len(list(tmp_path.rglob("renamed.json"))) == 1
    if forgotten_again:
        others_write(shop, items, 200)
    way.down = False
    with producer_with(shop, way, tmp_path) as again:
        again.insert(items, item_rows(4, name="behind"))
        sent(again)
    found = stored(items)
    assert {key: found[key] for key in found if key < 100} == {0: "direct", 2: "second", 4: "behind"}
    assert rejected(tmp_path) == ["UNKNOWN_PRODUCER"] * (5 if forgotten_again else 1)


def test_a_message_that_uses_no_number_holds_up_nothing_behind_it(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    with producer_with(shop, way, tmp_path) as producer:
        way.down = True
        producer.insert(items, item_rows(1))
        producer.insert(items, item_rows(2, name="x" * 20_000))
        producer.insert(items, item_rows(3))
        way.down = False
        sent(producer)
    assert stored(items).keys() == {1, 3}
    assert rejected(tmp_path) == ["TOO_LARGE"]


def test_what_was_on_its_way_when_the_log_was_lost_was_perhaps_sent(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpoolSender, "_begin", lambda self, pchannel: None)  # nobody sends it
    way.down = True
    with producer_with(shop, way, tmp_path) as producer:
        producer.insert(items, item_rows(1))
        assert producer.spool is not None
        assert producer.spool.spool.channel(items.pchannels[0]).attempted == 1


def test_what_an_earlier_build_left_was_perhaps_sent(tmp_path: Path) -> None:
    with Spool(tmp_path) as made:
        made.channel("p").append(b"frame")
        assert made.channel("p").attempted == 0
    with Spool(tmp_path) as again:
        assert again.channel("p").attempted == 0
    (tmp_path / "p" / "attempted").unlink()
    with Spool(tmp_path) as earlier:
        assert earlier.channel("p").attempted == 1


def test_a_name_stands_before_it_is_used(tmp_path: Path) -> None:
    message = builders.begin_txn(1, vchannel="v", collection_id=1, term=1, producer_id=7, epoch=3, sequence=5)
    first = ProducerRemap(tmp_path)
    assert first(message) is message
    first.assign([message], 99)
    assert ProducerRemap(tmp_path)(message) == first(message)
    assert (first(message).sequence, first(message).epoch, first(message).barrier_tick) == (0, 1, 99)
    assert first(message).producer_id != 7
