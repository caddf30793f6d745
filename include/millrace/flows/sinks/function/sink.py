"""A user's function as a sink: it is called with the micro-batch's DataFrame and number, like Spark's foreachBatch.

``at least once``: a micro-batch whose end was not noted is repeated, with the same number and rows; a function that
writes under that number is exactly once. ``at most once``: a batch is noted before the function is called, and never
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.base.failpoint import hit
from millrace.flows.batch import Batch
from millrace.flows.guarantee import Guarantee, require_guarantee
from millrace.flows.sinks.memory import Folder, Noted, create_folder
from millrace.flows.sinks.sink import Verdicts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class FunctionSink:
    """Calls a function for each micro-batch of a Spark query."""

    def __init__(
        self, memory: Folder, function: Callable[[DataFrame, int], object], *, guarantee: Guarantee = "at least once"
    ) -> None:
        """`memory` is the sink's folder."""
        require_guarantee(guarantee, "function")
        create_folder(memory)
        self._memory = memory
        self._function = function
        self._once = guarantee == "at most once"
        self._noted = Noted.load(memory)

    def check(self, schema: pa.Schema, /) -> None:
        """Accept any columns: the function decides."""

    def open(self) -> None:
        """Do nothing: there is no connection."""

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return nothing: the function receives the batch's number, and may store it."""
        return {}

    def write(self, batch: Batch, /) -> Verdicts:
        """Call the function. Raises its errors, and InvalidArgument if the batch does not come from Spark."""
        if batch.frame is None:
            raise InvalidArgument("a function takes DataFrames, and this batch is not Spark's: choose another sink")
        if self._once:
            again = self._noted.again(batch.start)
            if again is not None:
                return again
            self._noted = Noted(batch.start)
            self._noted.keep(self._memory)
            hit("sink.done")
        self._function(batch.frame(), batch.start)
        hit("sink.sent")
        return Verdicts()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
