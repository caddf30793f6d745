"""The declaration of a source of a collection's rows."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import StringConstraints

from millrace.flows.declare.part import Part, words
from millrace.flows.kinds import SourceKind

ChannelName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=255)]
"""Of a VChannel or a PChannel."""


class CollectionSource(Part):
    """Rows of a collection of this deployment, as they become visible; one task."""

    kind: Literal["collection"] = "collection"
    collection: str = words("its name", min_length=1, max_length=255)
    start: Literal["earliest", "latest"] = words(
        "all rows that it holds first, or only what comes from now on", default="earliest"
    )
    channels: tuple[ChannelName, ...] = words(
        "its VChannels, or PChannels, whose rows alone are read; empty: all", default=(), max_length=1024
    )


KIND: Final = SourceKind(
    "collection",
    CollectionSource,
    "millrace.flows.sources.collection.documents:source_of",
    "millrace.flows.sources.collection.documents:reader_of",
    numbered=False,
)
