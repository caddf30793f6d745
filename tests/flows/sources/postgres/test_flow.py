"""Tables of PostgreSQL as a flow into collections, and what is left of it when it is deleted: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from psycopg.rows import dict_row

import millrace.testing
from millrace.base.errors import LogUnavailable
from millrace.brokers.postgres import PostgresServer
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.definition import FlowRun
from millrace.pipelines.declaration import as_pipeline, pipeline_of
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.runner import run as run_saga
from millrace.pipelines.deploy.saga import Saga
from millrace.pipelines.deploy.world import RealWorld
from millrace.pipelines.store.records import Phase
from millrace.pipelines.store.store import open_pipelines
from tests.flows.sources.capture.shops import kill_engines, texts, working
from tests.flows.sources.postgres.shop import Shop
from tests.flows.sources.postgres.test_loss import writing
from tests.flows.sources.postgres.test_table import FULL
from tests.waiting import until


def _declared(shop: Shop, name: str, **sink: Any) -> Flow:
    source = {
        **shop.declared.model_dump(mode="json", exclude_none=True),
        "password": shop.declared.password.get_secret_value(),
    }
    return pipeline_of(
        {
            "id": name,
            "source": source,
            "sink": sink or {"kind": "delta", "table": name},
            "errors": {"collection": f"{name}_errors"},
        }
    )


def test_a_deleted_flow_leaves_no_slot_and_an_unreachable_server_keeps_the_flow(tmp_path: Path) -> None:
    with PostgresServer(tmp_path / "postgres").start() as server:
        shop = Shop(tmp_path, "id int primary key", server=server)
        shop.settings.data_dir.mkdir(mode=0o700)
        pipeline = _declared(shop, "orders")
        shop.group = pipeline.consumer_group
        shop.execute("create publication of_somebody for table items")
        world = RealWorld(Deployment(shop.settings), lambda record: pipeline)
        with open_pipelines(shop.settings, env={}) as store:
            made = store.create(as_pipeline(pipeline), secrets={}, who="ada", saga=Saga(who="ada").to_json())
            ready = run_saga(store, made, world)
            assert ready is not None
            slot = shop.slot
            shop.server_of().check_server()
            shop.execute(f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')")
            going = Saga.from_json(ready.saga).deleting("ada").to_json()
            ready = store.move(ready, phase=Phase.DELETING, saga=going)
            server.stop()
            with pytest.raises(LogUnavailable, match="cannot be reached"):
                run_saga(store, ready, world)
            server.start()
            assert shop.slots() == [slot]
            assert run_saga(store, store.get("orders"), world) is None
        assert shop.slots() == []
        assert shop.execute("select pubname from pg_publication") == [("of_somebody",)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_collections_follow_their_tables_through_kills_and_a_new_snapshot(tmp_path: Path) -> None:
    shop = Shop(
        tmp_path,
        "region varchar(10), id int, amount numeric(20,4), raw bytea, day date, at timestamptz, ratio float8,"
        " primary key (region, id)",
        on_loss="snapshot",
    )
    shop.execute(
        "alter table items replica identity full",
        "insert into items select case g % 2 when 0 then 'eu' else 'us' end, g, g / 8.0, '\\x00ff', '2024-02-29',"
        " '2024-02-29 12:00:00.000001+02', g / 3.0 from generate_series(1, 3000) g",
    )
    fields = {
        "region": "string", "id": "int64", "amount": "decimal(20,4)?", "raw": "binary?", "day": "date?",
        "at": "timestamp?", "ratio": "float64?",
    }  # fmt: skip
    with millrace.testing.deployment(shop.settings.data_dir) as db:
        db.create_collection("my_items", fields, key=["region", "id"], vchannels=2)
        pipeline = _declared(shop, "orders", kind="collection", collection="my_{table}")
        shop.group = pipeline.consumer_group
        definition = FlowRun(shop.settings, pipeline)

        def equal() -> bool:
            found = db["my_items"].read(order_by="id").select(list(fields)).to_pylist()
            return sorted(shop.execute("select * from items")) == sorted(tuple(row.values()) for row in found)

        with working(definition) as check:
            until(lambda: check() and equal(), "the collection has the snapshot", seconds=90)
            for turn in range(3):
                with shop.connect() as one, one.transaction():
                    one.execute(f"update items set amount = {turn} where id % 3 = {turn}")
                    one.execute(f"delete from items where id % 50 = {turn}")
                    one.execute(f"update items set id = id + 10000 where id % 97 = {turn}")
                    one.execute(f"insert into items select 'x', {5000 + 100 * turn} + g from generate_series(1, 50) g")
                kill_engines()
            until(lambda: check() and equal(), "the collection follows after kills of the engine", seconds=90)
            shop.execute("truncate items", "insert into items values ('eu', 1, 2, null, null, null, 'infinity')")
            until(lambda: check() and equal(), "the collection was emptied", seconds=60)
        shop.execute("insert into items values ('eu', 2, 2)", "delete from items where id = 1")
        shop.execute(f"select pg_drop_replication_slot('{shop.slot}')")
        with working(definition) as check:
            until(lambda: check() and equal(), "a new snapshot replaces the rows", seconds=90)
    shop.released()
    assert shop.slots() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_collections_are_made_and_follow_their_tables_while_rows_flow(tmp_path: Path) -> None:
    shop = Shop(
        tmp_path,
        "id int primary key, name varchar(20), amount bigint, price numeric(8,2), any_number numeric,"
        " mood mood, tags text[], span interval, code uuid, raw bytea, at timestamptz, r int4range",
        before=("create type mood as enum ('sad', 'glad')",),
        heartbeat_seconds=1,
    )
    shop.execute(
        FULL,
        "create table more (region varchar(4), id int, primary key (region, id))",
        "insert into items select g, 'x', g, g / 4.0, 10 ^ 40 + g / 8.0, 'glad', '{a,NULL,\"b,c\"}',"
        " '1 year 2 days', gen_random_uuid(), '\\x00ff', '2024-02-29 12:00:00.000001+02', '[1,4]'"
        " from generate_series(1, 20) g",
        "insert into items (id, any_number, name) values (0, 'NaN', 'nan')",
        "insert into more select 'eu', g from generate_series(1, 20) g",
    )
    shop.declared = shop.declared.model_copy(update={"table": None, "tables": ("items", "more")})
    sink = {"kind": "collection", "collection": "{table}", "create": True, "on_schema_change": "alter"}
    flow = _declared(shop, "follows", **sink)
    shop.group = flow.consumer_group

    def selected(name: str) -> list[dict[str, Any]]:
        with shop.connect(row_factory=dict_row) as db:
            found = db.execute(f"select * from {name}").fetchall()
            db.execute("set intervalstyle = iso_8601")
            for row in found if name == "items" else ():
                of_row = "select case when span is not null then format('%%s', span) end as span, r::text from items"
                row |= db.execute(f"{of_row} where id = %s", (row["id"],)).fetchone() or {}
                row["tags"] = None if row["tags"] is None else json.dumps(row["tags"], separators=(",", ":"))
            return found

    with millrace.testing.deployment(shop.settings.data_dir) as db, working(FlowRun(shop.settings, flow)) as ok:

        def equal() -> bool:
            ok()
            return all(
                name in db and texts(db[name].read().to_pylist()) == texts(selected(name)) for name in ("items", "more")
            )

        until(equal, "the collections are made", seconds=90)
        assert db["items"].schema.key_names == ("id",)
        assert db["more"].schema.key_names == ("region", "id")
        for number, statement in enumerate(
            (
                "alter table items add column note varchar(10)",
                "alter table items add column five int not null default 5",
                "alter table items alter column price type numeric(12,4) using price * 3",
                "alter table items rename column note to words",
                "alter table items drop column name",
                "alter table more add column late timestamp default '2024-02-29 12:00:00'",
                "truncate more",
            )
        ):
            shop.execute("delete from items where id > 1000000")  # which are written again
            with writing(shop):
                shop.execute(statement)
                if number % 3 == 1:
                    kill_engines()
                shop.execute(f"insert into items (id) values ({500 + number})")
            until(equal, statement, seconds=60)
        assert db["follows_errors"].count() == 0
    shop.released()
