"""The declaration of a sink into a Delta table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final, Literal

from pydantic import model_validator

from millrace.flows.declare.part import Part, words
from millrace.flows.kinds import SinkKind


class DeltaSink(Part):
    """Rows or documents appended to a Delta table."""

    of_rows: ClassVar = frozenset({"path", "merge_schema"})
    of_documents: ClassVar = frozenset({"tombstones"})

    kind: Literal["delta"] = "delta"
    table: str | None = words(
        "the table's name below the deployment's tables",
        default=None,
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
    )
    path: str | None = words("or its path, for rows", default=None, min_length=1)
    merge_schema: bool = words("add columns that the table lacks, for rows", default=False)
    tombstones: Literal["ignore", "error"] = words("an append-only table cannot delete", default="error")

    @model_validator(mode="after")
    def _one_place(self) -> DeltaSink:
        if (self.table is None) == (self.path is None):
            raise ValueError("give either the table's name (table) or its path")
        return self

    def local_paths(self) -> Iterator[tuple[str, str]]:
        if self.path is not None:
            yield "path", self.path

    @property
    def target(self) -> str:
        """Its name in lists and graphs."""
        return f"delta:{self.path or self.table}"


KIND: Final = SinkKind(
    "delta",
    DeltaSink,
    "millrace.flows.sinks.delta.sink:made",
    "exactly once: a commit adds the documents and moves the position",
)
