"""A stream through an operator into a collection, its late rows into another, without Spark.

python operated_process.py <data folder> <folder of its checkpoint>.

Windows whose table, answers and late rows are moved by three programs of our own one after the other; what
Spark does of a checkpoint is done here as in sink_process.py: a micro-batch whose end is not noted comes
again, with its number and its rows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.spark_host.into import KeyedInto
from millrace.flows.spark_host.keyed import Operated, Taken
from millrace.streams.keyed.durable import DurableRun
from millrace.streams.operators.windows import Windows

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.utf8()), ("t", pa.int64()), ("v", pa.int64())])
OPERATOR = Windows(("k",), "t", {"n": ("count", None), "total": ("sum", "v")}, size=10)
DELAY = 5
BATCHES = 5


def rows(batch_id: int) -> pa.Table:
    """Of each batch 40 rows of 20 times, each eighth far behind."""
    numbers = range(40 * batch_id, 40 * batch_id + 40)
    return pa.Table.from_pylist(
        [{"id": n, "k": f"k{n % 3}", "t": n // 2 - (60 if n % 8 == 7 else 0), "v": n * n % 7} for n in numbers], SCHEMA
    )


@dataclass
class Keyed:
    """What KeyedFrames is under Spark."""

    run: DurableRun

    def write(self, batch: Batch) -> Taken:
        assert batch.frame is not None
        return Taken(again=not self.run.batch(batch.start, batch.frame()))

    def answers_of(self, batch_id: int) -> tuple[pa.Table, pa.Table] | None:
        return self.run.table.answers_of(batch_id)

    def counted(self, frame: Any, late: pa.Table) -> Operated:
        return Operated(frame.num_rows - late.num_rows, late.num_rows)


def main(data: Path, folder: Path) -> None:
    noted = folder / "commits.json"
    committed = json.loads(noted.read_text())["committed"] if noted.exists() else -1
    settings = Settings(data_dir=data, append_retry_delay=0.05)
    keyed: Any = Keyed(DurableRun(str(folder / "operator"), OPERATOR, SCHEMA, delay=DELAY, shards=2))
    into = KeyedInto(
        keyed,
        CollectionSink(settings, "answers", memory=folder / "sink"),
        CollectionSink(settings, "late", memory=folder / "sink" / "late"),
    )
    try:
        for batch_id in range(committed + 1, BATCHES):
            given: Any = rows(batch_id)
            into.write(Batch("query", batch_id, batch_id + 1, frame=lambda given=given: given))
            replace_json(noted, {"committed": batch_id}, synced=True)
    finally:
        into.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
