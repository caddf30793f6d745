"""A table of MariaDB as a flow into a collection: the collection is the table, whatever is killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import millrace.testing
from millrace.flows.declare.pipeline import Pipeline
from millrace.flows.range_host.definition import PipelineRun
from millrace.flows.range_host.host import run
from tests.flows.sources.mariadb.test_table import Shop
from tests.waiting import until


def _declared(shop: Shop, name: str) -> Pipeline:
    source = {**shop.declared.model_dump(mode="json"), "password": shop.password}
    return Pipeline.parse(
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
        definition = PipelineRun(shop.settings, _declared(shop, "orders"))
        stop, raised = threading.Event(), []

        def work() -> None:
            try:
                run(definition, stop=stop)
            except BaseException as error:
                raised.append(error)

        def equal() -> bool:
            if raised:
                raise raised[0]
            return _rows(shop) == sorted(
                tuple(row.values()) for row in db["orders"].read(order_by="id").select(list(fields)).to_pylist()
            )

        worker = threading.Thread(target=work)
        worker.start()
        try:
            until(equal, "the collection has the snapshot", seconds=90)
            for turn in range(3):
                shop.execute(
                    "begin",
                    f"update items set amount = {turn} where id % 3 = {turn}",
                    f"delete from items where id % 50 = {turn}",
                    f"insert into items select 'x', {5000 + 100 * turn} + seq, 1, null, null from seq_1_to_50",
                    "commit",
                )
                _kill(definition, shop)
            until(equal, "the collection follows after kills of the engine", seconds=90)
            shop.execute("truncate table items", "insert into items values ('eu', 1, 2, null, null)")
            until(equal, "the collection was emptied", seconds=60)
        finally:
            stop.set()
            worker.join(60)
        assert not worker.is_alive()
        shop.execute("insert into items values ('eu', 2, 2, null, null)", "delete from items where id = 1")
        shop.execute("flush binary logs", "reset master")  # what the position points to is gone
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


def _rows(shop: Shop) -> list[tuple[Any, ...]]:
    return sorted(shop.execute("select * from items"))


def _kill(definition: PipelineRun, shop: Shop) -> None:
    """Kill the flow's engine, found by its command line."""
    import psutil

    def engine() -> int | None:
        for child in psutil.Process().children():
            if "millrace.CaptureEngine" in child.cmdline():
                return int(child.pid)
        return None

    until(engine, "an engine runs", seconds=60)
    pid = engine()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
