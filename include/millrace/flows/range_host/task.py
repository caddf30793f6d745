"""One task: long-poll a partition's records, process them as JSON, and write them to the sink or the error topic.

The names are reference document 004's: Run, Stop, Execute, longPolling, processJSON.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from millrace.base.errors import LogRegressed, MillraceError, SinkRefused
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.batch import Batch, parts_at_truncations
from millrace.flows.declare.errors import SKIPPED, SKIPPED_WORDS
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.place import ErrorPlace, errors_of
from millrace.flows.isolation import Attempts, Isolation
from millrace.flows.plain import value_bytes
from millrace.flows.range_host.crashes import RangeWatch
from millrace.flows.range_host.in_hand import InHand
from millrace.flows.range_host.positions import Position
from millrace.flows.range_host.tried import CRASHED, SKIP, tried
from millrace.flows.records import TRANSFORMATION, Failure, Record
from millrace.flows.registry import reader_of, sink_of, source_kinds
from millrace.flows.samples.trying import COMPILED
from millrace.flows.sinks.sink import Sink, Verdicts
from millrace.flows.sources.source import Limits, task_of
from millrace.flows.transform.operators import Open
from millrace.flows.transform.transform import Transform, Transformed
from millrace.node.range_loop.failure import RangeFailure as RangeFailure

BULKS: Final = 4
"""The most bulks (by the flush limits) in one range, so that all lanes of a sink have work."""
TRANSACTION_BYTES: Final = 32 << 20
"""The largest transaction of a source that is one range although it exceeds a batch."""
_LATENCIES: Final = 200

_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """The plan of a range: records [start, end) of a partition, or as many of them as one range takes."""

    topic: str
    partition: int
    start: int
    end: int
    base: Position | None
    """The task's row that this was planned from."""
    max_bytes: int
    life: int = 0
    """The serial of the last restart of all tasks before the plan (Wanted.whole)."""
    topic_id: str = ""
    """The id of the topic that exists now; empty if unknown."""
    share: int = 1
    """The task takes 1/`share` of a range: smaller parts after failures, so that the other records make progress."""
    skip: frozenset[int] = frozenset()
    """Positions of records that are put aside without being transformed or written."""

    @property
    def channel(self) -> str:
        return task_of(self.topic, self.partition)

    @property
    def bytes(self) -> int:
        return self.max_bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The report of a range: all before `position` is acknowledged. With `failure`, nothing of the range is."""

    channel: str
    base: Position | None
    position: int
    end: int
    records_in: int = 0
    records_out: int = 0
    records_error: int = 0
    records_filtered: int = 0
    records_stale: int = 0
    """Documents of which the sink has a newer version. Otherwise counted only in `records_in`."""
    bulks: int = 0
    retries: int = 0
    log_bytes: int = 0
    cpu_seconds: float = 0.0
    """CPU seconds of the task's own thread and of its bulks'."""
    latencies: tuple[float, ...] = ()
    """Seconds from a record's timestamp to its acknowledgement, an even sample."""
    topic_id: str = ""
    """The id of the topic that was read."""
    in_a_row: int = 0
    """Records that the sink refused since it last accepted one."""
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
    """The open resources of a task, used for range after range. One thread at a time."""

    def __init__(
        self,
        settings: Settings,
        flow: Flow,
        topic: str,
        partition: int,
        *,
        open_rows: Open,
        attempts: Attempts | None = None,
    ) -> None:
        """`attempts` holds the findings of earlier attempts of the lane in this process."""
        source = flow.source
        self._open_rows = open_rows
        self._flow = flow
        self._name = task_of(topic, partition)
        self._transform = Transform(flow, open_rows=open_rows)
        self._reader = reader_of(source, settings, group=flow.consumer_group, topic=topic, partition=partition)
        may_last = any(step.kind in COMPILED for step in flow.transform.steps)
        self._hand = InHand(settings, flow.name, self._name) if may_last else None
        self._sink: Sink = sink_of(flow.sink, settings, flow=flow.name, flush=flow.flush)
        self._opened = False
        self._errors: ErrorPlace | None = None
        self._settings = settings
        self._numbered = source_kinds()[source.kind].numbered
        self._attempts = Attempts() if attempts is None else attempts
        self._isolation = Isolation(self.execute, flow.errors, numbered=self._numbered, lane=self._name)
        self._watch = RangeWatch(settings, flow.name, self._name)
        self.broken = False
        """Whether a range ended early because of the sink, so that the task must be reopened."""

    def run(self, work: Work) -> Done:
        """Process one range. Raises the error that prevents its end; the whole range may then be repeated."""
        known = "" if work.base is None else work.base.topic_id
        if known and work.topic_id and known != work.topic_id:
            raise LogRegressed(
                f"{work.channel}: the topic was created again since offset {work.start}"
                f" (its id was {known}, now {work.topic_id}):"
                " set the offset, and use a new index if its versions are offsets"
            )
        begun = time.thread_time()
        base = work.base
        in_a_row, generation = (0, 0) if base is None else (base.in_a_row, base.generation)
        self._attempts.begin((work.life, generation))
        total = Done(work.channel, base, work.start, work.end, topic_id=work.topic_id, in_a_row=in_a_row)
        try:
            for batch in self.long_polling(work):
                self._watch.enter(total.position, batch.end, len(batch.records or ()))
                total = self._take(total, batch, work.skip)
                if self.broken:
                    break
        finally:
            self._watch.leave()
        self._watch.passed(total.position)
        return replace(total, cpu_seconds=total.cpu_seconds + time.thread_time() - begun)

    def _take(self, total: Done, read: Batch, skip: frozenset[int]) -> Done:
        """Process one more part of a range. On return it is acknowledged up to the position in the result.

        That is before the end of `read` if the sink accepted only some of it.
        """
        records, position = read.records or (), read.end
        begun = time.monotonic()
        condemned = self._condemned(total, records)
        transformed = self.process_json(records, skip if condemned is None else skip | {condemned.record.offset})
        processed = time.monotonic()
        generation = 0 if total.base is None else total.base.generation
        batch = Batch(
            self._name,
            total.position,
            position,
            documents=transformed.actions,
            generation=generation,
            columns=None if self._flow.transform.steps else read.columns,  # steps may change the columns
            atomic=read.atomic,
        )
        outcome = self._isolation.run(batch, self._attempts, in_a_row=total.in_a_row)
        written, failures = outcome.verdicts, transformed.failures
        in_a_row = outcome.in_a_row
        if condemned is not None:
            failures = [condemned if each.record.offset == condemned.record.offset else each for each in failures]
            in_a_row += written.acknowledged == 0
        filtered = transformed.filtered
        if outcome.error is not None:
            if outcome.position == batch.start:
                raise outcome.error
            _logger.warning("%s: accepted only up to %d: %s", self._name, outcome.position, outcome.error)
            self.broken, position = True, outcome.position
            records = [each for each in records if each.offset < position]
            failures = [each for each in failures if each.record.offset < position]
            actions = sum(each.record.offset < position for each in transformed.actions)
            filtered = len(records) - len(failures) - actions
        hit("pipeline.written")
        failures = [*failures, *(each.as_received() for each in written.failures)]
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
            records_filtered=total.records_filtered + filtered,
            in_a_row=in_a_row,
            bulks=total.bulks + written.bulks,
            retries=total.retries + written.retries,
            cpu_seconds=total.cpu_seconds + written.cpu_seconds,
            log_bytes=total.log_bytes + value_bytes(records),
            latencies=(*total.latencies, *latencies)[-_LATENCIES:],
            seconds={
                "transform": total.seconds.get("transform", 0.0) + processed - begun,
                "sink": total.seconds.get("sink", 0.0) + time.monotonic() - processed,
            },
        )

    def long_polling(self, work: Work) -> Iterator[Batch]:
        """Yield the range's records in parts: one for a topic, several for a collection."""
        flush = self._flow.flush
        size = min(work.max_bytes, BULKS * int(flush.mib * (1 << 20)))
        most = BULKS * flush.items // work.share
        least = self._watch.limit(work.start, min(most, self._attempts.records or most))
        self._watch.enter(work.start, work.end, least)
        # Smaller parts after a failure, since the size itself may be the cause.
        whole = TRANSACTION_BYTES if least == BULKS * flush.items else 0
        limits = Limits(max(1, least), max(1, size // work.share), flush.seconds, whole)
        yield from self._reader.batches(work.start, work.end, limits)
        self._attempts.grow(BULKS * flush.items)

    def process_json(self, records: Sequence[Record], skip: frozenset[int] = frozenset()) -> Transformed:
        """Run the steps on `records`; a record at which a worker ended is tried in a separate process first.

        Records at the positions `skip` become failures without running the steps.
        """
        if skip:
            chosen = [each for each in records if each.offset in skip]
            done = self.process_json([each for each in records if each.offset not in skip]) if chosen else None
            if done is not None:
                done.failures += [Failure(each, TRANSFORMATION, SKIP, SKIPPED, SKIPPED_WORDS) for each in chosen]
                return done
        hand = self._hand
        if hand is None:
            return self._transform.run(records)
        records = list(records)  # the sequence may create its items on each pass
        suspects = [each for each in records if each.offset == hand.suspect]
        failures = tried(self._flow, suspects, self._open_rows)[1] if suspects else []
        failed = {id(each.record) for each in failures}
        left = [each for each in records if id(each) not in failed] if failed else records
        done = self._transform.run(left, hand)
        done.failures += failures
        return done

    def _condemned(self, total: Done, records: Sequence[Record]) -> Failure | None:
        """Return the dead letter of the first record if it alone ended too many worker processes, else None."""
        errors = self._flow.errors
        if not records or not self._watch.condemned(records[0].offset, errors.tries):
            return None
        suspect = self._watch.suspect
        assert suspect is not None, "it is condemned"
        words = f"worker processes ended {suspect.alone} times while they processed this record alone"
        if total.in_a_row + 1 >= errors.in_a_row:
            raise SinkRefused(
                f"{words}, as for {total.in_a_row} records before it, with none accepted in between: the worker or its"
                " sink is the cause; see the worker's log"
            )
        return Failure(records[0], TRANSFORMATION, "worker", CRASHED, words, suspect.alone)

    def execute(self, batch: Batch) -> Verdicts:
        """Write `batch` into the sink. On return, all of its documents are acknowledged or failed."""
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
        """Write `failures` to the error topic or the collection of dead letters; returns when acknowledged."""
        if self._errors is None:
            self._errors = errors_of(self._settings, self._flow)
        self._errors.put(failures, task=self._name)

    def stop(self) -> None:
        """Release all resources. Idempotent."""
        for each in (self._reader, self._sink, self._errors, self._hand, self._watch):
            if each is not None:
                with suppress(MillraceError, OSError, RuntimeError):
                    each.close()
