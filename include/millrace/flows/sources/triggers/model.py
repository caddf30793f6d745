"""The declaration of tables whose triggers write each change into another table."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from millrace.flows.declare.part import words
from millrace.flows.kinds import SourceKind
from millrace.flows.sources.capture.model import TablesOfDatabase
from millrace.flows.sources.sql.model import NAME, SqlDatabase

TableName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=48, pattern=r"^[^.`'\"\x00]+$")]


class TriggersSource(SqlDatabase, TablesOfDatabase):
    """The rows of tables, and then each change of them, by triggers that the user creates. One task a table."""

    kind: Literal["triggers"] = "triggers"
    table: TableName | None = words("the captured table, with a primary key", default=None)
    tables: Annotated[tuple[TableName, ...], Field(max_length=1000)] = words("several tables", default=())
    changes: str = words(
        "the table that the triggers write to, for this flow only", default="millrace_changes", min_length=1,
        max_length=48, pattern=NAME,
    )  # fmt: skip
    start: Literal["earliest", "latest"] = words(
        "a snapshot of the tables first, or only changes from now on", default="earliest"
    )
    every_seconds: float = words("pause between polls", default=1, ge=0.05, le=86_400)
    page_rows: int = words("rows of one statement", default=5_000, ge=1, le=1_000_000)
    spool_mib: int = words(
        "size of changes that wait for the flow; when it is reached, polling pauses", default=1024, ge=1, le=1 << 20
    )


KIND: Final = SourceKind(
    "triggers",
    TriggersSource,
    "millrace.flows.sources.triggers.reading:source_of",
    "millrace.flows.sources.triggers.reading:reader_of",
    transactional=True,
    feeder="millrace.flows.sources.triggers.reading:feeder_of",
    release="millrace.flows.sources.triggers.reading:release",
)
