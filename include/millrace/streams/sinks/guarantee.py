"""What a sink promises for a repeated micro-batch: see :mod:`millrace.streams.sinks.sink`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from millrace.base.errors import InvalidArgument

Guarantee = Literal["exactly once", "at least once", "at most once"]
GUARANTEES: Final[tuple[Guarantee, ...]] = ("exactly once", "at least once", "at most once")


def require_guarantee(guarantee: str, offered: Iterable[str] = GUARANTEES) -> None:
    """Raises InvalidArgument where `guarantee` is none of those that a sink offers."""
    known = list(offered)
    if guarantee not in known:
        raise InvalidArgument(f"the guarantee is one of {', '.join(map(repr, known))}, not {guarantee!r}")
