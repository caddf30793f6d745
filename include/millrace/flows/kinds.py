"""The description of a kind of source or sink. Imports nothing heavy.

A kind is a folder: a module with its declaration and its KIND, the code that KIND names, and its page in docs/. KIND
names the code as ``module:function``, and the registry imports it when a flow runs: a module with a KIND is imported
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
    """Its declaration, with a field `kind` that is the name alone, and the fields of
    :class:`millrace.flows.sinks.models.DocumentSink`."""
    make: str
    """``module:function``, from (declared, settings, *, flow, flush) to a millrace.flows.sinks.sink.Sink."""
    guarantee: str
    """What becomes of a document that is written twice: a guarantee (millrace.flows.guarantee), and how, after a colon.

    An exactly-once sink stores each lane's position."""
    of: Callable[[Any], str] | None = None
    """Returns the same for a declaration, if it depends on that."""
    unnumbered: str = ""
    """The same of an exactly-once sink, for a source whose records share positions. Empty: at least once."""
    ticks: str = ""
    """``module:function``, from (declared, settings, topics) to a millrace.flows.sinks.sink.Ticks, if the sink has a
    time at which all that it acknowledged is read."""
    truncates: bool = False
    """Whether it removes all of its rows for a truncation (:func:`millrace.flows.records.is_truncation`), which is the
    first record of its batch."""
    package: str = "millrace"
    """The distribution that it comes from."""


@dataclass(frozen=True, slots=True)
class SourceKind:
    """A kind of source."""

    name: str
    """Its ``kind`` in a declaration."""
    model: type[Part]
    """Its declaration, with a field `kind` that is the name alone, and a field `start`, ``earliest`` or ``latest``:
    where a lane begins that has no position yet."""
    source: str
    """``module:function``, from (declared, settings, *, group, standing) to a millrace.flows.sources.source.Source;
    `standing` has the positions that the runner stores, by lane."""
    reader: str
    """``module:function``, from (declared, settings, *, group, topic, partition) to a
    millrace.flows.sources.source.LaneReader."""
    numbered: bool = True
    """Whether each record has a position of its own. If not, ids by position and appends to a table are refused."""
    ordered_by_key: bool = True
    """Whether all records of a key are in one lane, in order, so that positions are versions."""
    repeatable: bool = True
    """Whether a range can be read again. If not, what a crash interrupts is lost: at most once."""
    tables: bool = False
    """Whether records are rows of tables, whose columns and key come with them (`Batch.columns`)."""
    transactional: bool = False
    """Whether transactions go over several lanes, so that ticks are recorded at which the sink has whole ones
    (`Source.settle`)."""
    feeder: str = ""
    """``module:function``, from (declared, settings, *, group) to what a worker runs beside its tasks: it gathers what
    the lanes then have, and is closed with the worker. One with a feeder runs in a worker of the service."""
    release: str = ""
    """``module:function``, from (declared, settings, *, group), that removes what the flow made at the source and its
    files beside the lanes. Called when the flow is deleted, after its worker has stopped. Idempotent."""
    package: str = "millrace"
    """The distribution that it comes from."""

    @property
    def words(self) -> str:
        """The facts in one sentence for people."""
        return ", ".join(
            (
                "can be read again" if self.repeatable else "is read once",
                "ordered by key" if self.ordered_by_key else "in no order by key",
                "each record has a position of its own" if self.numbered else "records may share a position",
            )
        )
