"""Read a collection as it was. Every write returns its time tick; a read takes a tick, a datetime or ISO 8601 text."""

from datetime import UTC, datetime

import millrace

with millrace.connect() as db:
    stock = db.create_collection("stock", {"item": "string", "pieces": "int64"}, key="item", exist_ok=True)
    full = stock.upsert([{"item": "bolt", "pieces": 100}]).last_tick
    stock.upsert([{"item": "bolt", "pieces": 60}])
    stock.delete_where("pieces < 80")
    print("at a tick:", stock.read(at=full).to_pylist())
    print("at a moment:", stock.read(at=datetime.now(UTC)).to_pylist())
    try:
        stock.read(at="2000-01-01T00:00:00Z")
    except millrace.errors.CollectionNotFound as error:
        print("too early:", error.code)
