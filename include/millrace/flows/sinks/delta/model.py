"""The declaration of a sink into a Delta table."""

from __future__ import annotations

from typing import Final, Literal

from millrace.flows.declare.part import Part, words
from millrace.flows.kinds import SinkKind


class DeltaSink(Part):
    """Documents appended to a Delta table."""

    kind: Literal["delta"] = "delta"
    table: str = words(
        "its name below the deployment's tables", min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
    )
    tombstones: Literal["ignore", "error"] = words("a table of appends deletes nothing", default="error")


KIND: Final = SinkKind(
    "delta",
    DeltaSink,
    "millrace.flows.sinks.delta.sink:made",
    "exactly once: a commit adds the documents and moves the position",
)
