"""The kinds of sinks: those of this package, and those that installed packages add by entry point.

A kind is a folder with a model of its declaration, a sink, and its documentation. A package adds one by an entry point
of the group ``millrace.sinks`` that names a :class:`SinkKind`:

    [project.entry-points."millrace.sinks"]
    file = "millrace_file_sink:KIND"

It then has a place in declarations, in `millrace pipelines check` and `millrace pipelines kinds`, and in the API's
schema. Its module is imported wherever a declaration is checked, so what is slow to import belongs into `make`'s
module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, Union

from pydantic import Field

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.flows.declare.part import Part
from millrace.flows.sinks.models import CollectionSink, DeltaSink, Flush, KafkaSink, OpenSearchSink

if TYPE_CHECKING:
    from millrace.flows.sinks.sink import Sink as AnySink

SINK_GROUP: Final = "millrace.sinks"
"""Group of entry points."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SinkKind:
    """A kind of sink."""

    name: str
    """Its ``kind`` in a declaration."""
    model: type[Part]
    """Its declaration, with a field `kind` that is the name alone, and the fields of
    :class:`millrace.flows.sinks.models.DocumentSink`."""
    make: str
    """``module:function``, from (declared, settings, *, flow, flush) to a millrace.flows.sinks.sink.Sink."""
    guarantee: str
    """What becomes of a document that is written twice, in one sentence for people."""
    package: str = "millrace"
    """The distribution that it comes from."""


_MODULES: Final = "millrace.flows.sinks"
BUILT_IN: Final = (
    SinkKind(
        "opensearch",
        OpenSearchSink,
        f"{_MODULES}.opensearch.sink:made",
        "effectively once: a document replaces the one of its id, by version where versions are declared",
    ),
    SinkKind(
        "kafka",
        KafkaSink,
        f"{_MODULES}.kafka.sink:made",
        "at least once; the header millrace.position tells a reader of repeats",
    ),
    SinkKind(
        "collection",
        CollectionSink,
        f"{_MODULES}.collection.sink:made",
        "effectively once: a row replaces the one of its key",
    ),
    SinkKind(
        "delta",
        DeltaSink,
        f"{_MODULES}.delta.sink:made",
        "exactly once: a commit adds the documents and moves the position",
    ),
)


@cache
def sink_kinds() -> Mapping[str, SinkKind]:
    """Return all kinds of sinks by name. Logs an entry point that cannot be loaded, or names a kind that is there."""
    found = {each.name: each for each in BUILT_IN}
    for point in entry_points(group=SINK_GROUP):
        package = point.dist.name if point.dist is not None else point.value
        try:
            kind = point.load()
        except Exception:
            _log.exception("the sink %s of the package %s cannot be loaded", point.name, package)
            continue
        if not isinstance(kind, SinkKind) or kind.name in found:
            _log.error("the sink %s of the package %s is no kind of its own: it is left out", point.name, package)
            continue
        found[kind.name] = SinkKind(kind.name, kind.model, kind.make, kind.guarantee, package)
    return found


if TYPE_CHECKING:
    Sink: TypeAlias = OpenSearchSink | KafkaSink | CollectionSink | DeltaSink
else:
    Sink = Annotated[Union[tuple(each.model for each in sink_kinds().values())], Field(discriminator="kind")]  # noqa: UP007
"""A declaration of any kind of sink."""


def sink_of(declared: Sink, settings: Settings, *, flow: str, flush: Flush) -> AnySink:
    """Return the sink that flow `flow` declares, not opened. Raises InvalidSettings if no such kind is installed."""
    kinds = sink_kinds()
    if declared.kind not in kinds:
        raise InvalidSettings(f"this build has no sink of kind {declared.kind}; it has {', '.join(sorted(kinds))}")
    module, _, name = kinds[declared.kind].make.partition(":")
    make: Any = getattr(import_module(module), name)
    found: AnySink = make(declared, settings, flow=flow, flush=flush)
    return found
