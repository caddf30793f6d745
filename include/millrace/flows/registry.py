"""The kinds of sources and sinks: those of this package, and those that installed packages add by entry point.

A package adds a kind by an entry point of the group ``millrace.sources`` or ``millrace.sinks`` that names a
:class:`SourceKind` or a :class:`SinkKind`:

    [project.entry-points."millrace.sinks"]
    file = "millrace_file_sink:KIND"

The kind is then accepted in declarations and by `millrace flows check`, and appears in `millrace flows kinds`, the
API's schema and list of kinds, and the UI's forms. Its module is imported wherever a declaration is checked, so slow
imports belong in the modules that it names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar, Union

from pydantic import Field

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.flows.guarantee import Guarantee, guarantee_of
from millrace.flows.kinds import SinkKind as SinkKind
from millrace.flows.kinds import SourceKind as SourceKind
from millrace.flows.sinks.collection.model import KIND as COLLECTION_SINK
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sinks.delta.model import KIND as DELTA_SINK
from millrace.flows.sinks.delta.model import DeltaSink
from millrace.flows.sinks.kafka.model import KIND as KAFKA_SINK
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.opensearch.model import KIND as OPENSEARCH_SINK
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.collection.model import KIND as COLLECTION_SOURCE
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.direct.model import KIND as DIRECT_SOURCE
from millrace.flows.sources.direct.model import DirectSource
from millrace.flows.sources.files.model import KIND as FILES_SOURCE
from millrace.flows.sources.files.model import FilesSource
from millrace.flows.sources.kafka.model import KIND as KAFKA_SOURCE
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.mariadb.model import KIND as MARIADB_SOURCE
from millrace.flows.sources.mariadb.model import MariaDbSource
from millrace.flows.sources.postgres.model import KIND as POSTGRES_SOURCE
from millrace.flows.sources.postgres.model import PostgresSource
from millrace.flows.sources.query.model import KIND as QUERY_SOURCE
from millrace.flows.sources.query.model import QuerySource
from millrace.flows.sources.triggers.model import KIND as TRIGGERS_SOURCE
from millrace.flows.sources.triggers.model import TriggersSource

if TYPE_CHECKING:
    from millrace.flows.sinks.sink import Sink as AnySink
    from millrace.flows.sinks.sink import Ticks
    from millrace.flows.sources.source import Feeder, LaneReader
    from millrace.flows.sources.source import Source as AnySource

SOURCE_GROUP: Final = "millrace.sources"
SINK_GROUP: Final = "millrace.sinks"
"""The group of entry points for kinds of sinks."""
SOURCES: Final = (
    KAFKA_SOURCE, COLLECTION_SOURCE, MARIADB_SOURCE, POSTGRES_SOURCE, QUERY_SOURCE, TRIGGERS_SOURCE, FILES_SOURCE,
    DIRECT_SOURCE,
)  # fmt: skip
SINKS: Final = (OPENSEARCH_SINK, KAFKA_SINK, COLLECTION_SINK, DELTA_SINK)
"""The kinds of sinks of this package. A new one is a folder, and its KIND in this list."""
_Kind = TypeVar("_Kind", SourceKind, SinkKind)
_log = logging.getLogger(__name__)


@cache
def source_kinds() -> Mapping[str, SourceKind]:
    """Return all kinds of sources by name. Logs the entry points that it ignores, as :func:`sink_kinds` does."""
    return _kinds(SourceKind, SOURCES, SOURCE_GROUP, "source")


@cache
def sink_kinds() -> Mapping[str, SinkKind]:
    """Return all kinds of sinks by name. Logs and ignores an entry point that fails to load or repeats a name."""
    return _kinds(SinkKind, SINKS, SINK_GROUP, "sink")


def kinds_listed() -> list[dict[str, str]]:
    """Return all kinds as rows: part (source or sink), kind, package, and its guarantee or properties in words."""
    sources = [("source", each.name, each.package, each.words) for each in source_kinds().values()]
    sinks = [("sink", each.name, each.package, each.guarantee) for each in sink_kinds().values()]
    return [dict(zip(("part", "kind", "package", "promise"), row, strict=True)) for row in sources + sinks]


def promise_of(source: Source, sink: Any, *, rows: bool = False, chosen: Guarantee | None = None) -> str:
    """Return the guarantee of a flow from `source` to `sink` and how it is met; see :func:`guarantee_of`."""
    return guarantee_of(source_kinds()[source.kind], sink_kinds().get(sink.kind), sink, rows=rows, chosen=chosen)


def _kinds(of: type[_Kind], ours: Sequence[_Kind], group: str, what: str) -> Mapping[str, _Kind]:
    found = {each.name: each for each in ours}
    for point in entry_points(group=group):
        package = point.dist.name if point.dist is not None else point.value
        try:
            kind = point.load()
        except Exception:
            _log.exception("the %s %s of the package %s cannot be loaded", what, point.name, package)
            continue
        if not isinstance(kind, of) or kind.name in found:
            _log.error("the %s %s of the package %s is not a new kind and is ignored", what, point.name, package)
            continue
        found[kind.name] = replace(kind, package=package)
    return found


if TYPE_CHECKING:
    Source: TypeAlias = (
        KafkaSource
        | CollectionSource
        | MariaDbSource
        | PostgresSource
        | QuerySource
        | TriggersSource
        | FilesSource
        | DirectSource
    )
    Sink: TypeAlias = OpenSearchSink | KafkaSink | CollectionSink | DeltaSink
else:
    Source = Annotated[Union[tuple(each.model for each in source_kinds().values())], Field(discriminator="kind")]  # noqa: UP007
    Sink = Annotated[Union[tuple(each.model for each in sink_kinds().values())], Field(discriminator="kind")]  # noqa: UP007
"""Declarations of any kind of source, and of any kind of sink."""


def source_of(
    declared: Source, settings: Settings, *, group: str, standing: Mapping[str, int] | None = None
) -> AnySource:
    """Return the source `declared`; `standing` has the stored positions, by lane.

    Raises InvalidSettings if no such kind is installed.
    """
    make = _function(_installed(source_kinds(), declared.kind, "source").source)
    found: AnySource = make(declared, settings, group=group, standing=standing or {})
    return found


def reader_of(declared: Source, settings: Settings, *, group: str, topic: str, partition: int) -> LaneReader:
    """Return a reader of one lane of `declared`. Raises as :func:`source_of`."""
    make = _function(_installed(source_kinds(), declared.kind, "source").reader)
    found: LaneReader = make(declared, settings, group=group, topic=topic, partition=partition)
    return found


def feeder_of(declared: Source, settings: Settings, *, group: str) -> Feeder | None:
    """Start and return the feeder that gathers the records of `declared`; None if the source needs none.

    Raises InvalidSettings, LogUnavailable, StreamBusy.
    """
    place = _installed(source_kinds(), declared.kind, "source").feeder
    found: Feeder | None = _function(place)(declared, settings, group=group) if place else None
    return found


def release(declared: Source, settings: Settings, *, group: str) -> None:
    """Remove the flow's objects at the source `declared`, after its worker has stopped. Idempotent.

    Raises InvalidSettings, LogUnavailable.
    """
    place = _installed(source_kinds(), declared.kind, "source").release
    if place:
        _function(place)(declared, settings, group=group)


def sink_of(declared: Sink, settings: Settings, *, flow: str, flush: Flush) -> AnySink:
    """Return the unopened sink that `flow` declares. Raises InvalidSettings if no such kind is installed."""
    make = _function(_installed(sink_kinds(), declared.kind, "sink").make)
    found: AnySink = make(declared, settings, flow=flow, flush=flush)
    return found


def ticks_of(declared: Sink, settings: Settings, topics: Sequence[str]) -> Ticks | None:
    """Return the ticks of the sink `declared` for `topics`; None if the sink has none."""
    place = _installed(sink_kinds(), declared.kind, "sink").ticks
    found: Ticks | None = _function(place)(declared, settings, topics) if place else None
    return found


def _installed(kinds: Mapping[str, _Kind], name: str, what: str) -> _Kind:
    if name not in kinds:
        raise InvalidSettings(f"no {what} of kind {name} is installed; installed kinds: {', '.join(sorted(kinds))}")
    return kinds[name]


def _function(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
