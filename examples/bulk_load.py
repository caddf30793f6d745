"""Load a stream that is larger than the memory: each batch is sent while the next one is made."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

import millrace


def batches() -> Iterator[pa.RecordBatch]:
    for first in range(0, 200_000, 50_000):
        yield pa.record_batch(
            {"id": np.arange(first, first + 50_000), "value": np.random.default_rng(first).random(50_000)}
        )


with millrace.connect() as db:
    numbers = db.create_collection("numbers", {"id": "int64", "value": "float64"}, key="id", vchannels=2, exist_ok=True)
    written = numbers.insert(batches())
    print("rows:", written.rows, "up to tick", written.last_tick)
