"""Declarations that all kinds of sinks share. Those of one kind are in the module `model` of its folder."""

from __future__ import annotations

from typing import Literal

from millrace.flows.declare.part import Part, words


def names_of(text: str | None) -> tuple[str, ...]:
    """Return the columns that `text` lists, separated by commas."""
    return tuple(each.strip() for each in (text or "").split(",") if each.strip())


class Flush(Part):
    """When a bulk is sent at the latest. The end of a micro-batch always sends the remaining documents."""

    mib: float = words("flushMiB: bytes of a bulk", default=5, ge=0.001, le=100)
    items: int = words("flushItems: documents of a bulk", default=10_000, ge=1, le=1_000_000)
    seconds: float = words("flushIntervalSec: age of its first document", default=3, ge=0.01, le=3600)


class DocumentSink(Part):
    """Fields of all sinks of documents. Derive the model of your own sink from it."""

    ids: Literal["position", "key", "template"] = words(
        "a document's id: topic-partition-offset; the record's key; or the result of the step template_id",
        default="position",
    )
    tombstones: Literal["delete", "ignore", "error"] = words(
        "the effect of a record without a value on its key", default="error"
    )
