"""Parameters of the operations `quality` and `quality_release`. Light: DAG files import this."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from pydantic import Field, field_validator

from millrace.message.ids import compose_tick
from millrace.ops.operation import OperationParams

TableGroup = Literal["wal", "segments", "checkpoints", "collections"]
ALL_TABLES: Final[tuple[TableGroup, ...]] = ("wal", "segments", "checkpoints", "collections")


class QualityParams(OperationParams):
    """What is checked, over which range, and what becomes of a slice that fails."""

    tables: tuple[TableGroup, ...] = Field(default=ALL_TABLES, min_length=1, description="Which tables are checked.")
    collections: tuple[str, ...] = Field(default=(), description="Names or ids of the collections to check; none: all.")
    start: str = Field(
        default="",
        description="Where the range begins: a time tick, or a timestamp with its zone (2026-01-01T00:00:00Z). Empty: behind what was checked last.",
    )
    end: str = Field(
        default="",
        description="Where the range ends (the end itself is not in it), in the same forms. Empty: what is there now.",
    )
    samples: int = Field(
        default=20, ge=1, le=1000, description="Wrong values that are kept of each failing expectation."
    )
    quarantine: bool = Field(
        default=False, description="Record the slice of a collection that fails a critical expectation as quarantined."
    )
    data_docs: bool = Field(default=True, description="Write the Data Docs (HTML) of this run.")

    @field_validator("start", "end")
    @classmethod
    def _is_a_moment(cls, value: str) -> str:
        moment(value)
        return value


class ReleaseParams(OperationParams):
    """Which blocks a person accepts, and who says so."""

    blocks: tuple[str, ...] = Field(min_length=1, description="Ids of the blocks (or quarantined slices) to release.")
    by: str = Field(min_length=1, max_length=200, description="Who approved it.")
    note: str = Field(default="", max_length=2000, description="Why it may go on.")


def moment(text: str) -> int | None:
    """The first time tick at or behind `text` (a tick in digits, or an ISO 8601 timestamp with its zone); None for "".

    Raises ValueError that says what is taken.
    """
    text = text.strip()
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 19:
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a time tick nor a timestamp such as 2026-01-01T00:00:00Z") from None
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: write 2026-01-01T00:00:00Z, or +02:00 behind it")
    return compose_tick(int(found.timestamp() * 1000), 0)
