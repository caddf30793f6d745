"""The declaration of a source of a collection's rows."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import StringConstraints, model_validator

from millrace.flows.declare.part import Part, words
from millrace.flows.declare.rows import Place, Watermark
from millrace.flows.kinds import SourceKind

ChannelName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=255)]
"""The name of a VChannel or a PChannel."""


class CollectionSource(Part):
    """Rows of a collection of this deployment, as they become visible: as documents, or as rows of a Spark query.

    Each VChannel is a task of a pipeline.
    """

    of_rows: ClassVar = frozenset({"columns", "kinds", "after", "snapshot", "watermark", "max_bytes"})
    of_documents: ClassVar = frozenset({"start"})

    kind: Literal["collection"] = "collection"
    collection: str = words("its name", min_length=1, max_length=255)
    start: Literal["earliest", "latest"] = words("all present rows first, or only later changes", default="earliest")
    channels: tuple[ChannelName, ...] = words(
        "the VChannels or PChannels whose rows are read; empty: all", default=(), max_length=1024
    )
    columns: tuple[str, ...] = words("columns to read, including change columns; empty: all", default=())
    kinds: Literal["all", "inserts", "skip others"] = words(
        "all changes; inserts, with an error at any other; or inserts, skipping others", default="skip others"
    )
    after: Place = words("where rows begin: after a tick, a moment or now; empty: at the beginning", default=None)
    snapshot: Place = words("or with the rows that are visible at a tick, a moment or now", default=None)
    watermark: Watermark | None = words("the event time of rows", default=None)
    max_bytes: int | None = words("the most bytes of a micro-batch of rows", default=None, gt=0)

    @model_validator(mode="after")
    def _one_beginning(self) -> CollectionSource:
        if self.after is not None and self.snapshot is not None:
            raise ValueError("it begins after a tick (after) or with a snapshot, not both")
        return self

    @property
    def target(self) -> str:
        """Its name in lists and graphs."""
        return f"collection:{self.collection}"

    @property
    def table(self) -> str:
        """The name of its rows in SQL."""
        return self.collection

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide which rows it returns. Its start and its speed are not part of it."""
        found = self.model_dump(mode="json", include={"collection", "channels", "columns", "kinds", "watermark"})
        if not self.channels:
            del found["channels"]
        if self.watermark is not None and self.watermark.max_ahead is None:
            del found["watermark"]["max_ahead"]
        return found


KIND: Final = SourceKind(
    "collection",
    CollectionSource,
    "millrace.flows.sources.collection.documents:source_of",
    "millrace.flows.sources.collection.documents:reader_of",
    numbered=False,
)
