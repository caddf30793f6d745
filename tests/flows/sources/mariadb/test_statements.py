"""Changes of rows that a real MariaDB logs as statements: none is lost, since the capture stops at them."""

from __future__ import annotations

import logging
from pathlib import Path

import pymysql
import pytest

from millrace.base.errors import InvalidSettings
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.mariadb.table import check_server
from tests.flows.sources.mariadb.replay import Tables
from tests.waiting import until

STATEMENTS = (
    "replace into items (id, b) values (1, 5)",
    "REPLACE items SET id = 2, b = 6",
    "/* of an application */ replace into items (id, b) values (3, 7)",
    "replace into items (id, b) select id, b + 1 from items where id < 3",
    "insert into items (id, b) values (4, 8) on duplicate key update b = 9",
    "insert\ninto items (id, b) values (5, 8)",
    "insert ignore into items (id, b) select 6, 8",
    "update\titems set b = b + 1",
    "update items join others on items.id = others.id set items.b = 10",
    "delete items from items join others on items.id = others.id where items.b = 10",
    "set statement sort_buffer_size = 100000 for replace into items (id, b) values (7, 7)",
    "load data local infile '{file}' into table items (id, b)",
    "call fill(11)",
    "execute immediate 'replace into items (id, b) values (12, 1)'",
    "insert into others values (13)",  # by a trigger
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_change_that_is_logged_as_a_statement_stops_the_capture_and_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_loss: snapshot` the table is read anew, so that its rows are right after each of them."""
    shop = Tables(tmp_path, "items", on_loss="snapshot")
    file = tmp_path / "rows.tsv"
    file.write_text("21\t1\n22\t2\n")
    shop.execute(
        "alter table items add b int",
        "create table others (id int primary key)",
        "insert into others values (1), (2)",
        "create procedure fill(n int) replace into items (id, b) values (n, n)",
        "create trigger added after insert on others for each row replace into items (id, b) values (new.id, 1)",
        "insert into items (id, b) values (1, 1), (2, 2)",
    )

    def execute(*statements: str) -> None:
        with pymysql.connect(
            **shop.login, password=shop.password, autocommit=True, database=shop.database, local_infile=True
        ) as connection:
            for each in statements:
                connection.cursor().execute(each)

    with shop.captured(), Spool(spool_folder(shop.settings, shop.group)) as spool:
        shop.equal(["items"], "the snapshot")
        for number, statement in enumerate(STATEMENTS):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                execute("set session binlog_format = 'STATEMENT'", statement.format(file=file))
                until(lambda: spool.standing().epoch > number + 1, f"{statement} stops it", seconds=60)  # noqa: B023
            said = "a session logs statements in place of rows: have it SET SESSION binlog_format"
            until(lambda: said in caplog.text, "it says what to do", seconds=10)  # noqa: B023
            shop.equal(["items"], f"the table is read anew after {statement}", seconds=120)
        epoch = spool.standing().epoch
        shop.execute(
            "create table sums (id int primary key, b int)",
            "set session binlog_format = 'STATEMENT'",
            "replace into sums select 1, sum(b) from items",  # a check of replicas, which changes no captured row
            "delete from sums where id = 7",
            "set session binlog_format = 'MIXED'",
            "replace into sums values (3, 3)",
        )
        shop.execute("insert into items (id, b) values (100, 1)")
        shop.equal(["items"], "what is logged of other tables stops nothing")
        assert spool.standing().epoch == epoch


def test_a_compressed_binary_log_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shop = Tables(tmp_path, "items")
    check_server(shop.declared)
    shop.execute("set global log_bin_compress = 1")
    try:
        with pytest.raises(InvalidSettings, match=r"run `(SET GLOBAL log_bin_compress = 0)`") as error:
            check_server(shop.declared)
        shop.execute(str(error.value).split("`")[1])
        check_server(shop.declared)
    finally:
        shop.execute("set global log_bin_compress = 0")


@pytest.mark.slow
def test_a_log_that_is_compressed_later_stops_the_capture(tmp_path: Path) -> None:
    shop = Tables(tmp_path, "items")
    shop.execute("alter table items add b text", "insert into items values (1, 'x')")
    with shop.captured(), Spool(spool_folder(shop.settings, shop.group)) as spool:
        shop.equal(["items"], "the snapshot")
        shop.execute("set global log_bin_compress = 1")
        try:
            shop.execute("insert into items values (2, repeat('x', 5000))")
        finally:
            shop.execute("set global log_bin_compress = 0")
        until(lambda: "a compressed binary log" in spool.standing().error, "it says so", seconds=60)


def test_changes_that_a_foreign_key_makes_are_not_in_the_log(tmp_path: Path) -> None:
    """So a table that gets them is refused, unless the declaration says that it may."""
    shop = Tables(tmp_path, "items")
    check_server(shop.declared)
    shop.execute(
        "create table kept (id int primary key, item int, foreign key (item) references items (id))",
        "create table parts (id int primary key, item int,"
        " constraint of_item foreign key (item) references items (id) on delete cascade)",
        "insert into items values (1)", "insert into parts values (1, 1)",
    )  # fmt: skip
    file, place = shop.execute("show master status")[0][:2]
    shop.execute("delete from items")
    events = [row[2] for row in shop.execute(f"show binlog events in '{file}' from {place}")]
    assert events.count("Delete_rows_v1") == 1, "the log has the parent's delete alone"
    shop.capture("items", "kept")
    check_server(shop.declared)
    shop.capture("items", "parts")
    with pytest.raises(InvalidSettings, match=r"parts gets changes by the foreign key of_item \(ON DELETE CASCADE"):
        check_server(shop.declared)
    check_server(shop.declared.model_copy(update={"foreign_keys": "ignore"}))
