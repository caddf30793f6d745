"""The description of a kind of source or sink. Imports nothing heavy.

A kind is a folder: a module with its declaration and its KIND, the code that KIND names, and its page in docs/. KIND
names the code as ``module:function``, which the registry imports when a flow runs. The module with the KIND is imported
wherever a declaration is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millrace.flows.declare.part import Part


@dataclass(frozen=True, slots=True)
class SinkKind:
    """A kind of sink."""

    name: str
    """Its ``kind`` in a declaration."""
    model: type[Part]
    """Its declaration, with a literal field `kind` and the fields of
    :class:`millrace.flows.sinks.models.DocumentSink`."""
    make: str
    """``module:function``, from (declared, settings, *, flow, flush) to a millrace.flows.sinks.sink.Sink."""
    guarantee: str
    """The guarantee for a document that is written twice (millrace.flows.guarantee), and how it is met, after a colon.

    An exactly-once sink stores each lane's position."""
    of: Callable[[Any], str] | None = None
    """Returns the guarantee for a declaration, if it depends on the declaration."""
    unnumbered: str = ""
    """The guarantee of an exactly-once sink for a source whose records share positions. Empty: at least once."""
    ticks: str = ""
    """``module:function``, from (declared, settings, topics) to a millrace.flows.sinks.sink.Ticks, if the sink has
    ticks at which all acknowledged documents can be read."""
    truncates: bool = False
    """Whether it removes all of its rows for a truncation (:func:`millrace.flows.records.is_truncation`), which is
    always the first record of its batch."""
    package: str = "millrace"
    """The distribution that it comes from."""


@dataclass(frozen=True, slots=True)
class SourceKind:
    """A kind of source."""

    name: str
    """Its ``kind`` in a declaration."""
    model: type[Part]
    """Its declaration, with a literal field `kind` and a field `start`: a lane without a position begins at
    ``earliest`` or ``latest``."""
    source: str
    """``module:function``, from (declared, settings, *, group, standing) to a millrace.flows.sources.source.Source.
    `standing` has the runner's stored positions, by lane."""
    reader: str
    """``module:function``, from (declared, settings, *, group, topic, partition) to a
    millrace.flows.sources.source.LaneReader."""
    numbered: bool = True
    """Whether each record has its own position. If not, ids by position and appends to a table are refused."""
    ordered_by_key: bool = True
    """Whether all records of a key are in one lane, in order, so that positions can be versions."""
    repeatable: bool = True
    """Whether a range can be read again. If not, a range that a crash interrupts is lost: at most once."""
    tables: bool = False
    """Whether records are rows of tables, whose columns and key come with them (`Batch.columns`)."""
    transactional: bool = False
    """Whether transactions span several lanes, so that ticks are recorded at which the sink has whole transactions
    (`Source.settle`)."""
    feeder: str = ""
    """``module:function``, from (declared, settings, *, group) to a Feeder, which a worker runs beside its tasks: it
    gathers the lanes' records, and is closed with the worker. A kind with a feeder runs in a worker of the service."""
    release: str = ""
    """``module:function``, from (declared, settings, *, group), that removes the flow's objects at the source and its
    local files. Called when the flow is deleted, after its worker has stopped. Idempotent."""
    package: str = "millrace"
    """The distribution that it comes from."""

    @property
    def words(self) -> str:
        """The properties in one sentence, for display."""
        return ", ".join(
            (
                "can be read again" if self.repeatable else "is read once",
                "ordered by key" if self.ordered_by_key else "in no order by key",
                "each record has a position of its own" if self.numbered else "records may share a position",
            )
        )
