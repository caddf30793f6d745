"""Values, keys, settings and kills on a real MariaDB by which a capture would change, lose or repeat rows."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import InvalidSettings
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.mariadb.table import check_server
from tests.flows.sources.capture.shops import kill_engine
from tests.flows.sources.mariadb.replay import Tables
from tests.waiting import until

COLUMNS = (
    "id int primary key, d date, dn date not null, dt datetime, dtn datetime(6) not null, ts timestamp(6) null,"
    " tsn timestamp not null default 0, t time, t6 time(6), y year, yn year not null default 2001, b1 bit(1),"
    " b7 bit(7), b64 bit(64), ub bigint unsigned, um mediumint unsigned, ui int unsigned, us smallint unsigned,"
    " ut tinyint unsigned, wide decimal(65,30), fine decimal(38,38), du decimal(10,2) unsigned,"
    " e enum('a,b','it''s','','Ä','x\"y',',','b\\\\c','\\\\,','t\\tn\\n'), s set('a b','c''d','Ü'), j json,"
    " tx text character set latin1, u uuid, ch char(5), bn binary(4), vb varbinary(4),"
    " f float, fd double, z int zerofill, tb boolean, g1 int generated always as (id + 1) stored, g2 int as (id + 2),"
    " vc varchar(20) collate utf8mb4_bin, dd date not null default '2024-01-02', dz datetime not null default 0,"
    " dc timestamp not null default '2024-05-06 07:08:09', d6 datetime(6) default '2024-05-06 07:08:09.123456'"
)
ROWS: tuple[dict[str, str], ...] = (
    {
        "d": "0", "dn": "0", "dt": "0", "dtn": "0", "ts": "0", "tsn": "0", "t": "'-838:59:59'",
        "t6": "'25:00:00.000001'", "y": "'0000'", "yn": "'0000'", "b1": "b'1'", "b7": "b'1000001'", "b64": "~0",
        "ub": "18446744073709551615", "um": "16777215", "ui": "4294967295", "us": "65535", "ut": "255",
        "wide": "'-99999999999999999999999999999999999.999999999999999999999999999999'",
        "fine": "'0.12345678901234567890123456789012345678'", "du": "5.10", "e": "'a,b'", "s": "'a b,c''d'",
        "j": "'{\"a\": [1, 2]}'", "tx": "'Ä€'", "ch": "'ab '", "bn": "'ab'", "vb": "x'00ff0000'", "f": "1.1",
        "fd": "1e308", "z": "5", "tb": "true", "vc": "'Ä😀 '",
    },
    {
        "d": "'2024-00-00'", "dn": "'2024-02-00'", "dt": "'2024-00-10 01:02:03'", "dtn": "'2024-02-00 01:02:03.5'",
        "ts": "'2024-06-01 12:00:00.000001'", "tsn": "'2024-06-01 12:00:00'", "t": "'838:59:59'",
        "t6": "'-00:00:00.000001'", "y": "2155", "b1": "b'0'", "b7": "0", "b64": "0", "ub": "9223372036854775808",
        "wide": "0", "fine": "0", "du": "0", "e": "''", "s": "''", "j": "'null'", "tx": "''", "ch": "''",
        "bn": "''", "vb": "''", "z": "0", "tb": "2", "vc": "''",
    },
    {
        "d": "'9999-12-31'", "dn": "'0001-01-01'", "dt": "'9999-12-31 23:59:59'", "dtn": "'0001-01-01 00:00:00'",
        "ts": "'2038-01-19 03:14:07.999999'", "tsn": "'1970-01-01 00:00:01'", "t": "'00:00:00'", "y": "1901",
        "e": "'nope'", "s": "'Ü'", "fd": "-1e-308", "f": "3.4e38",
    },
    {
        "d": "'1500-02-28'", "dn": "'1970-01-01'", "dt": "'2024-03-10 02:30:00'",
        "dtn": "'1000-01-01 00:00:00.000001'", "ts": "'2024-03-31 02:30:00'", "tsn": "'2024-11-03 01:30:00'",
        "t": "'-00:00:01'", "y": "1970", "e": "','", "s": "7", "vc": "'a '",
    },
    {"dn": "'2020-02-29'", "dtn": "'1969-12-31 23:59:59.999999'", "e": "'it''s'", "u": f"'{uuid.UUID(int=0)}'"},
    {"dn": "'1582-10-15'", "dtn": "'1900-01-01'", "e": "'x\"y'", "u": f"'{uuid.UUID(int=1 << 64)}'"},
    {"dn": "'1582-10-04'", "dtn": "'1800-01-01'", "u": f"'{uuid.UUID(int=(1 << 128) - (1 << 16))}'"},
    {"dn": "'2020-01-01'", "dtn": "'2020-01-01'", "u": "'123e4567-e89b-12d3-a456-426655440000'", "e": "'b\\\\c'"},
    {"dn": "'2020-01-01'", "dtn": "'2020-01-01'", "u": f"'{uuid.uuid4()}'", "e": "'\\\\,'"},
    {"dn": "'2020-01-01'", "dtn": "'2020-01-01'", "u": f"'{uuid.uuid1()}'", "e": "'t\\tn\\n'"},
)  # fmt: skip


def _insert(table: str, first: int) -> str:
    rows = [{"id": str(first + number), **row} for number, row in enumerate(ROWS)]
    return ";".join(f"insert into {table} ({', '.join(row)}) values ({', '.join(row.values())})" for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_values_keys_and_large_rows_are_the_tables_from_the_snapshot_and_from_the_log(tmp_path: Path) -> None:
    """One engine for all of it. Its host has a zone with a summer time, and its heap is smaller than the large rows."""
    shop = Tables(tmp_path, "odd", "same", "small", "order items", "large")
    shop.script(
        f"set sql_mode = ''; create table odd ({COLUMNS}) character set utf8mb4; {_insert('odd', 100)};"
        "create table same (id varchar(10) character set utf8mb4 collate utf8mb4_unicode_ci, n int,"
        " primary key (id, n));"
        "create table small (id varchar(10) character set latin1 primary key, n int);"
        "create table `order items` (`the key` int primary key, `a,b` varchar(10), `it's` int);"
        "create table large (id int primary key, raw longblob, words longtext);"
        "insert into same values ('a', 1), ('B', 1), ('ß', 1);"
        "insert into small values ('ä', 1), ('Z', 2); insert into `order items` values (1, 'x', 2);"
        "insert into large select seq, repeat(char(seq), 4 << 20), repeat('ä😀', 300000) from seq_1_to_40"
    )
    tables = ["odd", "same", "small", "order items", "large"]
    shop.execute("set global time_zone = '-05:00'")
    try:
        with pytest.MonkeyPatch.context() as patch, shop.captured():
            patch.setenv("TZ", "America/New_York")
            shop.equal(tables, "the snapshot", seconds=120)
            shop.script(
                f"set sql_mode = '', time_zone = '+05:30'; {_insert('odd', 200)}; set time_zone = '-03:00';"
                "update odd set tsn = '2024-06-01 12:00:00', id = id + 1000 where id >= 205;"
                # One key to the collation, in other letters or with blanks at the end.
                "update same set id = 'A' where id = 'a'; replace into same values ('A ', 1), ('b', 1);"
                "insert into same values ('ss', 1) on duplicate key update id = 'SS';"
                "insert into same values ('B ', 2), ('c', 2); delete from same where id = 'b' and n = 2;"
                "update same set n = n + 10 where id = 'c'; update same set id = concat(id, ' ') where n = 12;"
                "update small set id = 'Ä' where id = 'ä'; replace into small values ('z', 3), ('ÿ', 4);"
                "update `order items` set `the key` = 2, `a,b` = 'y'; insert into `order items` values (1, null, null);"
                "update large set raw = concat(raw, 'x') where id < 20; delete from large where id > 35;"
                "insert into large select 100 + seq, repeat('y', 8 << 20), null from seq_1_to_10"
            )
            shop.equal(tables, "the log", seconds=120)
    finally:
        shop.execute("set global time_zone = 'SYSTEM'")
    keys = Counter(str(row["id"]).casefold().rstrip().replace("ß", "ss") for row in shop.found("same") if row["n"] == 1)
    assert set(keys.values()) == {1}, "what the database takes for one key is one row"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_the_log_has_in_part_stops_the_capture_instead_of_making_other_rows(tmp_path: Path) -> None:
    """A session may log what the server's settings do not allow: parts of rows, or statements in place of rows."""
    for words, statement in (
        ("binlog_row_image = 'MINIMAL'", "update items set b = 5 where id = 1"),
        ("binlog_row_image = 'NOBLOB'", "update items set b = 5 where id = 1"),
        ("binlog_format = 'STATEMENT'", "update items set b = 5 where id = 1"),
    ):
        shop = Tables(tmp_path / str(abs(hash(words + statement))), "items")
        shop.execute("alter table items add a int, add b int, add c text", "insert into items values (1, 1, 1, 'c')")
        with shop.captured(), Spool(spool_folder(shop.settings, shop.group)) as spool:
            shop.equal(["items"], "the snapshot")
            shop.execute(f"set session {words}", statement)
            _until_stopped(spool, f"{words}: {statement}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_statement_that_the_engine_does_not_know_stops_it_only_if_it_is_about_a_captured_table(
    tmp_path: Path,
) -> None:
    shop = Tables(tmp_path, "items", on_loss="snapshot")
    shop.execute("create table before_it (id int primary key, at inet6)", "insert into items values (1)")
    with shop.captured() as feeder, Spool(spool_folder(shop.settings, shop.group)) as spool:
        shop.equal(["items"], "the snapshot, beside a table of a type that the engine does not know")
        shop.execute("create table beside_it (id int primary key, at inet6)", "insert into items values (2)")
        shop.equal(["items"], "what follows such a table")
        kill_engine(feeder)
        shop.execute("insert into items values (3)", "insert into beside_it values (1, '::1')")
        shop.equal(["items"], "a start with such a table in the history")
        assert spool.standing().epoch == 1
        shop.execute("alter table items add column at inet6")
        until(lambda: "add column at inet6" in spool.standing().error, "it says which statement", seconds=60)
        shop.execute("alter table items modify column at varchar(40)", "insert into items values (4, '::1')")
        shop.equal(["items"], "a new snapshot goes past it", seconds=120)
    shop.execute("alter table items modify column at inet6")
    with pytest.raises(InvalidSettings, match=r"items\.at has the type inet6"):
        check_server(shop.declared)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_inside_of_a_large_transaction_repeats_and_loses_nothing(tmp_path: Path) -> None:
    """And no mark lies inside of it, so that nobody sees a part; the binary log has several files meanwhile."""
    shop = Tables(tmp_path, "items", "parts")
    shop.execute("create table parts (id int primary key, n int)", "insert into items values (0)")
    folder = spool_folder(shop.settings, shop.group)
    with shop.captured() as feeder, Spool(folder) as spool:
        shop.equal(["items"], "the snapshot")
        first = spool.standing().next
        shop.execute(
            "flush binary logs", "begin", "insert into items select seq from seq_1_to_30000",
            "insert into parts select seq, 1 from seq_1_to_30000", "update parts set n = 2 where id % 3 = 0", "commit",
            "flush binary logs",
        )  # fmt: skip
        for part in (3000, 35000):
            _until_read(spool, first + part)
            assert spool.standing().high == first, "none of it is seen"
            kill_engine(feeder)
        shop.execute("insert into parts values (0, 0)")
        shop.equal(["items", "parts"], "all of it", seconds=120)
        assert spool.standing().next == first + 70001, "each change once"
        assert [each for (each,) in spool.rows_of("select number from marks where number > ?", [first])] == [
            first + 70000, first + 70001,
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_lane_has_what_another_reader_finds_in_the_log(tmp_path: Path) -> None:
    """mysql-replication is no part of the engine. Each change of each transaction, in order, with its key and GTID."""
    from pymysqlreplication import BinLogStreamReader
    from pymysqlreplication.event import MariadbGtidEvent
    from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

    shop = Tables(tmp_path, "items")
    with shop.connect() as connection, connection.cursor() as cursor:
        cursor.execute("select @@gtid_binlog_pos")
        (position,) = cursor.fetchone()
    with shop.captured() as feeder:
        shop.equal(["items"], "an empty snapshot")
        for turn in range(20):
            shop.execute(
                "begin", f"insert into items select {1000 * turn} + seq from seq_1_to_{20 + turn}",
                f"update items set id = -id where id % 7 = {turn % 7}", f"delete from items where id % 5 = {turn % 5}",
                "commit",
            )  # fmt: skip
            if turn % 6 == 2:
                kill_engine(feeder)
        shop.equal(["items"], "all of it", seconds=120)
    wanted: list[tuple[str, int, str]] = []
    stream = BinLogStreamReader(
        connection_settings={**shop.login, "password": shop.password},
        server_id=77,
        auto_position=position,  # without it, MariaDB sends its whole log, from the first file on
        is_mariadb=True,
        only_schemas=[shop.database],
        only_events=[MariadbGtidEvent, WriteRowsEvent, UpdateRowsEvent, DeleteRowsEvent],
    )
    gtid = ""
    for event in stream:
        if isinstance(event, MariadbGtidEvent):
            gtid = event.gtid
            continue
        for row in event.rows:
            if isinstance(event, UpdateRowsEvent):  # of the key: the old row goes
                wanted += [("d", row["before_values"]["id"], gtid), ("c", row["after_values"]["id"], gtid)]
            else:
                wanted.append(("c" if isinstance(event, WriteRowsEvent) else "d", row["values"]["id"], gtid))
    stream.close()
    headers: list[dict[str, Any]] = [dict(each.headers) for each in shop.records()]
    found = [
        (head["millrace.op"].decode(), int(each.key or b""), head["millrace.transaction"].decode())
        for each, head in zip(shop.records(), headers, strict=True)
    ]
    assert found == wanted


def _until_read(spool: Spool, number: int) -> None:
    until(lambda: spool.standing().next > number, f"{number} changes are read", seconds=60)


def _until_stopped(spool: Spool, words: str) -> None:
    until(lambda: "stopped" in spool.standing().error, words, seconds=60)
