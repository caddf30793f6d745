"""The unit that moves through a flow: a batch is a range of one lane, with a payload and its positions.

A *lane* is a totally ordered sequence of batches, by name: a topic's partition (``topic-partition``), a VChannel, a key
shard, or a whole Spark query. Positions are int64 and ordered within a lane; positions of two lanes cannot be compared.
A Spark query's position is the number of its micro-batch. Do not rely on range boundaries: after a rebalance or a
restart the same positions are divided into other ranges.

A batch has one payload:

- `records`: as a source read them, undecoded. Each has its own key, headers and time.
- `documents`: the sink's action for each record, as JSON bytes. They are not Arrow columns: with columns for ids, bytes
  and versions between the transform and the bulk, a document took 12.8 µs of CPU instead of 9.5.
- `rows`: Arrow batches. Operation, key, position and time are columns, those of a collection's changes
  (``_change``, ``_vchannel``, ``_time_tick``, ``_write_tick``), each of which may be absent.

Only millrace.flows.conversion converts between documents and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import pyarrow as pa

from millrace.flows.plain import PlainActions
from millrace.flows.records import Action, Failure, Record, is_truncation


class TableColumns(NamedTuple):
    """The columns of a table that a source reads, with a collection's types."""

    types: Mapping[str, str]
    """Types of fields by name; ``int64?`` may be null."""
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The range [start, end) of a lane."""

    lane: str
    start: int
    """The position before the batch. Everything before it is in earlier batches."""
    end: int
    """The position after the batch. Equal to `start` if the batch moves no position: a part of a range, a redrive."""
    records: Sequence[Record] | None = None
    documents: Sequence[Action] | None = None
    rows: Iterable[pa.RecordBatch] | None = None
    """Arrow batches, which may be read once and lazily. The first may have no rows; it defines the columns."""
    numbers: Sequence[int] | None = None
    """For a redrive, the rows' numbers in their original batch; None: 0, 1, 2, ..."""
    generation: int = 0
    """How often the lane's position was set by hand. A position that a sink stored in an earlier generation does not
    apply to this one."""
    columns: TableColumns | None = None
    """The columns of the records' table; None if unknown."""
    recorded: int | None = None
    """The position that the runner has recorded, if it is before `start` because the batch is a part of a range.
    Records from there on may be repeated."""
    aside: Sequence[Failure] = ()
    """Records of the range, before the batch, that are dead letters. An exactly-once sink stores them with the
    position, and returns them as failures if they are repeated."""
    atomic: bool = False
    """Whether the batch ends with a transaction of the source. A sink that supports this shows readers all of it or
    nothing, within its own unit of atomicity."""
    frame: Callable[[], Any] | None = None
    """Returns the same rows as a Spark DataFrame; None if the host is not Spark."""

    @classmethod
    def of_rows(cls, lane: str, number: int, rows: Iterable[pa.RecordBatch]) -> Self:
        """Return `rows` as the micro-batch `number` of a query."""
        return cls(lane, number, number + 1, rows=rows)

    @property
    def since(self) -> int:
        """The position from which on records may be repeated."""
        return self.start if self.recorded is None else self.recorded

    def table(self) -> pa.Table:
        """Return `rows` as one table, which is empty for a batch without columns."""
        found = list(self.rows or ())
        return pa.Table.from_batches(found) if found else pa.table({})


def parts_at_truncations(batch: Batch) -> Iterator[Batch]:
    """Yield `batch` in consecutive parts, so that each truncation is the first document of a part, as sinks require.

    A batch without documents, or that moves no position, is one part.
    """
    documents = batch.documents
    places = (
        []
        if documents is None or batch.end == batch.start or isinstance(documents, PlainActions)
        else [place for place, each in enumerate(documents) if place and is_truncation(each.record)]
    )
    if documents is None or not places:
        yield batch
        return
    start = batch.start
    for first, last in zip([0, *places], [*places, len(documents)], strict=True):
        end = batch.end if last == len(documents) else documents[last].record.offset
        yield replace(batch, start=start, end=end, documents=documents[first:last], recorded=batch.since)
        start = end


def outside_of_ranges(documents: Iterable[Action]) -> list[Batch]:
    """Return documents that a redrive sends again outside of their ranges, as one batch for each lane of their records.

    The batches move no position.
    """
    lanes: dict[tuple[str, int], list[Action]] = {}
    for each in documents:
        lanes.setdefault((each.record.topic, each.record.partition), []).append(each)
    return [
        Batch(f"{topic}-{partition}", found[0].record.offset, found[0].record.offset, documents=found)
        for (topic, partition), found in lanes.items()
    ]
