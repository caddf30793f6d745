"""What goes wrong around a MariaDB that is captured: each fault is a typed error that says what to do, or changes
nothing of the result."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.mariadb import MariaDbServer
from millrace.flows.sources.capture import feeder as feeder_module
from millrace.flows.sources.mariadb.table import check_server
from tests.flows.sources.capture.shops import kill_engine
from tests.flows.sources.mariadb.test_table import Shop
from tests.flows.sources.sql.databases import administer
from tests.waiting import until


@contextmanager
def reader(shop: Shop, *rights: str) -> Iterator[Any]:
    """A user with these rights, as the one that captures."""
    user = f"reader_{shop.database}"
    administer(
        f"create user '{user}'@'127.0.0.1' identified by 'secret'",
        *(f"{each} to {user}@'127.0.0.1'" for each in rights),
    )
    try:
        yield shop.declared.model_copy(update={"user": user, "password": SecretStr("secret")})
    finally:
        administer(f"drop user '{user}'@'127.0.0.1'")


def test_a_user_gets_what_it_lacks_by_the_statements_that_are_said(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key")
    role = f"role_{shop.database}"
    administer(f"create role {role}", f"grant binlog monitor on *.* to {role}")
    try:
        with reader(shop) as declared:
            said = []
            for _ in range(2):
                with pytest.raises(InvalidSettings) as error:
                    check_server(declared)
                assert "secret" not in str(error.value)
                (statement,) = re.findall(r"run `(.*)`", str(error.value))
                said.append(statement.partition(" TO ")[0])
                administer(statement)
            assert said == [
                "GRANT REPLICATION SLAVE, BINLOG MONITOR, RELOAD ON *.*", f"GRANT SELECT ON `{shop.database}`.`items`",
            ]  # fmt: skip
            check_server(declared)
            with pytest.raises(InvalidSettings, match="refuses"):
                check_server(declared.model_copy(update={"password": SecretStr("wrong")}))
            # Rights by a role, and locks in place of RELOAD.
            account = f"{declared.user}@'127.0.0.1'"
            administer(
                f"revoke binlog monitor, reload on *.* from {account}",
                f"grant lock tables on {shop.database}.* to {account}",
                f"grant {role} to {account}", f"set default role {role} for {account}",
            )  # fmt: skip
            check_server(declared)
    finally:
        administer(f"drop role {role}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_password_that_changes_and_rights_that_go_are_said_until_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder_module, "_LONGEST_PAUSE", 1.0)
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute("insert into items values (1, 'x', 1)")
    rights = ("grant reload, replication slave, binlog monitor on *.*", f"grant select on {shop.database}.*")
    with reader(shop, *rights) as declared:
        shop.declared, account = declared, f"{declared.user}@'127.0.0.1'"
        with shop.captured() as feeder:
            shop.reaches()
            administer(f"alter user {account} identified by 'another'")
            kill_engine(feeder)
            shop.execute("insert into items values (2, 'y', 2)")
            until(lambda: "Access denied" in shop.standing().error, "the refusal is noted", seconds=60)
            administer(f"alter user {account} identified by 'secret'")
            shop.reaches()
            administer(f"revoke replication slave on *.* from {account}")
            kill_engine(feeder)
            shop.execute("insert into items values (3, 'z', 3)")
            until(lambda: "REPLICATION SLAVE" in shop.standing().error, "the right is named", seconds=60)
            administer(f"grant replication slave on *.* to {account}")
            shop.reaches()
            assert shop.standing().epoch == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_is_killed_is_followed_again(tmp_path: Path) -> None:
    with MariaDbServer(tmp_path / "server").start() as server:
        shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", server=server)
        with shop.captured():
            until(lambda: shop.standing().complete, "the snapshot ends", seconds=60)
            for turn in range(3):
                shop.execute(f"insert into items select seq, 'x', {turn} from seq_{turn}000_to_{turn}900")
                with shop.connect() as open_one:
                    cursor = open_one.cursor()
                    cursor.execute(f"use {shop.database}")
                    cursor.execute("begin")
                    cursor.execute("insert into items values (-1, 'never', 1)")
                    server.kill()
                    server.start()
                shop.execute(f"delete from items where id % 7 = {turn}")
            shop.reaches()
            assert shop.standing().epoch == 1
        found = shop.records()
        assert len({(each.key, each.value, each.headers[-1]) for each in found}) == len(found), "each change once"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_200_000_rows_of_one_transaction_come_whole(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(100), amount bigint")
    with shop.captured() as feeder:
        until(lambda: shop.standing().complete, "the snapshot ends", seconds=60)
        shop.execute(
            "begin", "insert into items select seq, repeat('n', 90), 0 from seq_1_to_200000",
            "update items set amount = 1 where id <= 50000", "commit",
        )  # fmt: skip
        feeder.wait_complete(200)
        found = shop.records()
        assert len(found) == 250_000
        assert len({dict(each.headers)["millrace.transaction"] for each in found}) == 1
        assert shop.replayed() == shop.rows()


@pytest.mark.slow
def test_a_clock_that_jumps_changes_no_order(tmp_path: Path) -> None:
    """A session may set the time of its events, as a server does whose clock is set."""
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    with shop.captured() as feeder:
        until(lambda: shop.standing().complete, "the snapshot ends", seconds=60)
        for turn, moment in enumerate((1_000_000_000, 2**31 - 10, 1, 1_700_000_000)):
            shop.execute(
                f"set timestamp = {moment}", f"insert into items values ({turn}, 'x', {turn})",
                f"update items set amount = {moment} where id <= {turn}",
            )  # fmt: skip
            shop.reaches()
            assert shop.standing().lag_seconds >= 0
            if turn == 1:
                kill_engine(feeder)
        shop.execute("delete from items where id = 0")
        shop.reaches()
    assert [each.offset for each in shop.records()] == list(range(4 + sum(range(1, 5)) + 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transactions_of_all_replication_domains_come_once_through_kills(tmp_path: Path) -> None:
    """A position by GTID has a number of each domain; a reader that knows one of them loses or repeats the others."""
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    with shop.captured() as feeder:
        until(lambda: shop.standing().complete, "the snapshot ends", seconds=60)
        for turn in range(30):
            shop.execute(
                f"set gtid_domain_id = {(0, 5, 77)[turn % 3]}", f"set server_id = {1 + turn % 2}",
                f"insert into items select {100 * turn} + seq, 'x', {turn} from seq_1_to_5",
                f"update items set amount = -1 where id = {100 * turn + 1}",
            )  # fmt: skip
            if turn % 8 == 4:
                kill_engine(feeder)
        shop.reaches()
        assert shop.standing().epoch == 1
    found = [dict(each.headers)["millrace.transaction"].decode() for each in shop.records()]
    assert len(found) == 30 * 6
    domains = [each.split("-")[0] for each in dict.fromkeys(found)]
    assert [domains.count(each) for each in ("0", "5", "77")] == [20, 20, 20]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flows_of_one_name_on_two_machines_do_not_throw_each_other_out(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "one", "id int primary key, name varchar(20), amount bigint")
    other = copy(shop)
    other.settings = Settings(data_dir=tmp_path / "two")
    with shop.captured() as first, other.captured() as second:
        until(lambda: shop.standing().complete and other.standing().complete, "the snapshots end", seconds=60)
        pids = first.engine_pid, second.engine_pid
        for turn in range(20):
            shop.execute(f"insert into items values ({turn}, 'x', 0)")
            time.sleep(0.2)  # the server throws a reader out only when another comes, and the one that left comes again
        shop.reaches()
        other.reaches()
        assert (first.engine_pid, second.engine_pid) == pids
        assert not shop.standing().error + other.standing().error


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_snapshot_under_writes_that_is_killed_has_no_gap_and_nothing_twice(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(200), amount bigint")
    shop.execute("insert into items select seq, repeat('n', 180), 0 from seq_1_to_60000")
    stop = threading.Event()

    def write() -> None:
        with shop.connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"use {shop.database}")
            turn = 0
            while not stop.wait(0.001):
                turn += 1
                cursor.execute("begin")
                cursor.execute(f"insert into items values ({1_000_000 + turn}, 'w', 0)")
                cursor.execute(f"update items set amount = amount + 1 where id = {turn % 100}")
                cursor.execute(f"update items set id = id + 2000000 where id = {100 + turn}")
                if turn % 3 == 0:
                    cursor.execute(f"delete from items where id = {1_000_000 + turn - 2}")
                cursor.execute("commit")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with shop.captured() as feeder:
            until(lambda: shop.standing().next > 2048, "a part of the snapshot is in the spool", seconds=60)
            assert not shop.standing().complete
            kill_engine(feeder)
            until(lambda: shop.standing().complete, "the snapshot ends", seconds=60)
            kill_engine(feeder)
            stop.set()
            writer.join()
            feeder.wait_complete(60)
            assert shop.replayed() == shop.rows()
    finally:
        stop.set()
        writer.join()
    inserts = [each.key for each in shop.records() if dict(each.headers)["millrace.op"] == b"c"]
    assert len(set(inserts)) == len(inserts), "an insert comes once"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_purged_log_stops_the_capture_and_keeps_its_rows_until_a_new_snapshot_is_declared(tmp_path: Path) -> None:
    with MariaDbServer(tmp_path / "server").start() as server:
        shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", server=server)
        shop.execute("insert into items select seq, 'x', 0 from seq_1_to_100")
        with shop.captured():
            shop.reaches()
        shop.execute("delete from items where id <= 50", "flush binary logs", "insert into items values (0, 'y', 1)")
        shop.execute("flush binary logs", "flush binary logs")
        newest = shop.execute("show master status")[0][0]

        def purged() -> bool:  # a file is kept while a reader that was closed is not gone from it
            shop.execute(f"purge binary logs to '{newest}'")
            return len(shop.execute("show binary logs")) == 1

        until(purged, "older files are gone", seconds=30)
        with shop.captured():
            until(lambda: shop.standing().error, "it says what is gone", seconds=60)
            assert "have been purged" in shop.standing().error
            assert len(shop.replayed()) == 100, "rows are those of its position"
        shop.declared = shop.declared.model_copy(update={"on_loss": "snapshot"})
        with shop.captured():
            shop.reaches()
            assert shop.standing().epoch > 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_log_without_the_names_of_columns_is_enough(tmp_path: Path) -> None:
    """As MariaDB is by default (binlog_row_metadata NO_LOG): names, signs and labels come of the tables' history."""
    with MariaDbServer(tmp_path / "server", properties={"binlog_row_metadata": "NO_LOG"}).start() as server:
        shop = Shop(tmp_path, "id int unsigned primary key, name enum('a','b'), amount bigint unsigned", server=server)
        with shop.captured() as feeder:
            until(lambda: shop.standing().complete, "the snapshot ends", seconds=60)
            shop.execute("insert into items values (4294967295, 'a', 18446744073709551615)")
            shop.reaches()
            shop.execute("alter table items add more set('x','y') first, rename column amount to number")
            shop.execute("insert into items (id, name, number, more) values (1, 'b', 2, 'x,y')")
            shop.reaches()
            kill_engine(feeder)
            shop.execute("update items set more = 'y'", "alter table items drop name", "update items set number = 3")
            shop.reaches()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_statement_that_ends_the_log_is_no_lag(tmp_path: Path) -> None:
    with MariaDbServer(tmp_path / "server").start() as server:
        shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", server=server)
        shop.execute("insert into items values (1, 'x', 1)")
        with shop.captured() as feeder:
            shop.reaches()
            for statement in ("alter table items modify name varchar(30)", "create table other (id int)"):
                shop.execute(statement)
                feeder.wait_complete(30)
            until(lambda: shop.standing().lag_bytes == 0, "the lag is measured", seconds=30)
            kill_engine(feeder)
            shop.execute("insert into items values (2, 'y', 2)")
            shop.reaches()
