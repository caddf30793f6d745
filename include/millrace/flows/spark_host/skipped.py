"""Records to be put aside by a flow on Spark, named by its declaration (`errors.skip`) or by a command.

- A record of a topic, by its partition and offset (``flights-0`` and 17), is put aside before it is decoded.
- A row, by its micro-batch and its number there (lane ``stream-NAME``), is put aside before the sink gets it.

    skip.json    next to the checkpoints: those named by commands, until the flow has passed them
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.flows.declare.errors import MAX_SKIPPED
from millrace.flows.declare.flow import Flow, has_letters
from millrace.flows.sinks.function.model import FunctionSink
from millrace.flows.sinks.memory import Folder, change_note, read_note
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.spark_host.incarnations import Incarnations, newest_batch, position
from millrace.flows.spark_host.status import progress_name

FILE: Final = "skip.json"


@dataclass(slots=True)
class Skipped:
    """Named records."""

    records: dict[str, set[int]] = field(default_factory=dict)
    """Positions, by lane of the source."""
    rows: dict[str, dict[int, set[int]]] = field(default_factory=dict)
    """Numbers of rows, by lane of a sink and micro-batch."""

    def add(self, lane: str, position: int, row: int | None) -> None:
        if row is None:
            self.records.setdefault(lane, set()).add(position)
        else:
            self.rows.setdefault(lane, {}).setdefault(position, set()).add(row)

    def __len__(self) -> int:
        rows = sum(len(numbers) for batches in self.rows.values() for numbers in batches.values())
        return rows + sum(map(len, self.records.values()))

    def to_json(self) -> dict[str, Any]:
        rows = {lane: {str(each): sorted(numbers) for each, numbers in of.items()} for lane, of in self.rows.items()}
        return {"records": {lane: sorted(each) for lane, each in self.records.items()}, "rows": rows}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Skipped:
        rows = {
            lane: {int(batch): set(numbers) for batch, numbers in of.items()}
            for lane, of in value.get("rows", {}).items()
        }
        return cls({lane: set(each) for lane, each in value.get("records", {}).items()}, rows)


def read_skipped(folder: Folder) -> Skipped:
    """Return the records that commands named, for the stream with this folder."""
    found = read_note(folder, FILE)
    return Skipped() if found is None else Skipped.from_json(found)


def skipped_rows(settings: Settings, stream: Flow, lane: str, batch: int) -> frozenset[int]:
    """Return the numbers of a micro-batch's rows that the sink with this lane must not get."""
    found = set(read_skipped(Incarnations(settings, stream.name).folder).rows.get(lane, {}).get(batch, ()))
    declared = (each for each in stream.errors.skip if each.lane == lane and each.position == batch)
    return frozenset(found | {each.row for each in declared if each.row is not None})


def declared_records(stream: Flow) -> dict[str, list[int]]:
    """Return the positions that the declaration names, by lane of the source."""
    found = Skipped()
    for each in stream.errors.skip:
        if each.row is None:
            found.add(each.lane, each.position, None)
    return {lane: sorted(positions) for lane, positions in found.records.items()}


def skip_record(settings: Settings, stream: Flow, lane: str, at: int, row: int | None = None) -> None:
    """Put a record of a topic, or the `row` of the micro-batch `at`, aside when the stream reaches it.

    Raises InvalidArgument if the stream has no such lane, has passed the position, or has no place for the letter, or
    if MAX_SKIPPED records wait to be skipped.
    """
    incarnations = Incarnations(settings, stream.name)
    checkpoint = incarnations.checkpoint(incarnations.state)
    standing, newest = position(checkpoint) or {}, newest_batch(checkpoint)
    if row is not None:
        _require_row(stream, lane)
        if at <= newest:
            raise InvalidArgument(
                f"{stream.name!r} has passed the micro-batch {at}: the last completed one is {newest}"
            )
    else:
        if not isinstance(stream.source, KafkaSource):
            raise InvalidArgument(
                f"{stream.name!r} reads a collection: name the row that its sink gets, by --row, its micro-batch and"
                f" the lane {progress_name(stream.name)}"
            )
        if stream.source.dead_letters is None and not stream.errors_in_topic:
            raise InvalidArgument(f"{stream.name!r} has no place for the letter: declare errors.collection")
        if standing and lane not in standing:
            lanes = ", ".join(sorted(standing)[:10])
            raise InvalidArgument(f"{stream.name!r} has no lane {lane[:200]!r}: it has {lanes}")
        if at < standing.get(lane, 0):
            raise InvalidArgument(f"{stream.name!r} has passed {at} of {lane}: it is at {standing[lane]}")

    def added(found: dict[str, Any] | None) -> dict[str, Any]:
        waiting = _waiting(Skipped.from_json(found or {"records": {}}), standing, newest)
        waiting.add(lane, at, row)
        if len(waiting) > MAX_SKIPPED:
            raise InvalidArgument(
                f"{MAX_SKIPPED} records of {stream.name!r} wait to be skipped: set the position instead"
            )
        return waiting.to_json()

    change_note(incarnations.folder, FILE, added)


def _require_row(stream: Flow, lane: str) -> None:
    sinks = {progress_name(stream.name): stream.row_sink}
    if stream.late is not None:
        sinks[f"{progress_name(stream.name)}/late"] = stream.late
    if lane not in sinks:
        raise InvalidArgument(f"{stream.name!r} has no lane {lane[:200]!r} of rows: it has {', '.join(sinks)}")
    if isinstance(sinks[lane], FunctionSink):
        raise InvalidArgument(
            f"{stream.name!r} passes a whole DataFrame to a function: leave out the row in the function"
        )
    if not has_letters(stream, sinks[lane]):
        raise InvalidArgument(f"{stream.name!r} has no place for the letter: declare errors.collection")


def _waiting(known: Skipped, standing: dict[str, int], newest: int) -> Skipped:
    """Return those of `known` that the stream has not passed."""
    found = Skipped()
    for lane, positions in known.records.items():
        for each in positions:
            if each >= standing.get(lane, 0):
                found.add(lane, each, None)
    for lane, batches in known.rows.items():
        for batch, numbers in batches.items():
            for row in numbers if batch > newest else ():
                found.add(lane, batch, row)
    return found
