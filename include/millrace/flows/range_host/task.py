"""One task: long-poll a partition's records, process them as JSON, and write them to the sink or the error topic.

The names are reference document 004's: Run, Stop, Execute, longPolling, processJSON.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from millrace.base.errors import LogRegressed, MillraceError
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.batch import Batch, parts_at_truncations
from millrace.flows.declare.pipeline import Pipeline
from millrace.flows.errors.place import ErrorPlace, errors_of
from millrace.flows.range_host.in_hand import InHand
from millrace.flows.range_host.positions import Position
from millrace.flows.range_host.tried import tried
from millrace.flows.records import Failure, Record
from millrace.flows.registry import reader_of, sink_of
from millrace.flows.samples.trying import COMPILED
from millrace.flows.sinks.sink import Sink, Verdicts
from millrace.flows.sources.source import Limits, task_of
from millrace.flows.transform.operators import Open
from millrace.flows.transform.transform import Transform, Transformed
from millrace.node.range_loop.failure import RangeFailure as RangeFailure

BULKS: Final = 4
"""Flush limits' worth of records in one range at most, so that all lanes of a sink have work."""
_LATENCIES: Final = 200


@dataclass(frozen=True, slots=True)
class Work:
    """The plan of a range: records [start, end) of a partition, or as many as one range takes."""

    topic: str
    partition: int
    start: int
    end: int
    base: Position | None
    """The task's row that this was planned from."""
    max_bytes: int
    life: int = 0
    """Which restart of all tasks it is planned after (Wanted.whole)."""
    topic_id: str = ""
    """Of the topic that there is now; empty: not known."""
    share: int = 1
    """The task takes one part in `share` of a range: ever smaller parts after failures, so that the rest gets done."""

    @property
    def channel(self) -> str:
        return task_of(self.topic, self.partition)

    @property
    def bytes(self) -> int:
        return self.max_bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The report of a range: all before `position` is acknowledged; nothing of it is, where `failure` says why."""

    channel: str
    base: Position | None
    position: int
    end: int
    records_in: int = 0
    records_out: int = 0
    records_error: int = 0
    records_filtered: int = 0
    records_stale: int = 0
    """Documents that the sink holds a newer version of: they are in no other count but `records_in`."""
    bulks: int = 0
    retries: int = 0
    log_bytes: int = 0
    cpu_seconds: float = 0.0
    """Of the task's own thread and of its bulks'."""
    latencies: tuple[float, ...] = ()
    """Seconds from record to acknowledged, evenly picked."""
    topic_id: str = ""
    """Of the topic that was read."""
    failure: RangeFailure | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tick(self) -> int:
        return self.position

    @property
    def rows(self) -> int:
        return self.records_in

    def progress(self) -> dict[str, Any]:
        return {
            "tick": self.position,
            "rows": self.records_in,
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
        }


class Task:
    """What a range needs, opened once and used by range after range; one thread at a time."""

    def __init__(self, settings: Settings, pipeline: Pipeline, topic: str, partition: int, *, open_rows: Open) -> None:
        source = pipeline.source
        self._open_rows = open_rows
        self._pipeline = pipeline
        self._name = task_of(topic, partition)
        self._transform = Transform(pipeline, open_rows=open_rows)
        self._reader = reader_of(source, settings, group=pipeline.group, topic=topic, partition=partition)
        may_last = any(step.kind in COMPILED for step in pipeline.steps)
        self._hand = InHand(settings, pipeline.id, self._name) if may_last else None
        self._sink: Sink = sink_of(pipeline.sink, settings, flow=pipeline.id, flush=pipeline.flush)
        self._opened = False
        self._errors: ErrorPlace | None = None
        self._settings = settings

    def run(self, work: Work) -> Done:
        """One range. Raises what kept it from its end: nothing is reported then, and all of it may be done again."""
        known = "" if work.base is None else work.base.topic_id
        if known and work.topic_id and known != work.topic_id:
            raise LogRegressed(
                f"{work.channel}: the topic was created again since offset {work.start}"
                f" (its id was {known}, now {work.topic_id}):"
                " set the offset, and give it a new index where its versions are offsets"
            )
        begun = time.thread_time()
        total = Done(work.channel, work.base, work.start, work.end, topic_id=work.topic_id)
        for batch in self.long_polling(work):
            total = self._take(total, batch)
        return replace(total, cpu_seconds=total.cpu_seconds + time.thread_time() - begun)

    def _take(self, total: Done, read: Batch) -> Done:
        """One more part of a range; when this returns, it is acknowledged."""
        records, position = read.records or (), read.end
        begun = time.monotonic()
        transformed = self.process_json(records)
        processed = time.monotonic()
        generation = 0 if total.base is None else total.base.generation
        batch = Batch(
            self._name,
            total.position,
            position,
            documents=transformed.actions,
            generation=generation,
            columns=read.columns,
        )
        written = self.execute(batch)
        hit("pipeline.written")
        failures = [*transformed.failures, *(each.as_received() for each in written.failures)]
        if failures:
            self.fail(failures)
        hit("pipeline.failures")
        now = time.time()
        step = max(1, len(records) // _LATENCIES)
        latencies = tuple(now - record.timestamp / 1000 for record in records[::step] if record.timestamp > 0)
        return replace(
            total,
            position=position,
            records_in=total.records_in + len(records),
            records_out=total.records_out + written.acknowledged - written.stale,
            records_stale=total.records_stale + written.stale,
            records_error=total.records_error + len(failures),
            records_filtered=total.records_filtered + transformed.filtered,
            bulks=total.bulks + written.bulks,
            retries=total.retries + written.retries,
            cpu_seconds=total.cpu_seconds + written.cpu_seconds,
            log_bytes=total.log_bytes + sum(len(record.value or b"") for record in records),
            latencies=(*total.latencies, *latencies)[-_LATENCIES:],
            seconds={
                "transform": total.seconds.get("transform", 0.0) + processed - begun,
                "sink": total.seconds.get("sink", 0.0) + time.monotonic() - processed,
            },
        )

    def long_polling(self, work: Work) -> Iterator[Batch]:
        """Yield the range's records in parts: one for a topic, several for a collection."""
        flush = self._pipeline.flush
        size = min(work.max_bytes, BULKS * int(flush.mib * (1 << 20)))
        limits = Limits(max(1, BULKS * flush.items // work.share), max(1, size // work.share), flush.seconds)
        yield from self._reader.batches(work.start, work.end, limits)

    def process_json(self, records: Sequence[Record]) -> Transformed:
        """Each record's outcome by the steps; of one at which a worker ended, by a process apart."""
        hand = self._hand
        if hand is None:
            return self._transform.run(records)
        suspects = [each for each in records if each.offset == hand.suspect]
        failures = tried(self._pipeline, suspects, self._open_rows)[1] if suspects else []
        failed = {id(each.record) for each in failures}
        left = [each for each in records if id(each) not in failed] if failed else records
        done = self._transform.run(left, hand)
        done.failures += failures
        return done

    def execute(self, batch: Batch) -> Verdicts:
        """Write `batch` into the sink; all of its documents are acknowledged or failures when this returns."""
        if not self._opened:
            self._sink.open()
            self._opened = True
        verdicts: Verdicts | None = None
        for part in parts_at_truncations(batch):
            written = self._sink.write(part)
            if verdicts is None:
                verdicts = written
            else:
                verdicts.add(written)
        assert verdicts is not None, "a batch has at least one part"
        return verdicts

    def fail(self, failures: Sequence[Failure]) -> None:
        """Into the error topic or the collection of dead letters, acknowledged."""
        if self._errors is None:
            self._errors = errors_of(self._settings, self._pipeline)
        self._errors.put(failures, task=self._name)

    def stop(self) -> None:
        """Let go of everything. Idempotent."""
        for each in (self._reader, self._sink, self._errors, self._hand):
            if each is not None:
                with suppress(MillraceError, OSError, RuntimeError):
                    each.close()
