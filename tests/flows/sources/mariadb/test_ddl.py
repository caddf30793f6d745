"""DDL against a real MariaDB: whatever a statement does, lanes come to what SELECT * gives.

Debezium's own cases (debezium_ddl) run before the capture starts, so that the snapshot has their rows, and again while
it runs, so that the log has them, beside statements that change the tables.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from millrace.flows.sources.capture import feeder as feeder_module
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from tests.flows.sources.capture.shops import kill_engine
from tests.flows.sources.mariadb.replay import Tables
from tests.waiting import until

CASES = Path(__file__).parent / "debezium_ddl"
QUICK = ("custom_snapshot", "enum_column_test", "transaction_metadata_test", "zero_date_fallback_converter")
LEFT_OUT = {"custom_snapshot", "transaction_metadata_test", "datetime_key_test"}
"""Two make tables that others make, too. The third has a test of its own."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(
            sorted({each.stem for each in CASES.glob("*.sql")} - LEFT_OUT),
            id="all",
            marks=[pytest.mark.slow, pytest.mark.timeout(1200)],
        ),
    ],
)
def test_cases_of_debezium_come_to_what_the_tables_have(tmp_path: Path, names: tuple[str, ...]) -> None:
    shop = Tables(tmp_path, "items")
    scripts = [(CASES / f"{name}.sql").read_text() for name in names]
    for script in scripts:
        shop.script(f"set sql_mode = ''; {script}")
    tables = [each for each in shop.keyed() if each != "items"]
    shop.capture(*tables)
    with shop.captured() as feeder, Spool(spool_folder(shop.settings, shop.group)) as spool:
        shop.equal(tables, "the snapshot", seconds=120)
        there = [each for each in shop.execute("show full tables") if each[0] != "items"]  # some have no key
        there += shop.execute(
            "select routine_name, routine_type from information_schema.routines where routine_schema = database()"
        )
        kinds = {"BASE TABLE": "table"}
        drops = "; ".join(f"drop {kinds.get(kind, kind)} `{name.replace('`', '``')}`" for name, kind in there)
        shop.script(f"set foreign_key_checks = 0; {drops}")
        shop.equal(tables, "the tables are gone", seconds=120)
        for script in scripts:
            shop.script(f"set sql_mode = ''; set foreign_key_checks = 0; {script}")
        shop.equal(tables, "the log", seconds=180)
        kill_engine(feeder)
        for each in tables:
            name = f"`{each.replace('`', '``')}`"
            shop.script(
                f"set sql_mode = ''; set foreign_key_checks = 0; alter table {name} add column late_1 int default 7,"
                f" add column late_2 varchar(10); update {name} set late_2 = 'x'; alter table {name} drop column late_1"
            )
        shop.equal(tables, "columns that came and went", seconds=240)
        until(lambda: not spool.standing().unread, "nothing is left to be read", seconds=60)
        assert spool.standing().epoch == 1, spool.standing().error


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_tables_are_read_beside_busy_and_idle_logs(tmp_path: Path) -> None:
    """The engine hears of tables to be read in one thread, and reads most of them in the one of the log."""
    shop = Tables(tmp_path, "items")
    names = [f"t{number:02}" for number in range(40)]
    for name in names:
        shop.script(f"create table {name} (id int primary key, n int); insert into {name} values (1, 1), (2, 2)")
    shop.execute("create table others (id int primary key auto_increment)")  # of the database, not captured
    with shop.captured(), Spool(spool_folder(shop.settings, shop.group)) as spool:
        until(lambda: spool.standing().complete, "the snapshot")
    shop.capture("items", *names)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            shop.execute(*["insert into others values ()"] * 50)

    writer = threading.Thread(target=write)
    with shop.captured(), Spool(spool_folder(shop.settings, shop.group)) as spool:
        until(lambda: not spool.standing().unread, "the added tables are read, with an idle log", seconds=60)
        assert shop.differences(names) == []
        writer.start()
        try:
            for wave in range(6):
                for name in names:
                    shop.execute(f"alter table {name} add column c{wave} int not null default {wave}")
                    time.sleep(0.02)  # so that tables are asked for while others are read
                until(lambda: not spool.standing().unread, f"wave {wave} is read, beside writers", seconds=60)
        finally:
            stop.set()
            writer.join()
        shop.equal(names, "all waves")
        assert spool.standing().epoch == 1, spool.standing().error


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_statements_that_follow_each_other_before_the_first_is_read(tmp_path: Path) -> None:
    """Each of these makes the capture read rows again, of a table that the next one changes, moves or drops."""
    shop = Tables(tmp_path, "items", "other")
    shop.script(
        "alter table items add n int; insert into items select seq, seq from seq_1_to_20000;"
        "create table other (id int primary key, n int); insert into other values (1, 1)"
    )
    tables = ["items", "other"]
    with shop.captured() as feeder, Spool(spool_folder(shop.settings, shop.group)) as spool:
        shop.equal(tables, "the snapshot")
        for words in (
            "alter table items add a int default 1; alter table items add b int default 2; update items set n = 3",
            "alter table items modify n bigint not null; delete from items where id % 2; alter table items drop a",
            "alter table items add c int default 3; drop table items; create table items (id int primary key, x int);"
            "insert into items values (1, 1), (2, 2)",
            "alter table items add d int default 4; truncate table items; insert into items (id) values (3)",
            "alter table items add e int default 5; rename table items to gone, other to items, gone to other",
            "alter table items add f int default 6; drop table items; drop table other;"
            "create table other (id int primary key, z int default 9); insert into other (id) values (5)",
            "create table items (id int primary key); insert into items values (8)",
            "create or replace table items as select 1 id; alter table items add primary key (id)",
        ):
            shop.script(words)
            if "rename" in words or "drop a" in words:
                kill_engine(feeder)
            shop.equal(tables, words, seconds=150)
        until(lambda: not spool.standing().unread, "nothing is left to be read", seconds=60)
        assert spool.standing().epoch == 1, spool.standing().error


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_key_with_a_zero_date_cannot_be_read_beside_the_changes_and_is_read_by_a_new_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder_module, "_LONGEST_PAUSE", 1.0)
    shop = Tables(tmp_path, "items", on_loss="snapshot")
    shop.script((CASES / "datetime_key_test.sql").read_text())
    table = "dbz_1194_datetime_key_test"
    shop.capture("items", table)
    with shop.captured(), Spool(spool_folder(shop.settings, shop.group)) as spool:
        shop.equal([table], "the snapshot")
        shop.script(
            f"set sql_mode = ''; alter table {table} add column late int default 7; insert into items values (1)"
        )
        until(lambda: spool.standing().epoch == 2, "rows that cannot be read are a loss", seconds=120)
        shop.equal(["items", table], "a new snapshot", seconds=60)
