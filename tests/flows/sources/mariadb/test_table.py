"""Tables of a real MariaDB, captured by the real engine: what the lane has, replayed, is what the database has."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pymysql
import pytest

from millrace.base.errors import InvalidSettings, LogUnavailable, StreamBusy
from millrace.base.settings import Settings
from millrace.brokers.mariadb import MariaDbServer
from millrace.flows.sources.capture.feeder import Feeder
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.mariadb.model import MariaDbSource
from millrace.flows.sources.mariadb.table import BinaryLog, bytes_between, check_server, connected
from tests import running_brokers
from tests.flows.sources.capture.shops import CapturedShop, kill_engine
from tests.waiting import until


class Shop(CapturedShop):
    """A database of its own on the server, a table in it, and the capture of that table."""

    def __init__(self, folder: Path, columns: str, *, server: MariaDbServer | None = None, **more: Any) -> None:
        server = server or running_brokers.mariadb()
        host, port = server.address.split(":")
        self.login = {"host": host, "port": int(port), "user": server.credentials.username}
        self.password = server.credentials.password
        self.database = f"shop_{uuid.uuid4().hex[:8]}"
        self.settings, self.group = Settings(data_dir=folder / "data"), f"millrace-{self.database}"
        self.execute(f"create database {self.database}")
        self.execute(f"create table items ({columns})")
        self.declared = MariaDbSource(
            **self.login, password=self.password, database=self.database, table="items", **more
        )
        self.lane, self.table = f"{self.database}.items", "items"

    def connect(self) -> Any:
        return pymysql.connect(**self.login, password=self.password, autocommit=True)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        with self.connect() as connection, connection.cursor() as cursor:
            if not statements[0].startswith("create database"):
                cursor.execute(f"use {self.database}")
            for each in statements:
                cursor.execute(each)
            return list(cursor.fetchall())

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the table, by key, if all of its columns are numbers and texts."""
        with self.connect() as connection, connection.cursor(pymysql.cursors.DictCursor) as cursor:
            cursor.execute(f"select * from {self.database}.{self.table}")
            return {str(row["id"]): row for row in cursor.fetchall()}


