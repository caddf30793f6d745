"""Keep writing while the connection is lost: rows wait in a local folder and are sent once, in order, later."""

import tempfile
from pathlib import Path

import millrace

with millrace.connect() as db, tempfile.TemporaryDirectory() as folder:
    meters = db.create_collection("meters", {"meter": "int64", "kwh": "float64"}, key="meter", exist_ok=True)
    with db.new_producer(spool=Path(folder) / "spool", spool_bytes=64 << 20) as producer:
        written = producer.insert("meters", [{"meter": 7, "kwh": 1234.5}])
        print("rows taken:", written.rows)
    print("meter 7:", meters.read(columns=["kwh"]).num_rows > 0)
