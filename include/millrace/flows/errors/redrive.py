"""Send the content of the error topic through the flow again, with its present declaration.

A redriven record has its original topic, partition and offset. Its id and version are therefore those of the first
attempt, so that a redrive is idempotent and, with versions, never replaces anything newer. A record that fails again
stays in the topic. The consumer group ``<group>-redrive`` stores the end of the last redrive; a redrive with a
selection moves nothing.

Progress is reported after each batch that the sink has acknowledged. A successor that resumes from the last report
loses nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from confluent_kafka import Consumer, KafkaException, TopicPartition

from millrace.base.errors import ChannelNotFound
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.batch import outside_of_ranges
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.letter import Redriven as Redriven
from millrace.flows.errors.selection import EVERYTHING, Selection, kind_of
from millrace.flows.errors.topic import error_source, is_of, origin_of
from millrace.flows.isolation import write_apart
from millrace.flows.range_host.lookups import CollectionRows
from millrace.flows.range_host.tried import FEARED, tried
from millrace.flows.records import Record
from millrace.flows.registry import sink_of
from millrace.flows.sinks.sink import Verdicts
from millrace.flows.sources.kafka.topics import Reader, Topics, consumer_of, error_of
from millrace.flows.sources.source import task_of
from millrace.flows.transform.transform import Transform

_ITEMS: Final = 5_000
_MOST_BYTES: Final = 256 << 20
"""The most bytes of values held at once."""
_BYTES: Final = 16 << 20
_REMEMBERED: Final = 200_000
"""Origins that are remembered to recognise repeated records. Redriving one twice has no further effect."""


@dataclass(slots=True)
class FoundLetters:
    """The letters of a topic that a redrive processes at once."""

    records: list[Record]
    """The failed records, by position."""
    counts: dict[str, int]
    begins: dict[str, int]
    places: dict[str, int]
    """Where the next redrive begins, by partition."""


def read_letters(
    flow: Flow, selection: Selection, *, again: bool = False, most: int, ends: Mapping[str, int] | None = None
) -> FoundLetters:
    """Return about `most` letters of a flow's error topic that `selection` takes; none if the topic does not exist.

    With `ends`, return only letters before these offsets. Raises LogUnavailable.
    """
    source, group = error_source(flow), f"{flow.consumer_group}-redrive"
    topics = Topics(source, group)
    found, seen = (
        FoundLetters([], dict.fromkeys(Redriven._fields, 0), {}, {}),
        OrderedDict[tuple[str, int, int, bytes | None], None](),
    )
    size = 0
    try:
        try:
            progress = _begin(topics, selection, again=again)
        except ChannelNotFound:
            return found
        for topic, partition in topics.partitions():
            task = task_of(topic, partition)
            if task not in progress.places:
                continue
            place, end = progress.places[task], (progress.ends if ends is None else ends).get(task, 0)
            found.begins[task] = place
            reader = Reader(source, group, topic, partition)
            try:
                while place < end and len(found.records) < most and size < _MOST_BYTES:
                    records, place = reader.read(place, end, items=_ITEMS, size=_BYTES, seconds=1.0)
                    chosen, feared = _selected(records, flow.name, selection, found.counts, seen)
                    size += sum(len(each.value or b"") for each in records)
                    found.records += [*chosen, *feared]
            finally:
                reader.close()
            found.places[task] = place
    finally:
        topics.close()
    found.records = _by_place(found.records)
    return found


def settle(flow: Flow, places: Mapping[str, int]) -> None:
    """Let the next redrive begin at `places`. Raises LogUnavailable, InvalidSettings."""
    source, group = error_source(flow), f"{flow.consumer_group}-redrive"
    for task, place in places.items():
        topic, _, partition = task.rpartition("-")
        _keep(consumer_of(source, group), TopicPartition(topic, int(partition), place))


@dataclass(slots=True)
class Progress:
    """A redrive's progress, by partition of the error topic: everything before `places` is done; it ends at `ends`."""

    begins: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Redriven._fields, 0))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_Origins: TypeAlias = "OrderedDict[tuple[str, int, int, bytes | None], None]"


def _silent(_: Progress) -> bool:
    return False


