"""Streams under Spark into functions and Delta tables, one after the other, each to its end.

python frame_sinks_process.py <folder>.

Of each micro-batch a function keeps the rows as a file: under a name of its own, so that a repeated one is there twice,
or under the batch's number.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.base.files import make_folder, replace_json
from millrace.base.settings import Settings
from millrace.flows.sinks.delta.sink import DeltaSink
from millrace.flows.sinks.function.sink import FunctionSink
from millrace.flows.sinks.sink import Sink
from millrace.flows.spark_host import incarnations, micro_batches

BATCHES = 4
ROWS = 30


def kept(folder: Path, *, by_number: bool = False) -> Callable[[Any, int], None]:
    def take(frame: Any, batch_id: int) -> None:
        rows = [row["id"] for row in frame.collect()]
        make_folder(folder)
        replace_json(folder / f"{batch_id if by_number else uuid.uuid4().hex}.json", rows, synced=True)

    return take


SINKS: dict[str, Callable[[Path, Path], Sink]] = {
    "function, at most once": lambda memory, into: FunctionSink(memory, kept(into), guarantee="at most once"),
    "function, at least once": lambda memory, into: FunctionSink(memory, kept(into)),
    "function, by number": lambda memory, into: FunctionSink(memory, kept(into, by_number=True)),
    "Delta, exactly once": lambda memory, into: DeltaSink(str(into), memory=memory),
    "Delta, at least once": lambda memory, into: DeltaSink(str(into), memory=memory, guarantee="at least once"),
}


def main(folder: Path) -> None:
    from millrace.runtime.spark.session import session

    spark = session("frame-sinks", settings=Settings(data_dir=folder / "data"), light_jvm=True)
    for name, made in SINKS.items():
        place = folder / name.replace(", ", "_").replace(" ", "_")
        rows = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
        sink = made(incarnations.sink_folder(place / "checkpoint"), place / "into")
        micro_batches.start(rows, sink, place / "checkpoint", available_now=True).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
