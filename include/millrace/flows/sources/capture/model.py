"""The common parts of declarations of captured tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from millrace.flows.declare.part import Part


class TablesOfDatabase(Part):
    """A source of one `table` or of several `tables`. Each kind declares both, with its database's form of names."""

    if TYPE_CHECKING:
        table: str | None
        tables: tuple[str, ...]

        @property
        def place(self) -> str:
            """The prefix of a table's name in its topic: its database, or its schema."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if (self.table is None) == (not self.tables):
            raise ValueError("give either table or tables")
        if len(set(self.tables)) < len(self.tables):
            raise ValueError("tables contains a table twice")
        return self

    @property
    def relations(self) -> tuple[str, ...]:
        """The tables without their database or schema."""
        return self.tables or tuple(each for each in (self.table,) if each is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The tables with their database or schema: the topics of the lanes."""
        return tuple(f"{self.place}.{each}" for each in self.relations)

    @property
    def name(self) -> str:
        """The tables in one text."""
        return ",".join(self.names)