def redrive(
    settings: Settings,
    flow: Flow,
    selection: Selection = EVERYTHING,
    *,
    again: bool = False,
    dry_run: bool = False,
    behind: Progress | None = None,
    tell: Callable[[Progress], bool] = _silent,
) -> Redriven:
    """Redrive the records that `selection` takes, up to the present end of the topic; with `again`, from its beginning.

    Calls `tell` with the progress after each batch, and stops if it returns true. `behind` is the last progress of a
    redrive that did not finish. Raises LogUnavailable, ChannelNotFound, SinkBusy, SinkRefused; reported progress then
    stays valid, and the rest can be repeated.
    """
    if flow.errors.collection is not None:
        return _collected(settings, flow, selection, dry_run=dry_run, tell=tell)
    source = error_source(flow)
    group = f"{flow.consumer_group}-redrive"
    topics = Topics(source, group)
    open_rows = partial(CollectionRows, settings)
    transform = Transform(flow, open_rows=open_rows)
    sink = sink_of(flow.sink, settings, flow=flow.name, flush=flow.flush)
    seen: _Origins = OrderedDict()
    try:
        if not dry_run:
            sink.open()
        try:
            progress = behind if behind is not None and behind.ends else _begin(topics, selection, again=again)
        except ChannelNotFound:
            if dry_run:
                return Redriven()  # no record has failed yet, so the topic does not exist
            raise
        stopped = tell(progress)
        counts = progress.counts = {**dict.fromkeys(Redriven._fields, 0), **progress.counts}
        for topic, partition in topics.partitions():
            task = task_of(topic, partition)
            end = progress.ends.get(task)
            if stopped or end is None or progress.begins[task] >= end:
                continue
            reader = Reader(source, group, topic, partition)
            try:
                while progress.places[task] < end and not stopped:
                    records, place = reader.read(progress.places[task], end, items=_ITEMS, size=_BYTES, seconds=1.0)
                    chosen, feared = _selected(records, flow.name, selection, counts, seen)
                    if feared and not dry_run:
                        left, failures = tried(flow, feared, open_rows)
                        counts["failed_again"] += len(failures)
                        chosen = _by_place([*chosen, *left])
                    if chosen and not dry_run:
                        made = transform.run(chosen)
                        written = Verdicts()
                        for batch in outside_of_ranges(made.actions):
                            written.add(write_apart(sink.write, batch, flow.errors))
                        counts["written"] += written.acknowledged - written.stale
                        counts["stale"] += written.stale
                        counts["filtered"] += made.filtered
                        counts["failed_again"] += len(made.failures) + len(written.failures)
                    hit("redrive.written")
                    progress.places[task] = place
                    stopped = tell(progress)
            finally:
                reader.close()
            # Also for a partition that an earlier attempt finished: it may have died between its last report and this.
            if selection.whole and not dry_run and progress.places[task] >= end:
                hit("redrive.done")
                _keep(consumer_of(source, group), TopicPartition(topic, partition, end))
    finally:
        sink.close()
        topics.close()
    return Redriven(**progress.counts)


def _collected(
    settings: Settings, flow: Flow, selection: Selection, *, dry_run: bool, tell: Callable[[Progress], bool]
) -> Redriven:
    """Redrive a collection of dead letters. It needs no positions, since successful letters are deleted."""
    from millrace.flows.errors.collection import redrive_collected

    place = str(flow.errors.collection)

    def report_counts(counts: Mapping[str, int]) -> bool:
        here = {place: counts["looked_at"]}
        return tell(Progress({place: 0}, dict(here), dict(here), dict(counts)))

    return redrive_collected(settings, flow, selection, dry_run=dry_run, tell=report_counts)


def _begin(topics: Topics, selection: Selection, *, again: bool) -> Progress:
    progress = Progress()
    ends, begins = topics.ends(), topics.committed() if selection.whole and not again else {}
    for topic, partition in topics.partitions():
        task = task_of(topic, partition)
        bounds = selection.bounds(partition)
        if bounds is not None:
            progress.begins[task] = progress.places[task] = max(begins.get(task, 0), ends[task].low, bounds[0])
            progress.ends[task] = min(ends[task].high, bounds[1])
    return progress


def _selected(
    records: list[Record], flow: str, selection: Selection, counts: dict[str, int], seen: _Origins
) -> tuple[list[Record], list[Record]]:
    """Return the records to redrive, by position, and separately those that were too much work for a worker."""
    chosen: list[Record] = []
    feared: list[Record] = []
    for record in records:
        if not is_of(record, flow):
            counts["others"] += 1
            continue
        counts["looked_at"] += 1
        origin = origin_of(record)
        if origin is None:
            counts["no_origin"] += 1
            continue
        if not selection.takes(record):
            continue
        counts["selected"] += 1
        place = (origin.topic, origin.partition, origin.offset, origin.key)
        if place in seen:
            counts["repeated"] += 1
            continue
        seen[place] = None
        if len(seen) > _REMEMBERED:
            seen.popitem(last=False)
        (feared if kind_of(record) in FEARED else chosen).append(origin)
    return _by_place(chosen), feared


def _by_place(records: list[Record]) -> list[Record]:
    """Sort records by position, so that older records of a key come first."""
    return sorted(records, key=lambda each: (each.topic, each.partition, each.offset))


def _keep(consumer: Consumer, place: TopicPartition) -> None:
    """Commit `place` for the group. Raises LogUnavailable, InvalidSettings; the last report then stays valid."""
    try:
        consumer.commit(offsets=[place], asynchronous=False)
    except KafkaException as error:
        raise error_of(error.args[0], "the position of the redrive") from None
    finally:
        consumer.close()
