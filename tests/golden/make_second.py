"""Makes the second golden deployment.

``python -m tests.golden.make_second <empty folder>``; what version 4 of the chain brought.

Checks, defaults, computed fields and what an older producer's messages are filled with; changed schemas with widened,
renamed and dropped fields; upserts, inserts that replace, composite and generated keys; a value of each type that the
version brought. As the first, it is not to be made again: later builds open what this one wrote.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

import millrace
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.nested_changes import resolve_paths
from millrace.client.produce.rows import insert_message, split_rows
from millrace.client.schemas import alter_changes, schema
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.load import run as load_files
from millrace.runtime.progress import Progress
from tests.golden.deployment import HERE, of_catalog, of_log, of_wal, rows, serving, settings_of
from tests.golden.make_deployment import LEASE_MS, Maker, keys_of, put_away, stamps

ARCHIVE = HERE / "deployment-2.tar.xz"
FACTS = HERE / "deployment-2.json"
CUSTOMER = 11
"""Id of the producer that knows the first schema of `orders` alone."""

ORDERS = schema(
    {
        "id": "int64",
        "qty": "int32",
        "price": "decimal(10,2)",
        "total": "decimal(14,2)",
        "at": "timestamp",
        "note": "string?",
    },
    key="id",
    event_time="at",
    defaults={"qty": 1, "at": "now()"},
    computed={"total": "qty * price"},
    checks={"some": "qty > 0", "affordable": "total < 100000"},
)
TRADES = schema(
    {
        "symbol": "string",
        "day": "date",
        "price": "decimal(38,6)",
        "local": "timestamp_ntz?",
        "desk": "struct<city: string, floors: list<int8>>?",
        "tags": "map<string, float64>?",
        "legs": "list<list<int16>>?",
        "order": "uuid?",
        "raw": "json?",
    },
    key=["symbol", "day"],
)
LATEST = schema({"name": "string", "level": "int64"}, key="name", on_duplicate="replace")
EVENTS = schema({"what": "string"}, generated_key="event")


def alter(client: Database, name: str, **wanted: Any) -> CollectionInfo:
    made = resolve_paths(alter_changes(**wanted), lambda: client.definition(name).schema)
    client.catalog.alter(name, made)
    return client.definition(name)


def order(key: int, qty: int = 2, price: str = "1.50", **more: Any) -> dict[str, Any]:
    return {"id": key, "qty": qty, "price": Decimal(price), "at": datetime(2026, 11, 24, 9, tzinfo=UTC), **more}


def trade(symbol: str, day: int, price: str, **more: Any) -> dict[str, Any]:
    return {"symbol": symbol, "day": date(2026, 11, day), "price": Decimal(price), **more}


def forged(maker: Maker, collection: CollectionInfo, row: dict[str, Any]) -> None:
    """A row that no producer of ours would send."""
    table = pa.Table.from_pylist([row], collection.schema.arrow())
    for part_vchannel, number, part in split_rows(table, collection, None, None):
        message = insert_message(part, collection, vchannel=part_vchannel, partition_id=number)
        message = replace(message, term=maker.client.catalog.term(pchannel_of(part_vchannel)))
        maker.append(pchannel_of(part_vchannel), message)


def made(maker: Maker) -> None:
    client, catalog = maker.client, maker.client.catalog
    catalog.ensure_pchannels(2)
    orders = catalog.create_collection("orders", ORDERS, vchannels=2)
    first = client.definition("orders")
    customer, writer = client.new_producer(producer_id=CUSTOMER), client.new_producer(producer_id=CUSTOMER + 1)
    customer.insert(orders, [order(key) for key in range(1, 9)])
    customer.upsert(orders, [order(2, 5, "0.10", note="five"), order(20, 1, "99.99")])
    forged(maker, orders, order(90, 0, "1.00", total=Decimal(0), note=None))  # breaks a check
    forged(maker, orders, order(91, 1, "1.00", total=Decimal(7), note=None))  # another total
    maker.note("first orders", "orders")
    maker.up_to_date()
    orders = alter(
        client,
        "orders",
        drop_check="affordable",
        rename={"qty": "pieces"},
        widen={"pieces": "int64"},
        drop="note",
        add={"region": "string?", "tax": "decimal(14,2)?", "seen": "timestamp?", "note": "int64?"},
        computed={"tax": "round(pieces * price * 0.25, 2)"},
        set_default={"region": "north", "seen": "now()"},
        add_check={"few": "pieces < 1000", "near": "region <> 'south' OR total <= 10"},
    )
    customer.insert(first, [order(key, 3, "2.00", note="old") for key in range(30, 36)])
    with suppress(millrace.MillraceError):
        customer.insert(first, [order(36, 5000, "0.01")])  # the newest schema's check
    writer.insert(orders, [{"id": 40, "pieces": 4, "price": Decimal("2.50"), "region": "south", "note": 1}])
    maker.note("a changed schema, and a producer that does not know it", "orders")
    catalog.flush("orders")
    maker.up_to_date()
    loaded = maker.settings.data_dir.parent / "input.parquet"
    pq.write_table(pa.table({"id": [50, 51], "pieces": [1, 2], "price": [Decimal("1.00"), Decimal("2.00")]}), loaded)
    load_files(maker.settings, LoadParams(collection="orders", files=[str(loaded)], import_id="orders"), Progress())
    loaded.unlink()
    maker.note("an import", "orders")
    orders = alter(client, "orders", drop_default="region", drop_check="few")
    customer.insert(first, [order(60, 7, "3.00")])
    maker.note("rules less", "orders")

    trades = catalog.create_collection("trades", TRADES)
    full = {
        "local": datetime(2026, 11, 24, 12),  # noqa: DTZ001 - it has none
        "desk": {"city": "Oslo", "floors": [1, None]},
        "tags": {"a": 0.5, "b": None},
        "legs": [[1, 2], None, []],
        "order": "00112233-4455-6677-8899-aabbccddeeff",
        "raw": '{"a": [1, null]}',
    }
    writer.insert(trades, [trade("a\x00b", 1, "1.000001", **full), trade("a", 2, "-12345678901234567890.5")])
    trades = alter(client, "trades", add={"desk.zip": "string"}, widen={"desk.floors": "list<int32>"})
    writer.upsert(trades, [trade("a", 2, "0", desk={"city": None, "floors": [70_000], "zip": "0150"})])
    writer.delete(trades, [("a\x00b", date(2026, 11, 1))])
    writer.insert(trades, [trade("ä", 3, "3", **full)])
    maker.note("several fields of a key, and each new type", "trades")

    latest, events = catalog.create_collection("latest", LATEST), catalog.create_collection("events", EVENTS)
    for level in (1, 2):
        writer.insert(latest, [{"name": name, "level": level} for name in ("x", "y")[: 3 - level]])
    maker.note("inserts that replace", "latest")
    writer.insert(events, [{"what": what} for what in ("made", "sent")])
    maker.note("rows without a key of their own", "events")
    vchannel = orders.vchannels[0]
    known = stamps(client, orders, vchannel)
    maker.append(pchannel_of(vchannel), builders.begin_txn(77, keepalive_ms=LEASE_MS, **known))
    maker.up_to_date()
    writer.insert(orders, [{"id": key, "pieces": 1, "price": 1} for key in keys_of(orders, 0, (70, 90))[:2]])
    maker.up_to_date(flushed=False)
    customer.insert(first, [order(key, 2, "1.00") for key in (95, 96)])


def make(root: Path) -> dict[str, Any]:
    """Make the deployment in `root`; what is known of it."""
    found: dict[str, Any] = {"millrace": millrace.__version__, "reads": []}
    with serving(root) as server:
        made(Maker(server, found))
        found["catalog"], found["log"] = of_catalog(server.client), of_log(server.client.log)
    settings = settings_of(root)
    for read in found["reads"]:
        assert rows(settings, read["collection"], at=read["at"]) == read["rows"]
    found["wal"] = of_wal(settings)
    return found


def main() -> None:
    if ARCHIVE.exists():
        raise SystemExit(f"{ARCHIVE.name} exists, and later builds must open what it holds: make another one beside it")
    root = Path(sys.argv[1]).absolute()
    root.mkdir(parents=True)
    os.chdir(root)
    found = make(root)
    FACTS.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    put_away(root, ARCHIVE)


if __name__ == "__main__":
    main()
