"""A stream into a collection without Spark.

python sink_process.py <data folder> <folder of its checkpoint> <guarantee> <batches>.

It does what Spark does of a query's checkpoint: a micro-batch whose end is not noted comes again, with its number and
its rows, which may stand in another order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.sinks.collection.sink import CollectionSink

ROWS = 40


def rows(batch_id: int) -> list[dict[str, Any]]:
    return [{"id": batch_id * ROWS + each, "batch": batch_id} for each in range(ROWS)]


def main(data: Path, folder: Path, guarantee: Any, batches: int) -> None:
    noted = folder / "commits.json"
    try:
        value = json.loads(noted.read_text())
    except FileNotFoundError:
        value = {"committed": -1, "attempts": 0}
    value["attempts"] += 1
    replace_json(noted, value, synced=True)
    with CollectionSink(
        Settings(data_dir=data, append_retry_delay=0.05), "into", memory=folder / "sink", guarantee=guarantee
    ) as sink:
        for batch_id in range(value["committed"] + 1, batches):
            given = rows(batch_id)[:: 1 if value["attempts"] % 2 else -1]
            rows_of = pa.Table.from_pylist(given).to_batches(max_chunksize=7)
            sink.write(Batch.of_rows("query", batch_id, rows_of))
            value["committed"] = batch_id
            replace_json(noted, value, synced=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