def test_a_table_and_its_changes_come_with_whole_transactions_and_continue_after_kills(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute("insert into items select seq, concat('n', seq), seq * 3 from seq_1_to_500")
    with shop.captured():
        shop.reaches()
        shop.execute(
            "begin", "update items set amount = -1 where id < 50", "delete from items where id > 480", "commit"
        )
        shop.reaches()
        with pytest.raises(StreamBusy):
            Feeder(
                shop.settings, spool_folder(shop.settings, shop.group), tables=[shop.lane], properties={}, max_bytes=1
            )
    shop.execute("insert into items values (1000, 'between two runs', 1)")
    with shop.captured() as feeder:
        shop.reaches()
        shop.execute("insert into items select 2000 + seq, 'x', seq from seq_1_to_50")
        kill_engine(feeder)
        shop.execute("update items set amount = 7 where id % 7 = 3")
        shop.execute("truncate table items", "insert into items values (1, 'after', 1)")
        shop.reaches()
    found = shop.records()
    assert [each.offset for each in found] == sorted({each.offset for each in found}), "each change once, in order"
    updates = [each for each in found if json.loads(each.value or b"{}").get("amount") == -1]
    assert len({dict(each.headers)["millrace.transaction"] for each in updates}) == 1


DDL = (
    "alter table items add column note varchar(10)",
    "alter table items add column five int not null default 5",
    "alter table items rename column note to words",
    "alter table items drop column words, add column words varchar(10)",
    "alter table items modify amount int",
    "alter table items modify amount bigint",
    "alter table items add column twice int generated always as (id * 2) stored",
    "alter table items add column three int default 3, add index (three)",
    "alter table items change three tres smallint",
    "alter table items drop column five",
    "alter table items convert to character set latin1",
    "alter table items partition by range (id)"
    " (partition low values less than (20), partition high values less than maxvalue)",
    "alter table items truncate partition high",
    "alter table items drop partition high",
    "alter table items remove partitioning",
    "create index i on items (amount)",
    "truncate table items",
    "rename table items to others, spare to items",
    "alter table items rename to spare, add column late int default 7",
    "rename table spare to items",
    "drop table items",
    "create or replace table items (id int primary key, other int) select seq id, 4 other from seq_1_to_5",
    "alter table items add column made int as (other + id)",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_follow_ddl_that_changes_them_without_a_word_in_the_log(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount int")
    shop.execute(
        "create table spare (id int primary key, name varchar(20), amount int)",
        "insert into spare values (1, 'spare', 1), (2, 'spare', 2)",
        "insert into items select seq, concat('n', seq), seq * 3 from seq_1_to_50",
    )

    def equal() -> bool:
        tables = shop.execute("show tables like 'items'")
        wanted = shop.rows() if tables else {}
        found = shop.replayed()
        return found.keys() == wanted.keys() and all(
            found[key].get(name) == value for key, row in wanted.items() for name, value in row.items()
        )

    with shop.captured() as feeder:
        until(equal, "the snapshot", seconds=60)
        for number, statement in enumerate(DDL):
            shop.execute(statement)
            if number % 5 == 2:
                kill_engine(feeder)
            if number % 2 and shop.execute("show tables like 'items'"):
                shop.execute(
                    f"insert ignore into items (id) values ({number})",
                    f"update items set id = id + {1000 * number} where id = 3",
                )
            until(equal, statement, seconds=60)
        with Spool(spool_folder(shop.settings, shop.group)) as spool:
            until(lambda: not spool.standing().unread, "nothing is left to be read", seconds=30)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_table_that_is_declared_later_is_read_beside_the_changes(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, amount int")
    shop.execute(
        "insert into items values (1, 1)",
        "create table later (id int primary key, amount int)",
        "insert into later select seq, 1 from seq_1_to_20000",
    )
    with shop.captured():
        shop.reaches()
    shop.execute("delete from later where id % 3 = 0", "insert into items values (2, 2)")
    declared, lane = shop.declared, shop.lane
    shop.declared = declared.model_copy(update={"table": None, "tables": ("items", "later")})
    with shop.captured() as feeder:
        with Spool(spool_folder(shop.settings, shop.group)) as spool:
            until(lambda: spool.standing().next > 4000, "a part of it is read", seconds=60)
            kill_engine(feeder)
        shop.execute("update later set amount = 2 where id % 7 = 0", "delete from later where id > 19000")
        shop.lane, shop.table = f"{shop.database}.later", "later"
        shop.reaches()
        shop.lane, shop.table = lane, "items"
        shop.reaches()
        with Spool(spool_folder(shop.settings, shop.group)) as spool:
            until(lambda: not spool.standing().unread, "nothing is left to be read", seconds=30)
            assert spool.standing().epoch == 1, "the other table was not read again"


def test_what_a_server_lacks_is_said_before_anything_starts(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key")
    check_server(shop.declared)
    for declared, words in (
        (shop.declared.model_copy(update={"table": "absent"}), "does not exist"),
        (shop.declared.model_copy(update={"user": "nobody"}), "refuses 'nobody'"),
    ):
        with pytest.raises(InvalidSettings, match=words):
            check_server(declared)
    shop.execute("create table bare (id int)", "create view seen as select * from bare")
    with pytest.raises(InvalidSettings, match="ADD PRIMARY KEY"):
        check_server(shop.declared.model_copy(update={"table": "bare"}))
    with pytest.raises(InvalidSettings, match="is a view"):
        check_server(shop.declared.model_copy(update={"table": "seen"}))
    with pytest.raises(LogUnavailable, match="cannot be reached"):
        check_server(shop.declared.model_copy(update={"port": 1}))
    shop.execute("set global binlog_row_image = 'MINIMAL'")
    try:
        with pytest.raises(InvalidSettings, match="SET GLOBAL binlog_row_image = 'FULL'"):
            check_server(shop.declared)
    finally:
        shop.execute("set global binlog_row_image = 'FULL'")


def test_the_bytes_to_a_position_are_counted_by_the_server_s_order_of_files() -> None:
    sizes = {"b.999998": 10, "b.999999": 100, "b.1000000": 1000}

    def between(first: str, start: int, last: str, end: int) -> int:
        return bytes_between(sizes, {"file": first, "pos": start}, {"file": last, "pos": end})

    assert between("b.999999", 40, "b.1000000", 7) == 67
    assert between("b.999998", 4, "b.1000000", 7) == 113
    assert between("b.1000000", 7, "b.999999", 40) == 0, "it went on"
    assert between("b.1000000", 70, "b.1000000", 40) == -30
    assert between("b.000003", 70, "b.1000000", 40) == 1110, "purged"
    assert between("b.999998", 70, "b.999998", 4) == 1110, "the log begins anew, with the same names"
    assert between("b.999999", 40, "b.000001", 7) == 0, "the end was purged"


def test_a_connection_that_ends_is_an_error_that_is_tried_again(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key")
    log = BinaryLog(shop.declared)
    end = log.end()
    assert log.behind(end, log.end()) == 0
    assert log.behind({**end, "pos": end["pos"] + (1 << 40)}, end) > 0, "a log that was begun anew"
    shop.execute("insert into items values (1)")
    assert 0 < log.behind(end, log.end()) < 10_000
    with pytest.raises(LogUnavailable, match="cannot be reached"):
        _ask_while_it_is_ended(shop)


def _ask_while_it_is_ended(shop: Shop) -> None:
    with connected(shop.declared) as cursor:
        shop.execute(f"kill {cursor.connection.thread_id()}")
        cursor.execute("select 1")


@pytest.mark.slow
def test_a_snapshot_that_is_killed_is_seen_by_nobody_and_begins_anew(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(200), amount bigint")
    shop.execute("insert into items select seq, repeat('n', 180), seq from seq_1_to_60000")
    folder = spool_folder(shop.settings, shop.group)
    with shop.captured() as feeder:
        with Spool(folder) as spool:
            until(lambda: spool.standing().next > 2048, "a part of the snapshot is in the spool", seconds=60)
            assert not spool.standing().complete
            assert spool.standing().high == 0
            kill_engine(feeder)
        shop.execute("delete from items where id % 2 = 0")
        shop.reaches()
        with Spool(folder) as spool:
            assert spool.standing().epoch == 2
    assert len(shop.rows()) == 30000


@pytest.mark.slow
def test_types_keep_their_values(tmp_path: Path) -> None:
    shop = Shop(
        tmp_path,
        "id int unsigned primary key, big bigint unsigned, price decimal(65,30), bits bit(12), flag bit(1), y year,"
        " e enum('a','b'), s set('x','y'), j json, raw blob, d date, dt datetime(6), ts timestamp(6) null, t time(6),"
        " name varchar(50), f float, fd double, made int generated always as (id + 1) stored",
    )
    values = (
        "(1, 18446744073709551615, 12345678901234567890123456789012345.123456789012345678901234567890, b'101', b'1',"
        " 2024, 'a', 'x,y', '{\"a\":1}', x'00ff', '2024-02-29', '1000-01-01 00:00:00.000001',"
        " '2024-01-01 01:02:03.123456', '-838:59:59', 'Ä😀', 1.5, 0.1, default)"
    )
    wanted = {
        "id": "1", "big": "18446744073709551615",
        "price": '"12345678901234567890123456789012345.123456789012345678901234567890"', "bits": "5", "flag": "true",
        "y": "2024", "e": '"a"', "s": '"x,y"', "j": '"{\\"a\\":1}"', "raw": '"AP8="', "d": '"2024-02-29"',
        "dt": '"1000-01-01T00:00:00.000001"', "ts": '"2024-01-01T01:02:03.123456Z"', "t": '"-838:59:59.000000"',
        "name": '"Ä😀"', "f": "1.5", "fd": "0.1", "made": "2",
    }  # fmt: skip
    shop.execute(f"insert into items values {values}")
    with shop.captured():
        until(lambda: len(shop.records()) == 1, "the snapshot has the row", seconds=60)
        shop.execute(f"insert into items values {values.replace('(1,', '(2,')}")
        until(lambda: len(shop.records()) == 2, "the change is there", seconds=60)
    for record, key in zip(shop.records(), ("1", "2"), strict=True):
        assert record.value is not None
        row = msgspec.json.decode(record.value, type=dict[str, msgspec.Raw])
        texts = {name: bytes(each).decode().replace("\\uD83D\\uDE00", "😀") for name, each in row.items()}
        assert texts == wanted | {"id": key, "made": str(int(key) + 1)}
