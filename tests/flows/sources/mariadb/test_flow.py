"""A table of MariaDB as a flow into a collection: the collection is the table, whatever is killed."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pymysql
import pytest

import millrace.testing
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.pipelines.declaration import pipeline_of
from tests.flows.sources.capture.shops import engines, kill_engines, texts, working
from tests.flows.sources.mariadb.test_table import Shop
from tests.waiting import until


def _declared(shop: Shop, name: str) -> Flow:
    source = {**shop.declared.model_dump(mode="json"), "password": shop.password}
    return pipeline_of(
        {
            "id": name,
            "source": source,
            "sink": {"kind": "collection", "collection": "orders"},
            "errors": {"collection": "orders_errors"},
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_collection_follows_a_table_through_kills_truncation_and_a_new_snapshot(tmp_path: Path) -> None:
    shop = Shop(
        tmp_path,
        "region varchar(10), id int, amount decimal(20,4), raw varbinary(8), day date, primary key (region, id)",
        on_loss="snapshot",
    )
    shop.execute(
        "insert into items select if(seq % 2, 'eu', 'us'), seq, seq / 8, x'00ff', '2024-02-29' from seq_1_to_3000"
    )
    with millrace.testing.deployment(shop.settings.data_dir) as db:
        fields = {
            "region": "string", "id": "int64", "amount": "decimal(20,4)?", "raw": "binary?", "day": "date?",
        }  # fmt: skip
        db.create_collection("orders", fields, key=["region", "id"], vchannels=2)
        definition = FlowRun(shop.settings, _declared(shop, "orders"))

        def equal() -> bool:
            return _rows(shop) == sorted(
                tuple(row.values()) for row in db["orders"].read(order_by="id").select(list(fields)).to_pylist()
            )

        with working(definition) as check:
            until(lambda: check() and equal(), "the collection has the snapshot", seconds=90)
            for turn in range(3):
                shop.execute(
                    "begin",
                    f"update items set amount = {turn} where id % 3 = {turn}",
                    f"delete from items where id % 50 = {turn}",
                    f"insert into items select 'x', {5000 + 100 * turn} + seq, 1, null, null from seq_1_to_50",
                    "commit",
                )
                kill_engines()
            until(lambda: check() and equal(), "the collection follows after kills of the engine", seconds=90)
            shop.execute("truncate table items", "insert into items values ('eu', 1, 2, null, null)")
            until(lambda: check() and equal(), "the collection was emptied", seconds=60)
        shop.execute("insert into items values ('eu', 2, 2, null, null)", "delete from items where id = 1")
        shop.execute("flush binary logs", "reset master")  # what the position points to is gone
        with working(definition) as check:
            until(lambda: check() and equal(), "a new snapshot replaces the rows", seconds=90)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tables_of_one_flow_are_read_together_at_the_ticks_of_the_source_s_transactions(tmp_path: Path) -> None:
    """Transactions move between two tables; at each recorded tick both hold what the database held after one."""
    dice = random.Random(3)
    shop = Shop(tmp_path, "id int primary key, total int")
    shop.execute(
        "create table parts (id int, number int, amount int, primary key (id, number))",
        "insert into items select seq, 0 from seq_1_to_50",
    )
    source = {**shop.declared.model_dump(mode="json", exclude={"table"}), "tables": ["items", "parts"]}
    declared = pipeline_of(
        {
            "id": "together",
            "source": {**source, "password": shop.password},
            "sink": {"kind": "collection", "collection": "my_{table}"},
            "errors": {"collection": "orders_errors"},
        }
    )
    states: dict[str, tuple[list[Any], list[Any]]] = {}

    def state() -> tuple[list[Any], list[Any]]:
        return _rows(shop), sorted(shop.execute("select * from parts"))

    def change(number: int) -> None:
        with shop.connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"use {shop.database}")
            cursor.execute("begin")
            for _ in range(dice.randrange(1, 5)):
                key = dice.randrange(1, 60)
                if dice.random() < 0.3:
                    cursor.execute("delete from parts where id = %s", (key,))
                    cursor.execute("delete from items where id = %s", (key,))
                else:
                    cursor.execute("insert into items values (%s, 1) on duplicate key update total = total + 1", (key,))
                    cursor.execute("insert into parts values (%s, %s, 1)", (key, 10 * number + dice.randrange(10)))
            cursor.execute("commit")
            cursor.execute("select @@last_gtid")
            states[cursor.fetchone()[0]] = state()

    with millrace.testing.deployment(shop.settings.data_dir) as db:
        db.create_collection("my_items", {"id": "int64", "total": "int64?"}, key="id", vchannels=2)
        db.create_collection(
            "my_parts", {"id": "int64", "number": "int64", "amount": "int64?"}, key=["id", "number"], vchannels=2
        )

        def held(**at: Any) -> tuple[list[Any], list[Any]]:
            first, second = (
                sorted(tuple(row.values()) for row in db[name].read(**at).to_pylist())
                for name in ("my_items", "my_parts")
            )
            return first, second

        definition = FlowRun(shop.settings, declared)
        with working(definition) as check:
            until(lambda: check() and held() == state(), "the collections have the snapshot", seconds=90)
            for number in range(60):
                with suppress(pymysql.err.IntegrityError):
                    change(number)
                if number in (20, 40):
                    kill_engines()
            until(lambda: check() and held() == state(), "the collections follow", seconds=90)
            last = list(states)[-1]
            folder = spool_folder(shop.settings, declared.consumer_group)
            with Spool(folder) as spool:
                until(lambda: spool.ticks()[-1].mark.source == last, "the last one is recorded", seconds=30)
                recorded = spool.ticks()
        assert len(recorded) > 3
        assert not engines(), "one engine served both tables, and ended"
        for each in recorded:
            if each.mark.source:  # a transaction, not the snapshot
                assert held(at=each.tick) == states[each.mark.source], each


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_collections_are_made_and_follow_their_tables(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(10), price decimal(8,2), big decimal(50,2)")
    shop.execute(
        "create table more (region varchar(4), id int, primary key (region, id))",
        "insert into items select seq, 'x', seq / 4, 1.50 from seq_1_to_20",
        "insert into more select 'eu', seq from seq_1_to_20",
    )
    source = {**shop.declared.model_dump(mode="json", exclude={"table"}), "tables": ["items", "more"]}
    declared = pipeline_of(
        {
            "id": "follows",
            "source": {**source, "password": shop.password},
            "sink": {"kind": "collection", "collection": "{table}", "create": True, "on_schema_change": "alter"},
            "errors": {"collection": "errors"},
        }
    )
    with millrace.testing.deployment(shop.settings.data_dir) as db, working(FlowRun(shop.settings, declared)) as ok:

        def equal() -> bool:
            ok()
            return all(
                name in db and texts(db[name].read().to_pylist()) == texts(_selected(shop, name))
                for name in ("items", "more")
            )

        until(equal, "the collections are made", seconds=90)
        assert db["items"].schema.key_names == ("id",)
        assert db["more"].schema.key_names == ("region", "id")
        for statement in (
            "alter table items add column note varchar(10)",
            "alter table items add column five int not null default 5",
            "alter table items modify price decimal(12,4)",
            "alter table items rename column note to words",
            "alter table items drop column name",
            "alter table more add column late datetime default '2024-02-29 12:00:00'",
            "truncate table more",
        ):
            shop.execute(statement, "insert into items (id) select max(id) + 1 from items")
            shop.execute("insert into more (region, id) select 'us', coalesce(max(id), 0) + 1 from more")
            until(equal, statement, seconds=60)


def _selected(shop: Shop, name: str) -> list[dict[str, Any]]:
    with shop.connect() as connection, connection.cursor(pymysql.cursors.DictCursor) as cursor:
        cursor.execute(f"select * from {shop.database}.{name}")
        return list(cursor.fetchall())


def _rows(shop: Shop) -> list[tuple[Any, ...]]:
    return sorted(shop.execute("select * from items"))
