"""Tables of a real PostgreSQL, captured by the real engine: what the lane has, replayed, is what the database has."""

from __future__ import annotations

import json
import random
from pathlib import Path

import psycopg
import pytest

from millrace.base.errors import StreamBusy
from millrace.brokers.postgres import PostgresServer
from millrace.flows.records import is_truncation
from millrace.flows.sources.capture import feeder as feeder_module
from millrace.flows.sources.capture.feeder import Feeder
from tests.flows.sources.capture.shops import kill_engine
from tests.flows.sources.postgres.shop import Shop
from tests.waiting import until

FULL = "alter table items replica identity full"


def test_a_table_and_its_changes_come_with_whole_transactions_and_the_slot_goes_with_the_flow(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute(FULL, "insert into items select g, 'n' || g, g * 3 from generate_series(1, 500) g")
    with shop.captured() as feeder:
        shop.reaches()
        with shop.connect() as db, db.transaction():
            db.execute("update items set amount = -1 where id < 50")
            db.execute("delete from items where id > 480")
            db.execute("update items set id = 600 where id = 60")
        shop.reaches()
        with pytest.raises(StreamBusy):
            Feeder(shop.settings, shop.folder, tables=["public.items"], properties={}, max_bytes=1)
        kill_engine(feeder)
        shop.execute("truncate items", "insert into items values (1, 'after', 1)")
        shop.reaches()
    found = shop.records()
    assert [each.offset for each in found] == sorted({each.offset for each in found}), "each change once, in order"
    updates = [each for each in found if json.loads(each.value or b"{}").get("amount") == -1]
    assert len({dict(each.headers)["millrace.transaction"] for each in updates}) == 1
    assert [each.value for each in found if each.key == b"60"][1:] == [None], "an update of the key deletes the old one"
    assert [is_truncation(each) for each in found[-2:]] == [True, False]
    assert shop.slots() == [shop.slot]
    shop.released()
    assert shop.slots() == []
    assert shop.execute("select count(*) from pg_publication") == [(0,)]
    assert not shop.folder.exists()
    shop.released()


@pytest.mark.slow
def test_a_transaction_that_is_cut_off_by_kills_of_the_engine_comes_whole_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many changes of one transaction share a position, and changes of transactions lie between one another's."""
    monkeypatch.setattr(feeder_module, "_LONGEST_PAUSE", 0.2)
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute(FULL)
    dice = random.Random(7)
    with shop.captured() as feeder:
        until(lambda: shop.standing().complete, "the capture follows the log", seconds=60)
        for turn in range(6):
            with shop.connect() as first, shop.connect() as second, first.transaction(), second.transaction():
                for part in range(4):
                    start = turn * 100_000 + part * 2_000
                    first.execute(f"insert into items select g, 'a', 0 from generate_series({start}, {start + 999}) g")
                    with second.cursor().copy("copy items from stdin") as copy:
                        for each in range(start + 50_000, start + 51_000):
                            copy.write_row((each, "b", 0))
            held = shop.standing().next
            until(lambda held=held: shop.standing().next > held + dice.randrange(7000), "changes come", seconds=60)
            kill_engine(feeder)
            shop.execute(f"update items set amount = {turn} where id % 5 = {turn}")
        shop.reaches()
    found = shop.records()
    first_of: dict[bytes, int] = {}
    for each in found:
        if dict(each.headers)["millrace.op"] == b"c":
            assert each.key not in first_of, "each insert comes once"
            first_of[each.key or b""] = each.offset
    assert len(first_of) == 6 * 8000


@pytest.mark.slow
def test_a_database_that_is_killed_is_followed_again(tmp_path: Path) -> None:
    with PostgresServer(tmp_path / "postgres").start() as server:
        shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", server=server)
        shop.execute(FULL)
        with shop.captured():
            shop.reaches()
            for turn in range(3):
                shop.execute(f"insert into items select g, 'x', {turn} from generate_series({turn}000, {turn}900) g")
                open_one = shop.connect()
                open_one.execute("begin")
                open_one.execute("insert into items values (-1, 'never', 1)")
                server.kill()
                server.start()
                with pytest.raises(psycopg.OperationalError):
                    open_one.execute("commit")
                shop.execute(f"delete from items where id % 7 = {turn}")
            shop.reaches()
        shop.released()
