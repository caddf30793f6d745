"""Keep one row for each symbol and day, however often it is sent: a key of two fields, replaced on insert."""

from datetime import date
from decimal import Decimal

import millrace

MONDAY, TUESDAY = date(2026, 11, 23), date(2026, 11, 24)

with millrace.connect() as db:
    quotes = db.create_collection(
        "quotes",
        {"symbol": "string", "day": "date", "close": "decimal(10,2)"},
        key=("symbol", "day"),
        on_duplicate="replace",
        exist_ok=True,
    )
    quotes.insert([{"symbol": "ACME", "day": day, "close": Decimal("12.00")} for day in (MONDAY, TUESDAY)])
    corrected = quotes.insert([{"symbol": "ACME", "day": TUESDAY, "close": Decimal("12.50")}])
    print("closed at:", quotes.read(where=f"day = DATE '{TUESDAY}'").column("close").to_pylist())
    quotes.delete([("ACME", MONDAY)])
    print("left:", quotes.count(), "before:", len(quotes.read(at=corrected.last_tick)))
