"""A flow as a user of the range loop: channels are partitions; a plan covers what follows the committed position."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final

from millrace.base.errors import InvalidSettings, LogUnavailable, MemoryExceeded, StreamBusy
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings, in_executor_folder, settings_of_executor
from millrace.flows.declare.errors import require_within
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.steps import Lookup
from millrace.flows.errors.place import ensure_errors
from millrace.flows.isolation import Attempts
from millrace.flows.range_host.beat import Beat
from millrace.flows.range_host.documents import DocumentCopies
from millrace.flows.range_host.lookups import CollectionRows
from millrace.flows.range_host.observed import described, note_flow
from millrace.flows.range_host.positions import (
    COUNTS,
    FORGOTTEN,
    Position,
    Positions,
    commit_positions,
    ensure_positions,
    positions_of,
    positions_uri,
    read_positions,
)
from millrace.flows.range_host.skipped import skipped_of
from millrace.flows.range_host.status import State
from millrace.flows.range_host.supervision import Health, Supervision, read_tasks, read_wanted, resting, tasks_path
from millrace.flows.range_host.task import BULKS, Done, Task, Work
from millrace.flows.range_host.topic_admin import require_no_loop
from millrace.flows.registry import feeder_of, sink_of, source_kinds, source_of, ticks_of
from millrace.flows.sinks.sink import Ticks
from millrace.flows.sources.division import LeasedMember, Member, instance_name, members
from millrace.flows.sources.kafka.membership import Membership
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.source import Ends, Feeder, Source, task_of
from millrace.node.ingest.log_connection import require_reachable_log
from millrace.node.range_loop.definition import (
    CommitResult,
    LoopDefinition,
    OwnershipCheck,
    PendingRange,
    Planner,
    always_owned,
)
from millrace.node.range_loop.failure import RangeFailure

_logger: Final = logging.getLogger(__name__)
_SMALLEST_SHARE: Final = 20
"""The smallest share of a range after failures, as a power of two."""
_WAIT_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.05
"""Shortest time between two queries of the brokers."""


@dataclass(frozen=True)
class FlowRun(LoopDefinition[Work, Done]):
    """One flow. Pickling it leaves out the tasks that are open in this process."""

    settings: Settings
    flow: Flow
    worker: int = 0
    """Its number among the workers of this machine."""
    on_spark: bool = False
    """Whether ranges are Spark's tasks. One driver reads all lanes: with a meta store, the one that has its lease."""
    claims: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """If workers divide the partitions: the number of this worker's newest commit, by task that it holds."""
    _members: list[Member] = field(default_factory=list, compare=False, repr=False)
    _tasks: dict[str, tuple[int, Task]] = field(default_factory=dict, compare=False, repr=False)
    _attempts: dict[str, Attempts] = field(default_factory=dict, compare=False, repr=False)
    """By task, the findings of its attempts in this process."""
    _rows: dict[Lookup, CollectionRows] = field(default_factory=dict, compare=False, repr=False)
    _beats: list[Beat] = field(default_factory=list, compare=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"pipeline-{self.flow.name}"

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "flow": self.flow, "worker": self.worker, "on_spark": self.on_spark}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        fresh: dict[str, Any] = dict.fromkeys(("claims", "_tasks", "_attempts", "_rows"))
        fresh = {name: {} for name in fresh} | {"_members": [], "_beats": [], "_lock": threading.Lock()}
        # Notes of the lane in hand must outlive a Python worker, whose next one is another process.
        fresh["settings"] = settings_of_executor(state["settings"])
        for key, value in {**state, **fresh}.items():
            object.__setattr__(self, key, value)

    @property
    def max_bytes(self) -> int:
        return max(1, int(BULKS * self.flow.flush.mib * (1 << 20)))

    @property
    def interval(self) -> float:
        return 0.0

    def places(self) -> Source:
        """Return the flow's source, to ask for its tasks and their ends."""
        return places_of(self.settings, self.flow)

    def feeder(self) -> Feeder | None:
        """Start and return the feeder that gathers the source's records, if it needs one. Raises as `feeder_of`."""
        return feeder_of(self.flow.source, self.settings, group=self.flow.consumer_group)

    def prepare(self) -> None:
        """Create the table of positions and the error topic; store the start of partitions without a position.

        Raises InvalidSettings if Spark's tasks cannot run the flow, and what source, sink and meta store raise.
        """
        source = self.flow.source
        if self.on_spark:
            require_tasks(self.settings, self.flow)
            self._hold()
        reset = source.offset_reset if isinstance(source, KafkaSource) else source.start
        with DocumentCopies(self.settings, self.flow.name) as documents:  # as the last machine left them
            documents.refresh()
        self.settings.check_place()
        sink_of(self.flow.sink, self.settings, flow=self.flow.name, flush=self.flow.flush).close()
        table = ensure_positions(positions_uri(self.settings, self.flow.name))
        note_flow(self.settings, self.flow)
        known = read_positions(table)
        places = self.places()
        try:
            ends, ids = places.ends(), places.ids()
            inherited = places.inherited({task: each.position for task, each in known.items() if not each.forgotten})
        finally:
            places.close()
        require_no_loop(self.flow)
        ensure_errors(self.settings, self.flow)
        new = sorted(task for task in ends if task not in known or known[task].forgotten)
        if new and reset == "error":
            raise InvalidSettings(
                f"{', '.join(new)} have no position, and offset_reset is error: set their offsets first"
            )
        # Commit now: otherwise a record that arrives before the first range ends would be before "latest" and lost.
        begins = []
        followed = {_topic(task) for task, each in known.items() if not each.forgotten}
        for task in new:
            before = known.get(task)
            # A partition that was added after the first read of the topic is read from its beginning.
            start = ends[task].low if reset == "earliest" or _topic(task) in followed else ends[task].high
            start = inherited.get(task, start)
            begins.append(
                (before, replace((before or Position(task, 0)).moved(start), topic_id=ids.get(_topic(task), "")))
            )
        gone = [each for task, each in known.items() if inherited and task not in ends and not each.forgotten]
        if self.on_spark and self._members:
            # The ranges of a driver that was suspended or cut off begin at an older commit, so they are fenced.
            held = [each for each in known.values() if not each.forgotten and each not in gone]
            begins += [(each, each.moved(each.position)) for each in held]
        begins += [(each, replace(each.moved(FORGOTTEN), generation=each.generation + 1)) for each in gone]
        if begins:
            commit_positions(table, begins)
        _logger.info("%s runs from %s to %s", self.name, source.kind, self.flow.sink.kind)

    def join(self, *, seconds: float | None = None) -> Member | None:
        """Join the workers that divide the lanes and return the membership; None if one worker reads all lanes.

        With `seconds`, wait that long for an assignment, and leave the group at the end. Only the loop's thread may
        call it. Raises LogUnavailable, InvalidSettings, MetaUnavailable.
        """
        source = self.flow.source
        alone = runs_alone(self.settings, self.flow)
        if self.on_spark or not (self.flow.divided or alone):
            return None
        if not self._members:
            instance = instance_name(self.settings, self.worker)
            if alone or not isinstance(source, KafkaSource):
                self._members.append(LeasedMember.of_flow(self.settings, self.flow.name, instance, alone=alone))
            else:
                static = "" if seconds is not None else instance
                self._members.append(Membership(source, self.flow.consumer_group, instance=static))
        if seconds is not None:
            try:
                self._members[0].wait_joined(seconds)
            except BaseException:
                self.leave()
                raise
        return self._members[0]

    def wait_alone(self, stop: threading.Event, *, seconds: float | None = None) -> bool:
        """Wait until no other machine runs the flow; return False if `stop` is set before that.

        Returns at once if workers divide the lanes, or without a meta store. With `seconds`, raises LogUnavailable if
        it takes longer. Raises MetaUnavailable.
        """
        if not runs_alone(self.settings, self.flow):
            return True
        member = self.join(seconds=seconds)
        assert isinstance(member, LeasedMember)
        reported = False
        while not member.held:
            if not reported and (others := members(member.store, self.flow.name)):
                reported = True
                _logger.info("%s waits: %s runs it", self.name, ", ".join(others))
            if stop.wait(_WAIT_SECONDS):
                return False
        return True

    def _hold(self) -> None:
        """Take the lease of the flow, for a driver of Spark. Raises StreamBusy if another process has it."""
        if not runs_alone(self.settings, self.flow):
            return
        instance = instance_name(self.settings, self.worker)
        member = LeasedMember.of_flow(self.settings, self.flow.name, instance, alone=True)
        self._members.append(member)
        try:
            member.wait_joined(2 * self.settings.session_seconds)
        except LogUnavailable as error:
            self.leave()
            raise StreamBusy(f"{self.flow.name!r} runs in another process: stop it first ({error})") from None

    def require_held(self) -> None:
        """Raise StreamBusy if this driver of Spark lost its flow's lease, so that another one may run the flow."""
        if self.on_spark and any(isinstance(each, LeasedMember) and not each.held for each in self._members):
            raise StreamBusy(
                f"the driver of {self.flow.name!r} did not reach the meta store for too long, so another machine may"
                " run it: start it again"
            )

    def leave(self) -> None:
        """Leave the group. Idempotent."""
        while self._members:
            self._members.pop().close()
        self.claims.clear()

    def require_within_limit(self, positions: Mapping[str, Position]) -> None:
        """Raise ErrorLimitExceeded if the failures in `positions` exceed `errors.limit`."""
        windows = [(each.window_in, each.window_error) for each in positions.values() if not each.forgotten]
        errors, name = self.flow.errors, self.flow.name
        require_within(errors.limit, windows, flow=name, place=errors.collection or self.flow.errors_topic)

    def planner(self) -> FlowPlanner:
        return FlowPlanner(self)

    def run(self, plan: Work) -> Done:
        """Run a range. An error is reported to the driver, which counts it, commits nothing and plans it again."""
        with self._lock:
            life, task = self._tasks.pop(plan.channel, (plan.life, None))
        try:
            if task is not None and life != plan.life:
                task.stop()  # all tasks restart; on Spark this process may have opened its task before the restart
                task = None
            if task is None:
                with self._lock:
                    attempts = self._attempts.setdefault(plan.channel, Attempts())
                if in_executor_folder():  # the driver's copies of what crashed are on another machine
                    with DocumentCopies(self.settings, self.flow.name) as documents:
                        documents.refresh()
                task = Task(
                    self.settings,
                    self.flow,
                    plan.topic,
                    plan.partition,
                    open_rows=self.rows_of,
                    attempts=attempts,
                )
            done = task.run(plan)
        except Exception as error:
            if task is not None:
                task.stop()
            failure = RangeFailure.of(error)
            # Always retriable here: the flow's failure threshold decides when to stop.
            again = RangeFailure(failure.code, failure.message, True)
            return Done(plan.channel, plan.base, plan.start, plan.end, failure=again)
        if task.broken:
            task.stop()
            return done
        with self._lock:
            self._tasks[plan.channel] = (plan.life, task)
        return done

    def rows_of(self, step: Lookup) -> CollectionRows:
        """Return the rows of a lookup's collection, shared by all tasks of this process."""
        with self._lock:
            return self._rows.setdefault(step, CollectionRows(self.settings, step))

    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> FlowCommitter:
        return FlowCommitter(self, metrics)

    def watch(self, metrics: Metrics) -> Callable[[Sequence[Done]], None]:
        """Return a callback for Spark's driver, which calls it after each range to publish the flow's state.

        The callback raises MemoryExceeded if the processes exceed the flow's memory limit.
        """
        beat = Beat(self, metrics, on_spark=True)
        beat.start()
        self._beats.append(beat)

        def on_committed(committed: Sequence[Done]) -> None:
            beat.note(committed)
            if beat.over:
                raise MemoryExceeded(beat.over)

        return on_committed

    def end(self, state: State = State.STOPPED, cause: str = "") -> None:
        """Publish the final state, after the driver's last query has ended. Idempotent."""
        while self._beats:
            beat = self._beats.pop()
            beat.close()
            beat.say(state, cause)
            _logger.info("%s is %s %s", self.name, state, cause)
        self.leave()

    def stop_tasks(self, names: Iterable[str] | None = None) -> None:
        """Close the tasks that are open in this process: all, or those of `names`."""
        with self._lock:
            chosen = list(self._tasks) if names is None else names
            tasks = [self._tasks.pop(each) for each in chosen if each in self._tasks]
            for each in list(self._attempts) if names is None else names:
                self._attempts.pop(each, None)
        for _, task in tasks:
            task.stop()


