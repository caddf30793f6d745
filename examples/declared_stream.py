"""Declare a flow: Spark maintains the highest and lowest price by symbol and minute in a collection.

    python examples/declared_stream.py                              # creates the collections and sends some trades
    export PYTHONPATH=examples MILLRACE_FLOW_DECLARATIONS=declared_stream
    millrace flows check prices && millrace flows run prices --until-end
    python examples/declared_stream.py                              # shows what the stream has written

Without ``--until-end`` it keeps running. Under Airflow, the DAG ``stream_prices`` supervises it.
"""

from datetime import UTC, datetime, timedelta

import millrace
from millrace.flows.declare.flow import Flow, Transform
from millrace.flows.declare.rows import Watermark
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sources.collection.model import CollectionSource

FLOWS = [
    Flow(
        name="prices",
        description="Prices by symbol and minute.",
        source=CollectionSource(
            collection="trades",
            columns=("symbol", "at", "price"),
            watermark=Watermark(column="at", delay="1 hour"),
        ),
        transform=Transform(
            sql="""select symbol, window.start as minute, max(price) as high, min(price) as low
                from trades group by symbol, window(at, '1 minute')""",
            output_mode="update",
        ),
        sink=CollectionSink(collection="prices", mode="upsert"),
    )
]

if __name__ == "__main__":
    start = datetime(2026, 11, 24, 9, 30, tzinfo=UTC)
    with millrace.connect() as db:
        trades = db.create_collection(
            "trades",
            {"id": "int64", "symbol": "string", "at": "timestamp", "price": "float64"},
            key="id",
            exist_ok=True,
        )
        prices = db.create_collection(
            "prices",
            {"symbol": "string", "minute": "timestamp", "high": "float64?", "low": "float64?"},
            key=("symbol", "minute"),
            exist_ok=True,
        )
        trades.upsert(
            [
                {
                    "id": number,
                    "symbol": "ACME",
                    "at": start + timedelta(seconds=25 * number),
                    "price": 10.0 + number % 4,
                }
                for number in range(6)
            ]
        )
        print("trades:", trades.count())
        for row in prices.read(order_by="minute").to_pylist():
            print(f"{row['symbol']} {row['minute']:%H:%M} between {row['low']} and {row['high']}")
