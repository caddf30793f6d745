"""A Delta table as a sink, written by Spark.

``exactly once`` uses Delta's own app transactions: each commit carries an app id and the number of its micro-batch, and
Delta skips a number that it has. The app id is created with the sink's folder, so it belongs to the checkpoint: a query
that begins again numbers its batches from 0, and the old app id would skip all of them silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame

from millrace.base.failpoint import hit
from millrace.streams.sinks.guarantee import Guarantee, require_guarantee
from millrace.streams.sinks.sink import Taken, name_in

OFFERED: Final[tuple[Guarantee, ...]] = ("exactly once", "at least once")


class DeltaSink:
    """Appends micro-batches to the Delta table at `path`, which is made by the first."""

    def __init__(
        self, folder: Path, path: str, *, guarantee: Guarantee = "exactly once", merge_schema: bool = False
    ) -> None:
        """With `merge_schema`, columns that the table lacks are added; otherwise Spark refuses the batch."""
        require_guarantee(guarantee, OFFERED)
        self._path = path
        self._options = {"mergeSchema": "true"} if merge_schema else {}
        if guarantee == "exactly once":
            self._options["txnAppId"] = f"millrace-{name_in(folder, 'delta-app.json')}"

    def write_frame(self, frame: DataFrame, batch_id: int) -> Taken:
        """Append a micro-batch. Raises what Spark raises."""
        options = dict(self._options)
        if "txnAppId" in options:
            options["txnVersion"] = str(batch_id)
        frame.write.format("delta").mode("append").options(**options).save(self._path)
        hit("sink.sent")
        return Taken()

    def close(self) -> None:
        """There is nothing to release."""
