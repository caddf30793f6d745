"""The guarantee of a flow for repeated batches, by its source and its sink. Imports nothing heavy.

- ``exactly once``: a batch that was written before has no second effect.
- ``effectively once``: a repeated batch is sent again without effect, because ids and versions identify its rows.
- ``at least once``: a repeated batch is written again as a whole; none is lost.
- ``at most once``: a batch that was begun is never sent again; a batch that a crash interrupts is lost.
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
"""The guarantees that each kind of a sink of rows offers. The first is the default."""


def require_guarantee(guarantee: str, kind: str) -> None:
    """Raise InvalidArgument if a sink of `kind` does not offer `guarantee`."""
    if guarantee not in OFFERED[kind]:
        raise InvalidArgument(f"the guarantee is one of {', '.join(map(repr, OFFERED[kind]))}, not {guarantee!r}")


_OF_ROWS: Final[Mapping[Guarantee, str]] = {
    "exactly once": "the sink stores the micro-batch's number with its rows",
    "effectively once": "a row's document has an id and a version",
    "at least once": "a micro-batch that a crash interrupts is repeated, with its number",
    "at most once": "a micro-batch that a crash interrupts is lost",
}
"""How a sink of rows meets each guarantee."""


def guarantee_of(
    source: SourceKind, sink: SinkKind | None, declared: Any, *, rows: bool = False, chosen: Guarantee | None = None
) -> str:
    """Return the guarantee of a flow and how it is met, in words.

    The sink `declared` of kind `sink` receives the documents of a `source` or, with `rows`, the micro-batches of a
    query under the `chosen` one of its guarantees.
    """
    if not source.repeatable:
        return "at most once: the source cannot be read again, so what a crash interrupts is lost"
    if rows:
        offered = OFFERED[declared.kind]
        guarantee = chosen if chosen in offered else offered[0]
        return f"{guarantee}: {_OF_ROWS[guarantee]}"
    assert sink is not None, "documents go into a kind of sink"
    found = sink.guarantee if sink.of is None else sink.of(declared)
    if source.numbered or level(found) != "exactly once":
        return found
    return sink.unnumbered or "at least once: records share positions, so a repeated range is written again"


def level(words: str) -> Guarantee:
    """Return the guarantee at the beginning of `words`; at least once if it is unknown."""
    found = words.partition(":")[0].partition(";")[0]
    return found if found in (*GUARANTEES, "effectively once") else "at least once"
