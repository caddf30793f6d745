"""A position that the database cannot continue from, and rows that its log does not hold: errors, or a new snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.base.errors import CaptureBusy
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.postgres import server
from tests.flows.sources.capture.shops import kill_engine
from tests.flows.sources.postgres.shop import Shop
from tests.flows.sources.postgres.test_table import FULL
from tests.waiting import until


@contextmanager
def writing(shop: Shop, table: str = "items") -> Iterator[None]:
    """Transactions that never rest."""
    stop = threading.Event()

    def work() -> None:
        with shop.connect() as db:
            turn = 0
            while not stop.wait(0.001):
                turn += 1
                with db.transaction():
                    db.execute(f"insert into {table} (id, amount) values (%s, 0)", (1_000_000 + turn,))
                    db.execute(f"update {table} set amount = amount + 1 where id = %s", (turn % 100,))
                    if turn % 3 == 0:
                        db.execute(f"delete from {table} where id = %s", (1_000_000 + turn - 2,))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_snapshot_under_writes_that_is_killed_begins_anew_and_meets_the_log_exactly(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(200), amount bigint")
    shop.execute(FULL, "insert into items select g, repeat('n', 180), 0 from generate_series(1, 60000) g")
    with writing(shop), shop.captured() as feeder:
        with Spool(shop.folder) as spool:
            until(lambda: spool.standing().next > 2048, "a part of the snapshot is in the spool", seconds=60)
            assert not spool.standing().complete
            assert spool.standing().high == 0
            kill_engine(feeder)
        shop.execute("delete from items where id % 2 = 0 and id < 60000")
        until(lambda: shop.standing().complete, "the snapshot ends", seconds=60)
        assert shop.standing().epoch == 2
        kill_engine(feeder)
    with shop.captured():
        shop.reaches()
    found = shop.records()
    changed = [each for each in found if dict(each.headers)["millrace.op"] == b"c"]
    assert len({each.key for each in changed}) == len(changed), "an insert comes once"
    assert [each.offset for each in found] == sorted({each.offset for each in found})
    shop.released()


@pytest.mark.slow
def test_a_slot_that_is_dropped_and_made_anew_is_a_loss_and_a_new_snapshot_replaces_the_rows(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute(FULL, "insert into items select g, 'x', g from generate_series(1, 100) g")
    with shop.captured():
        shop.reaches()
    shop.execute(
        f"select pg_drop_replication_slot('{shop.slot}')",
        "delete from items where id < 50",
        f"select pg_create_logical_replication_slot('{shop.slot}', 'pgoutput')",
    )
    with shop.captured():
        until(
            lambda: "was created again, or moved" in shop.standing().error, "the capture says what it lost", seconds=30
        )
        assert len(shop.replayed()) == 100
    shop.declared = shop.declared.model_copy(update={"on_loss": "snapshot"})
    with shop.captured():
        shop.reaches()
        assert shop.standing().epoch > 1
        shop.execute("insert into items values (1, 'after', 1)")
        shop.reaches()
    shop.released()


@pytest.mark.slow
def test_a_long_value_that_an_update_leaves_alone_is_kept_or_the_capture_stops(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name text, amount bigint", on_loss="snapshot")
    long = "(select string_agg(md5(g::text), '') from generate_series(1, 400) g)"
    shop.execute(FULL, f"insert into items values (1, {long}, 1)")
    with shop.captured():
        shop.reaches()
        shop.execute(f"insert into items values (2, {long}, 1)", "update items set amount = 2")
        shop.reaches()
        shop.execute("alter table items replica identity default", "update items set amount = 3 where id = 1")
        until(
            lambda: shop.standing().epoch > 1 and shop.standing().complete,
            "the log lacks the value, so the table is read anew",
            seconds=60,
        )
        shop.reaches()
    shop.released()


@pytest.mark.slow
def test_partitions_come_as_their_table_and_moves_between_them_keep_one_row(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int, name varchar(20), amount bigint, primary key (id)) partition by range (id")
    shop.execute(
        *(f"create table items_{n} partition of items for values from ({n}000) to ({n + 1}000)" for n in range(3)),
        *(f"alter table {name} replica identity full" for name in ("items", "items_0", "items_1", "items_2")),
        "insert into items select g, 'x', g from generate_series(500, 2500, 100) g",
    )
    with shop.captured():
        shop.reaches()
        shop.execute(
            "update items set id = id + 350 where id between 700 and 800",
            "insert into items values (42, 'new', 1)",
            "delete from items where id = 2500",
        )
        shop.execute("create table items_3 partition of items for values from (3000) to (4000)")
        shop.execute("alter table items_3 replica identity full", "insert into items values (3001, 'late', 1)")
        shop.reaches()
        shop.execute("truncate items")
        shop.reaches()
    shop.released()


@pytest.mark.slow
def test_only_changes_from_now_on(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", start="latest")
    shop.execute(FULL, "insert into items values (1, 'before', 1)")
    with shop.captured() as feeder:
        until(lambda: shop.slots() and shop.standing().complete, "the capture follows", seconds=60)
        shop.execute("insert into items values (2, 'after', 1)")
        until(lambda: shop.replayed().keys() == {"2"}, "the change comes", seconds=60)
        kill_engine(feeder)
        shop.execute("update items set amount = 2")
        until(lambda: shop.replayed().keys() == {"1", "2"}, "the next ones too", seconds=60)
    shop.released()


@pytest.mark.slow
def test_an_idle_slot_holds_no_wal_while_another_database_writes(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", heartbeat_seconds=1)
    shop.execute(FULL)
    with shop.captured():
        until(lambda: shop.standing().complete, "the capture follows", seconds=60)
        with shop.connect("postgres") as other:
            other.execute("create table if not exists noise (x text)")
            other.execute("insert into noise select repeat('x', 1000) from generate_series(1, 20000)")
            ((end,),) = other.execute("select pg_current_wal_insert_lsn()").fetchall()
            held = f"select confirmed_flush_lsn >= '{end}' from pg_replication_slots where slot_name = '{shop.slot}'"
            until(lambda: shop.execute(held) == [(True,)], "the slot moves", seconds=20)
            until(lambda: shop.standing().lag_bytes is not None, "the lag is measured", seconds=20)
            other.execute("drop table noise")
        assert shop.standing().next == 0, "and nothing is a change"
    shop.released()


@pytest.mark.slow
def test_a_slot_that_another_process_reads_is_waited_for_and_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_RELEASE_SECONDS", 1.0)
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", on_loss="snapshot")
    shop.execute(FULL, "insert into items values (1, 'x', 1)")
    with shop.captured():
        shop.reaches()
    other = shop.connect(application_name="someone_else", replication="database")  # `with` would send a ROLLBACK
    pid = other.info.backend_pid
    place = f"START_REPLICATION SLOT {shop.slot} LOGICAL 0/0 (proto_version '1', publication_names 'none')"
    other.pgconn.send_query(place.encode())
    reads = f"select active_pid from pg_replication_slots where slot_name = '{shop.slot}'"
    until(lambda: shop.execute(reads) == [(pid,)], "it reads", seconds=20)
    with shop.captured():
        until(lambda: f"process {pid} (someone_else on " in shop.standing().error, "the capture says who", seconds=30)
        assert f"run `SELECT pg_terminate_backend({pid})`" in shop.standing().error
        with pytest.raises(CaptureBusy, match=f"process {pid}"):
            shop.released()
        shop.execute(f"select pg_terminate_backend({pid})", "insert into items values (2, 'y', 1)")
        shop.reaches()
        assert shop.standing().epoch == 1, "nothing was read anew"
    other.pgconn.finish()
    shop.released()