def places_of(settings: Settings, flow: Flow) -> Source:
    """Return the source of `flow`, to ask for its tasks and their ends."""
    standing: dict[str, int] = {}
    if not isinstance(flow.source, KafkaSource):
        standing = {lane: each.position for lane, each in positions_of(settings, flow.name).items()}
    return source_of(flow.source, settings, group=flow.consumer_group, standing=standing)


def require_tasks(settings: Settings, flow: Flow) -> None:
    """Raise InvalidSettings if Spark's tasks cannot run `flow`, or not on machines that share nothing."""
    kind = source_kinds()[flow.source.kind]
    if kind.feeder:
        raise InvalidSettings(
            f"a {kind.name} is captured by a worker, which Spark's tasks are not: `millrace flows start {flow.name}`"
        )
    if flow.divided:
        raise InvalidSettings(
            "on Spark one query reads all lanes, in as many tasks as the cluster has cores: say source.assignment: all"
            " and one worker"
        )
    if not settings.spark_environment:
        return
    if not settings.meta_store:
        raise InvalidSettings(
            "executors with an environment of their own (MILLRACE_SPARK_ENVIRONMENT) find a flow's suspects and the"
            " catalog in the meta store: set MILLRACE_META_STORE"
        )
    named = described(flow)
    if any(each.startswith("collection:") for each in (*named["reads"], *named["writes"])):
        require_reachable_log(settings)


