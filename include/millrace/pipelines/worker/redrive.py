"""What lies in the error topic, through the pipeline again, as it is declared now.

A redriven record has the topic, partition and offset that it came from: its id and version are what they would have been, so that
doing it twice is the same as once, and nothing newer is replaced where versions are on. What fails again stays where it is, in the topic.
Where the last redrive ended is kept by a consumer group of its own, ``<group>-redrive``; one of a selection moves nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from millrace.base.settings import Settings
from millrace.pipelines.model.pipeline import Pipeline
from millrace.pipelines.model.sources import KafkaSource
from millrace.pipelines.records import Record
from millrace.pipelines.sinks.sink import sink_of
from millrace.pipelines.transform.transform import Transform
from millrace.pipelines.worker.error_topic import PREFIX, origin_of
from millrace.pipelines.worker.lookups import CollectionRows
from millrace.pipelines.worker.topics import Reader, Topics, consumer_of, task_of

_ITEMS: Final = 5_000
_BYTES: Final = 16 << 20


class Redriven(NamedTuple):
    """What became of what was in the error topic."""

    looked_at: int = 0
    selected: int = 0
    repeated: int = 0
    """Of those, the same origin came again."""
    written: int = 0
    filtered: int = 0
    failed_again: int = 0
    no_origin: int = 0
    """Not of this pipeline's worker: headers that say no place."""


def redrive(
    settings: Settings,
    pipeline: Pipeline,
    *,
    step: str = "",
    kind: str = "",
    again: bool = False,
    dry_run: bool = False,
) -> Redriven:
    """Redrive up to where the topic ends now; a selection by step and kind of failure. `again`: from the beginning.

    Raises LogUnavailable, ChannelNotFound, SinkBusy, SinkRefused: what was done by then stands, and is done again without harm.
    """
    cluster = pipeline.errors_cluster
    source = KafkaSource(
        bootstrap=cluster.bootstrap,
        security=cluster.security,
        socket_timeout_ms=cluster.socket_timeout_ms,
        topics=(pipeline.errors_topic,),
        isolation="read_uncommitted",
    )
    group = f"{pipeline.group}-redrive"
    topics = Topics(source, group)
    transform = Transform(pipeline, open_rows=lambda lookup: CollectionRows(settings, lookup))
    sink = sink_of(pipeline, settings)
    counts = dict.fromkeys(Redriven._fields, 0)
    seen: set[tuple[str, int, int, bytes | None]] = set()
    try:
        if not dry_run:
            sink.open()
        ends, begins = topics.ends(), {} if again or step or kind else topics.committed()
        for topic, partition in topics.partitions():
            task = task_of(topic, partition)
            place = max(begins.get(task, 0), ends[task].low)
            reader = Reader(source, group, topic, partition)
            try:
                while place < ends[task].high:
                    records, place = reader.read(place, ends[task].high, items=_ITEMS, size=_BYTES, seconds=1.0)
                    chosen = _chosen(records, step, kind, counts, seen)
                    if dry_run or not chosen:
                        continue
                    made = transform.run(chosen)
                    written = sink.write(made.actions)
                    counts["written"] += written.acknowledged
                    counts["filtered"] += made.filtered
                    counts["failed_again"] += len(made.failures) + len(written.failures)
            finally:
                reader.close()
            if not (dry_run or step or kind):
                _keep(consumer_of(source, group), TopicPartition(topic, partition, ends[task].high))
    finally:
        sink.close()
        topics.close()
    return Redriven(**counts)


def _chosen(
    records: list[Record], step: str, kind: str, counts: dict[str, int], seen: set[tuple[str, int, int, bytes | None]]
) -> list[Record]:
    chosen = []
    for record in records:
        counts["looked_at"] += 1
        origin = origin_of(record)
        if origin is None:
            counts["no_origin"] += 1
            continue
        told = dict(record.headers)
        if (step and told.get(f"{PREFIX}class.name") != step.encode()) or (
            kind and told.get(f"{PREFIX}exception.class.name") != kind.encode()
        ):
            continue
        counts["selected"] += 1
        place = (origin.topic, origin.partition, origin.offset, origin.key)
        if place in seen:
            counts["repeated"] += 1
            continue
        seen.add(place)
        chosen.append(origin)
    # By place: of one key the older first, as they came.
    return sorted(chosen, key=lambda each: (each.topic, each.partition, each.offset))


def _keep(consumer: Consumer, place: TopicPartition) -> None:
    try:
        consumer.commit(offsets=[place], asynchronous=False)
    finally:
        consumer.close()
