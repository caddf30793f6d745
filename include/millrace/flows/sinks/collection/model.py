"""The declaration of a sink into a collection."""

from __future__ import annotations

from typing import Final, Literal

from millrace.flows.declare.part import Part, words
from millrace.flows.kinds import SinkKind


class CollectionSink(Part):
    """Documents as rows of a collection of this deployment; a tombstone deletes its key's row."""

    kind: Literal["collection"] = "collection"
    collection: str = words("its name", min_length=1, max_length=255)
    tombstones: Literal["delete", "ignore", "error"] = words(
        "what a record without a value does to its key", default="delete"
    )


KIND: Final = SinkKind(
    "collection",
    CollectionSink,
    "millrace.flows.sinks.collection.sink:made",
    "exactly once: each lane has a journal; where records share positions, a row replaces the one of its key",
)
