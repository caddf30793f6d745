"""Use a dataclass as the schema, and its instances as rows."""

from dataclasses import dataclass
from datetime import UTC, datetime

import millrace


@dataclass
class Order:
    number: int
    customer: str
    placed: datetime
    lines: list[str]
    note: str | None = None


with millrace.connect() as db:
    orders = db.create_collection("orders", Order, key="number", event_time="placed", exist_ok=True)
    orders.upsert([Order(1, "Ada", datetime(2026, 11, 23, 9, tzinfo=UTC), ["tea", "cake"])])
    for row in orders.read().to_pylist():
        print(Order(**row))
