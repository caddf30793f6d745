"""The declaration of a sink into a collection."""

from __future__ import annotations

import re
from typing import ClassVar, Final, Literal

from pydantic import field_validator, model_validator

from millrace.flows.declare.part import Part, words
from millrace.flows.kinds import SinkKind
from millrace.flows.sinks.models import names_of

ALL_COLUMNS: Final = "*"


class History(Part):
    """Every version of a row, with its time of validity (SCD type 2), instead of only the newest."""

    sequence: str | None = words(
        "a field of the documents that orders the changes of a key; empty: the order of the source",
        default=None,
        min_length=1,
        max_length=255,
    )
    columns: tuple[str, ...] = words(
        "columns whose change creates a version, or * for all; empty: every change does",
        default=(),
        max_length=1000,
    )
    deletes: dict[str, tuple[str | int | bool, ...]] = words(
        "field: its values in documents that delete", default_factory=dict, max_length=16
    )
    valid_from: str = words("column with the sequence at which a version begins", default="valid_from", min_length=1)
    valid_to: str = words(
        "column with the sequence that ended it; null while it is valid", default="valid_to", min_length=1
    )
    current: str = words("column that is true for the version that is valid now", default="current", min_length=1)
    version: str = words("last column of the key: 0 for the newest change", default="version", min_length=1)
    versions: str = words("column with the number of other changes, of the newest", default="versions", min_length=1)
    deleted: str = words("column that is true for a delete", default="deleted", min_length=1)
    changed_at: str = words("column with the change's own sequence", default="changed_at", min_length=1)
    horizon_days: float | None = words(
        "versions that ended longer ago are removed; requires a time as the sequence. Empty: none is removed",
        default=None,
        gt=0,
        le=36_500,
    )
    oldest: str = words(
        "column with the smallest number of the other changes, of the newest; with a horizon alone",
        default="oldest",
        min_length=1,
    )

    @model_validator(mode="after")
    def _names_apart(self) -> History:
        if len(set(self.own)) < len(self.own):
            raise ValueError("two columns of the history have the same name")
        return self

    @property
    def own(self) -> tuple[str, ...]:
        """The columns that documents do not have."""
        found = (
            self.version, self.versions, self.valid_from, self.valid_to, self.current, self.deleted, self.changed_at
        )  # fmt: skip
        return found if self.horizon_days is None else (*found, self.oldest)


class CollectionSink(Part):
    """Rows, or documents as rows, of a collection of this deployment. A document's tombstone deletes its key's row."""

    of_rows: ClassVar = frozenset({"mode", "partition", "partition_by", "dead_letters", "key"})
    of_documents: ClassVar = frozenset({"tombstones", "history", "on_schema_change"})

    kind: Literal["collection"] = "collection"
    collection: str = words(
        "its name; with {table}, {database}, {schema} or {topic} in it, each topic or table has its own",
        min_length=1,
        max_length=255,
    )
    tombstones: Literal["delete", "ignore", "error"] = words(
        "the effect of a record without a value on its key", default="delete"
    )
    history: History | None = words("store every version of a row; empty: only the newest", default=None)
    mode: Literal["append", "upsert", "changes"] = words(
        "the effect of a row on the existing row of its key", default="append"
    )
    partition: str | None = words("the partition of all rows", default=None)
    partition_by: str | None = words("a column with the name of a row's partition", default=None)
    dead_letters: str | None = words("a collection for rows that do not fit; empty: the flow stops", default=None)
    create: bool = words(
        "create the collection, with the rows' columns, if it does not exist when the flow starts; in a flow of"
        " documents with the columns and the key of a captured table, at its first row",
        default=False,
    )
    on_schema_change: Literal["alter", "stop"] = words(
        "when the columns of a captured table change: alter the collection, or stop with the command to run",
        default="stop",
    )
    key: str | None = words("columns of the primary key of a created collection, separated by commas", default=None)

    @model_validator(mode="after")
    def _key_of_what_is_made(self) -> CollectionSink:
        if self.key is not None and not self.create:
            raise ValueError("'key' applies to a collection that the stream creates: set 'create: true'")
        if self.create and self.mode != "append" and not self.keys:
            raise ValueError(f"a collection created for the mode {self.mode!r} needs a primary key: set 'key'")
        return self

    @field_validator("collection")
    @classmethod
    def _known(cls, text: str) -> str:
        unknown = set(re.findall(r"\{([^{}]*)\}", text)) - set(_places(""))
        if unknown or text.count("{") != text.count("}"):
            raise ValueError(f"takes {', '.join(f'{{{each}}}' for each in _places(''))} in braces")
        return text

    @property
    def divided(self) -> bool:
        """Whether each topic has its own collection."""
        return "{" in self.collection

    def of(self, topic: str) -> str:
        """Return the collection of a topic, or of a table ``database.table``."""
        return self.collection.format(**_places(topic)) if self.divided else self.collection

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that `key` lists. If empty, a created collection gets a generated primary key."""
        return names_of(self.key)

    @property
    def target(self) -> str:
        """Its name in lists and graphs."""
        return f"collection:{self.collection}"


def _places(topic: str) -> dict[str, str]:
    place, _, table = topic.rpartition(".")
    return {"table": table, "database": place, "schema": place, "topic": topic}


KIND: Final = SinkKind(
    "collection",
    CollectionSink,
    "millrace.flows.sinks.collection.routes:made",
    "exactly once: each lane has a journal",
    ticks="millrace.flows.sinks.collection.routes:ticks_of",
    unnumbered="effectively once: a row replaces the one of its key",
    truncates=True,
)
