"""A user's function as a sink: it takes the micro-batch as a DataFrame and its number, like Spark's foreachBatch.

``at least once``: a micro-batch whose end was not noted comes again, with the same number and rows; a function that
writes under that number is exactly once. ``at most once``: a batch is noted before the function is called, and never
comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame

from millrace.base.failpoint import hit
from millrace.base.files import make_folder
from millrace.streams.sinks.guarantee import Guarantee, require_guarantee
from millrace.streams.sinks.sink import Noted, Taken

OFFERED: Final[tuple[Guarantee, ...]] = ("at least once", "at most once")


class FunctionSink:
    """Calls a function for each micro-batch."""

    def __init__(
        self, folder: Path, function: Callable[[DataFrame, int], object], *, guarantee: Guarantee = "at least once"
    ) -> None:
        require_guarantee(guarantee, OFFERED)
        make_folder(folder)
        self._folder = folder
        self._function = function
        self._once = guarantee == "at most once"
        self._noted = Noted.load(folder)

    def write_frame(self, frame: DataFrame, batch_id: int) -> Taken:
        """Call the function. Raises what it raises."""
        if self._once:
            again = self._noted.again(batch_id)
            if again is not None:
                return again
            self._noted = Noted(batch_id)
            self._noted.keep(self._folder)
            hit("sink.done")
        self._function(frame, batch_id)
        hit("sink.sent")
        return Taken()

    def close(self) -> None:
        """There is nothing to release."""
