"""The declaration of a table that is polled by a column that grows with each change."""

from __future__ import annotations

from typing import Final, Literal

from millrace.flows.declare.part import words
from millrace.flows.kinds import SourceKind
from millrace.flows.sources.sql.model import NAME, SqlDatabase


class QuerySource(SqlDatabase):
    """The new and changed rows of a table or view, by polling. One task."""

    kind: Literal["query"] = "query"
    table: str = words("the table or view", min_length=1, max_length=64, pattern=NAME)
    column: str = words(
        "a column that grows with each change of a row: a version or a time", min_length=1, max_length=64
    )
    key: tuple[str, ...] = words("columns that identify a row; empty: the primary key", default=(), max_length=16)
    overlap: float = words(
        "how far below the largest value rows still appear, because their transactions commit late: seconds of a time,"
        " or a number",
        default=60,
        ge=0,
        le=1e15,
    )
    every_seconds: float = words("pause between polls", default=5, ge=0.05, le=86_400)
    page_rows: int = words("rows of one statement", default=5_000, ge=1, le=1_000_000)
    start: Literal["earliest", "latest"] = words("all rows first, or only changes from now on", default="earliest")
    spool_mib: int = words(
        "size of rows that wait for the flow; when it is reached, polling pauses", default=1024, ge=1, le=1 << 20
    )

    @property
    def name(self) -> str:
        """The table with its database or schema: the topic of its lane."""
        return f"{self.place}.{self.table}"

    @property
    def names(self) -> tuple[str, ...]:
        """The topics of its lanes."""
        return (self.name,)


KIND: Final = SourceKind(
    "query",
    QuerySource,
    "millrace.flows.sources.query.polling:source_of",
    "millrace.flows.sources.query.polling:reader_of",
    feeder="millrace.flows.sources.query.polling:feeder_of",
    release="millrace.flows.sources.query.polling:release",
)