def runs_alone(settings: Settings, flow: Flow) -> bool:
    """Return whether a lease in the meta store restricts the flow to one worker across all machines."""
    return bool(settings.meta_store) and not flow.divided


class FlowPlanner(Planner[Work, int]):
    """Plans the records after the committed positions."""

    def __init__(self, run: FlowRun) -> None:
        self._run = run
        self._settings, self._id = run.settings, run.flow.name
        self._topics = run.places()
        self._positions = Positions(ensure_positions(positions_uri(run.settings, run.flow.name)))
        self._ticks: Ticks | None = None
        if source_kinds()[run.flow.source.kind].transactional:
            topics = [topic for topic, _ in self._topics.partitions()]
            self._ticks = ticks_of(run.flow.sink, run.settings, topics)
        self._unclaimed: set[str] = set()
        self._lost: dict[str, float] = {}
        """Tasks that another worker claimed while the group still assigns them to this one, and since when."""
        self._seen: dict[str, Ends] = {}
        self._looked = 0.0

    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, int] | None,
        max_bytes: int,
    ) -> Iterable[PendingRange[int]]:
        held = self._held()
        if read_wanted(self._settings, self._id).paused:
            return []
        rests = resting(tasks_path(self._settings, self._id, self._run.worker), now=time.time()) | without
        found = []
        positions = self._positions.now()
        limits: Mapping[str, int] = {}
        if self._ticks is not None:
            standing = {task: each.position for task, each in positions.items()}
            limits = self._topics.settle(standing, self._ticks.now, wait=target is None)
        self._run.require_within_limit(positions)
        for task, ends in self._look().items():
            if held is not None and task not in held:
                continue
            if task in rests or (only is not None and task not in only):
                continue
            known = positions.get(task)
            position = ends.low if known is None else known.position
            end = ends.high if target is None else min(ends.high, target.get(task, position))
            end = min(end, limits.get(task, end))
            # A position beyond the end is planned, too: its task reports the error.
            if position < end or position > ends.high:
                found.append(PendingRange(task, 0 if known is None else known.commits, end))
        return found

    def plan(self, ends: Mapping[str, int], *, max_bytes: int) -> list[Work]:
        positions, life = self._positions.now(), read_wanted(self._settings, self._id).whole
        health = read_tasks(tasks_path(self._settings, self._id, self._run.worker))
        ids = self._topics.ids()
        skipped = skipped_of(self._settings, self._run.flow)
        found = []
        for topic, partition in self._topics.partitions():
            task = task_of(topic, partition)
            if task in ends:
                known = positions.get(task)
                position = (
                    self._seen[task].low
                    if known is None and task in self._seen
                    else 0
                    if known is None
                    else known.position
                )
                if position != ends[task]:
                    its = health.get(task, Health())
                    share = 1 << min(its.failures + its.recoveries, _SMALLEST_SHARE)
                    end = max(ends[task], position + 1)
                    skip = skipped.get(task, frozenset())
                    topic_id = ids.get(topic, "")
                    found.append(Work(topic, partition, position, end, known, max_bytes, life, topic_id, share, skip))
        return found

    def ends(self) -> dict[str, int]:
        self._looked = 0.0
        return {task: each.high for task, each in self._look().items()}

    def seen(self) -> dict[str, int]:
        return {task: each.high for task, each in self._seen.items()}

    def read_end(self, text: str) -> int:
        return int(text)

    def close(self) -> None:
        self._topics.close()
        if self._ticks is not None:
            self._ticks.close()

    def _look(self) -> dict[str, Ends]:
        now = time.monotonic()
        if not self._seen or now - self._looked >= _LOOK_SECONDS:
            self._seen, self._looked = self._topics.ends(), now
        return self._seen

    def _held(self) -> frozenset[str] | None:
        """Return the tasks that this worker may plan, or None for all.

        The group's assignment alone is not enough: a worker that was suspended for longer than the session learns
        late that its partitions were reassigned. So a new owner claims a task first, by a commit of the same position,
        and plans it only from its own newest commit. A task that another worker claimed is claimed back after a
        session, if the group still assigns it to this one.
        """
        member = self._run.join()
        if member is None:
            return None
        member.follow(self._topics.partitions())
        division, claims = member.poll(), self._run.claims
        gone = (division.went | claims.keys() - division.held) & claims.keys()
        positions = self._positions.now()
        for task, number in claims.items():
            known = positions.get(task)
            if task not in gone and (0 if known is None else known.commits) > number:
                self._lost[task] = time.monotonic()
                _logger.warning("%s: another worker claimed it", task)
        gone |= claims.keys() & self._lost.keys()
        for task in gone:
            del claims[task]
        self._run.stop_tasks(gone)
        now = time.monotonic()
        back = {
            task for task, since in self._lost.items() if task in division.held and now - since > member.session_seconds
        }
        self._unclaimed = (self._unclaimed | division.came | back) & division.held
        if self._unclaimed:
            self._claim(positions)
        return frozenset(claims.keys())

    def _claim(self, positions: Mapping[str, Position]) -> None:
        """Claim each unclaimed task by committing its position again.

        A task with a concurrent commit stays unclaimed.
        """
        ends, ids = self._look(), self._topics.ids()
        moves: list[tuple[Position | None, Position]] = []
        for task in sorted(self._unclaimed & (ends.keys() | positions.keys())):
            known = positions.get(task)
            if known is None or known.forgotten:
                first = (known or Position(task, 0)).moved(ends[task].low if task in ends else 0)
                moves.append((known, replace(first, topic_id=ids.get(_topic(task), ""))))
            else:
                moves.append((known, known.moved(known.position)))
        hit("pipeline.claim")
        fenced = set(commit_positions(self._positions.table, moves).fenced) if moves else set()
        for place, (_, after) in enumerate(moves):
            if place not in fenced:
                self._run.claims[after.task] = after.commits
                self._unclaimed.discard(after.task)
                self._lost.pop(after.task, None)
                _logger.info("this worker claimed %s from offset %d on", after.task, after.position)


