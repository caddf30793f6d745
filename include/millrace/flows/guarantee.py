"""What a flow promises for a batch that is repeated, by its source and its sink. Imports nothing heavy.

- ``exactly once``: a batch that was taken before has no second effect.
- ``effectively once``: a repeated batch is sent again, and changes nothing: ids and versions identify its rows.
- ``at least once``: a repeated batch is sent again as a whole; none is left out.
- ``at most once``: a batch that was begun is never sent again; what a crash interrupts is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from millrace.base.errors import InvalidArgument

if TYPE_CHECKING:
    from millrace.flows.kinds import SinkKind, SourceKind

Guarantee = Literal["exactly once", "effectively once", "at least once", "at most once"]
GUARANTEES: Final[tuple[Guarantee, ...]] = ("exactly once", "at least once", "at most once")
OFFERED: Final[Mapping[str, tuple[Guarantee, ...]]] = {
    "collection": GUARANTEES,
    "delta": ("exactly once", "at least once"),
    "kafka": ("at least once", "exactly once"),
    "opensearch": ("effectively once",),
    "function": ("at least once", "at most once"),
}
"""By the kind of a sink of rows, the guarantees that it offers; the first is the one of a flow that declares none."""


def require_guarantee(guarantee: str, kind: str) -> None:
    """Raise InvalidArgument if a sink of `kind` does not offer `guarantee`."""
    if guarantee not in OFFERED[kind]:
        raise InvalidArgument(f"the guarantee is one of {', '.join(map(repr, OFFERED[kind]))}, not {guarantee!r}")


_OF_ROWS: Final[Mapping[Guarantee, str]] = {
    "exactly once": "the sink stores the micro-batch's number with its rows",
    "effectively once": "a row's document has an id and a version",
    "at least once": "a micro-batch that a crash interrupts comes again, with its number",
    "at most once": "a micro-batch that a crash interrupts is lost",
}
"""How a sink of rows keeps a guarantee."""


def guarantee_of(
    source: SourceKind, sink: SinkKind | None, declared: Any, *, rows: bool = False, chosen: Guarantee | None = None
) -> str:
    """Return what a flow promises, in words: a guarantee, and how.

    The sink `declared` of kind `sink` gets the documents of a `source`, or, with `rows`, the micro-batches of a query
    by the guarantee that was `chosen` of those it offers.
    """
    if not source.repeatable:
        return "at most once: the source cannot be read again, so what a crash interrupts is lost"
    if rows:
        offered = OFFERED[declared.kind]
        kept = chosen if chosen in offered else offered[0]
        return f"{kept}: {_OF_ROWS[kept]}"
    assert sink is not None, "documents go into a kind of sink"
    found = sink.guarantee if sink.of is None else sink.of(declared)
    if source.numbered or level(found) != "exactly once":
        return found
    return sink.unnumbered or "at least once: records share positions, so a repeated range is written again"


def level(words: str) -> Guarantee:
    """Return the guarantee at the beginning of `words`; one that is not known promises no more than at least once."""
    found = words.partition(":")[0].partition(";")[0]
    return found if found in (*GUARANTEES, "effectively once") else "at least once"
