"""Tables of PostgreSQL as a flow into collections, and what is left of it when it is deleted: nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import millrace.testing
from millrace.base.errors import LogUnavailable
from millrace.brokers.postgres import PostgresServer
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.definition import PipelineRun
from millrace.flows.range_host.host import run
from millrace.pipelines.declaration import as_pipeline, pipeline_of
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.runner import run as run_saga
from millrace.pipelines.deploy.saga import Saga
from millrace.pipelines.deploy.world import RealWorld
from millrace.pipelines.store.records import Phase
from millrace.pipelines.store.store import open_pipelines
from tests.flows.sources.postgres.shop import Shop
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
        definition = PipelineRun(shop.settings, pipeline)
        stop, raised = threading.Event(), []

        def work() -> None:
            try:
                run(definition, stop=stop)
            except BaseException as error:
                raised.append(error)

        def equal() -> bool:
            if raised:
                raise raised[0]
            found = db["my_items"].read(order_by="id").select(list(fields)).to_pylist()
            return sorted(shop.execute("select * from items")) == sorted(tuple(row.values()) for row in found)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            until(equal, "the collection has the snapshot", seconds=90)
            for turn in range(3):
                with shop.connect() as one, one.transaction():
                    one.execute(f"update items set amount = {turn} where id % 3 = {turn}")
                    one.execute(f"delete from items where id % 50 = {turn}")
                    one.execute(f"update items set id = id + 10000 where id % 97 = {turn}")
                    one.execute(f"insert into items select 'x', {5000 + 100 * turn} + g from generate_series(1, 50) g")
                _kill_engine()
            until(equal, "the collection follows after kills of the engine", seconds=90)
            shop.execute("truncate items", "insert into items values ('eu', 1, 2, null, null, null, 'infinity')")
            until(equal, "the collection was emptied", seconds=60)
        finally:
            stop.set()
            worker.join(60)
        assert not worker.is_alive()
        shop.execute("insert into items values ('eu', 2, 2)", "delete from items where id = 1")
        shop.execute(f"select pg_drop_replication_slot('{shop.slot}')")
        stop.clear()
        worker = threading.Thread(target=work)
        worker.start()
        try:
            until(equal, "a new snapshot replaces the rows", seconds=90)
        finally:
            stop.set()
            worker.join(60)
        assert not worker.is_alive()
        assert not raised
    shop.released()
    assert shop.slots() == []


def _kill_engine() -> None:
    """Kill the engine of this process, found by its command line."""

    def engine() -> psutil.Process | None:
        for child in psutil.Process().children():
            if "millrace.CaptureEngine" in child.cmdline():
                return child
        return None

    until(engine, "an engine runs", seconds=60)
    found = engine()
    if found is not None:
        found.kill()
