"""Settings, statements and kills on a real MariaDB by which a capture would lose or repeat rows."""

from __future__ import annotations

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
        cursor.execute("flush binary logs")  # a file without what other tests wrote
        cursor.execute("show master status")
        file, position = cursor.fetchone()[:2]
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
        connection_settings={**shop.login, "passwd": shop.password},
        server_id=77,
        log_file=file,
        log_pos=position,
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