class FlowCommitter:
    """Commits positions in one fenced commit, counts failures, and then updates the consumer group's offsets."""

    def __init__(self, run: FlowRun, metrics: Metrics | None) -> None:
        self._run = run
        self._metrics = metrics
        self._table = ensure_positions(positions_uri(run.settings, run.flow.name))
        self._topics = run.places()
        self.supervision = Supervision(run.settings, run.flow, worker=run.worker)

    def commit(self, reports: Sequence[Done], /) -> CommitResult[Done]:
        begun = time.monotonic()
        self._run.require_held()
        for each in reports:
            if each.failure is not None:
                health = self.supervision.failed(each.channel, code=each.failure.code, cause=each.failure.message)
                if health.failed:
                    _logger.error("%s failed %d times and stops: %s", each.channel, health.failures, each.failure)
        moved = [each for each in reports if each.failure is None]
        moves = [(each.base, self._position_after(each)) for each in moved]
        hit("pipeline.commit")
        if moves:
            self._table.refresh()
        outcome = commit_positions(self._table, moves) if moves else None
        hit("pipeline.committed")
        fenced = set() if outcome is None else set(outcome.fenced)
        committed = [each for place, each in enumerate(moved) if place not in fenced]
        self.supervision.succeeded(each.channel for each in committed)
        member = self._run.join()
        if member is not None:
            self._run.claims.update((each.channel, self._position_after(each).commits) for each in committed)
        if member is not None and self._run.flow.divided:
            member.commit(_place(each) for each in committed)
        else:
            self._topics.mirror(_place(each) for each in committed)
        self._measure(reports, committed)
        return CommitResult(
            committed=committed,
            fenced=[each for place, each in enumerate(moved) if place in fenced],
            version=self._table.version,
            conflicts=0 if outcome is None else outcome.conflicts,
            seconds=time.monotonic() - begun,
        )

    def close(self) -> None:
        """Idempotent."""
        self._topics.close()

    def _position_after(self, done: Done) -> Position:
        """Return the position after a range."""
        limit = self._run.flow.errors.limit
        before = done.base or Position(done.channel, 0)
        after = before.moved(done.position, **{name: getattr(done, name) for name in COUNTS})
        if limit is not None:
            after = after.counted(done.records_in, done.records_error, over=limit.over)
        return replace(after, topic_id=done.topic_id or before.topic_id, in_a_row=done.in_a_row)

    def _measure(self, reports: Sequence[Done], committed: Sequence[Done]) -> None:
        metrics, name = self._metrics, self._run.flow.name
        if metrics is None:
            return
        for each in reports:
            if each.failure is not None:
                metrics.flow_failures_total.labels(name, each.channel, each.failure.code).inc()
        for each in committed:
            for outcome in ("in", "out", "error", "filtered", "stale"):
                metrics.flow_rows_total.labels(name, each.channel, outcome).inc(getattr(each, f"records_{outcome}"))
            metrics.flow_bulks_total.labels(name, each.channel).inc(each.bulks)
            metrics.flow_lane_cpu_seconds_total.labels(name, each.channel).inc(each.cpu_seconds)
            metrics.flow_lane_range_bytes.labels(name, each.channel).set(each.log_bytes)
            metrics.flow_retries_total.labels(name, each.channel).inc(each.retries)
            metrics.flow_lag_records.labels(name, each.channel).set(max(0, each.end - each.position))
            for latency in each.latencies:
                metrics.flow_latency_seconds.labels(name, each.channel).observe(max(0.0, latency))


def _topic(task: str) -> str:
    return task.rpartition("-")[0]


def _place(done: Done) -> tuple[str, int, int]:
    topic, _, partition = done.channel.rpartition("-")
    return topic, int(partition), done.position
