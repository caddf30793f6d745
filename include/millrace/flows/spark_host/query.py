"""The query of a declared stream, for :func:`millrace.runtime.job.run`: alone in its driver, or with its group."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.errors import InvalidStream
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.declare.checks import check, given_columns, require_runnable
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.hold import wait_while_held
from millrace.flows.sinks.memory import Folder
from millrace.flows.sinks.sink import Sink, Verdicts
from millrace.flows.spark_host.error_window import ErrorWindow, window_of
from millrace.flows.spark_host.frames import create_sink, rows_of, sink_of, transformed
from millrace.flows.spark_host.incarnations import (
    STREAMS,
    Incarnations,
    Lock,
    newest_offsets,
    require_reachable,
    sink_folder,
)
from millrace.flows.spark_host.keyed import Taken
from millrace.flows.spark_host.micro_batches import columns_of, start
from millrace.flows.spark_host.operated import both_sides, operated_sink, operator_of, right_rows
from millrace.flows.spark_host.progress import ProgressListener
from millrace.flows.spark_host.status import progress_name
from millrace.flows.spark_host.undecoded import Undecoded
from millrace.runtime.job import StartQuery


def streams_of(settings: Settings, job: str) -> list[Flow]:
    """Return the streams that the job `job` runs: one, or those of a group. Raises StreamNotFound."""
    from millrace.flows.declare.discovery import declared_flow

    mine = [each for each in declared_flows(settings, host="spark").values() if each.job == job]
    return mine or [declared_flow(settings, job, host="spark")]


class StreamQuery:
    """Starts the query of one stream; holds the stream for as long as this process lives."""

    def __init__(self, stream: Flow) -> None:
        self._stream = stream
        self._lock: Lock | None = None
        self._undecoded: Undecoded | None = None

    def __call__(
        self, spark: SparkSession, *, settings: Settings, metrics: Metrics, available_now: bool = False
    ) -> StreamingQuery:
        """Start the query. Raises InvalidStream, StreamBusy, and the errors of the source and the sink."""
        stream = self._stream
        _copy_catalog(settings)
        require_runnable(stream, check(settings, stream))
        require_reachable(settings, stream.name)
        incarnations = Incarnations(settings, stream.name)
        if self._lock is None:
            self._lock = incarnations.locked()
        lock = self._lock
        state = incarnations.admitted(stream)
        checkpoint = incarnations.checkpoint(state)
        folder = sink_folder(checkpoint)
        window = ErrorWindow(stream, folder)
        window.require_within()
        frame = transformed(spark, settings, stream, rows_of(spark, settings, stream, state.begun))
        if not frame.isStreaming:
            raise InvalidStream(f"the transform of {stream.name!r} returns no streaming DataFrame")
        sink: Sink
        if stream.transform.operator is None:
            create_sink(settings, stream, stream.row_sink, columns_of(frame))
            sink = sink_of(settings, stream, folder)
        else:
            operator = operator_of(stream, frame)
            frame = both_sides(stream, frame, right_rows(spark, settings, stream))
            answers, aside = given_columns(stream, operator, columns_of(frame))
            create_sink(settings, stream, stream.row_sink, answers)
            create_sink(settings, stream, stream.late, aside)
            sink = operated_sink(stream, frame, operator, folder, lambda at, into: sink_of(settings, stream, at, into))
        _require_behind(stream, sink, checkpoint)
        listener = ProgressListener(settings, stream.name, metrics, spark.streams)
        undecoded = self._undecoded = Undecoded(settings, stream)

        def taken(batch_id: int, result: Verdicts) -> None:
            bad = undecoded.collect(batch_id)
            listener.undecoded(bad)
            listener.taken(batch_id, result)
            try:
                errors = result.rejected + bad + (result.late_letters if isinstance(result, Taken) else 0)
                window.count(batch_id, records=result.acknowledged + errors, errors=errors)
            finally:
                undecoded.done()

        def begins() -> None:
            lock.require_held()
            settings.check_place()
            wait_while_held(settings)
            incarnations.hand()

        # Tasks on this machine stage rows on its disk.
        staging = None if settings.spark_environment else settings.data_dir / STREAMS / stream.name / "staged"
        spark.streams.addListener(listener)
        try:
            return start(
                frame,
                sink,
                checkpoint,
                name=progress_name(stream.name),
                seconds=stream.seconds,
                available_now=available_now,
                output_mode=stream.transform.output_mode,
                on_result=taken,
                staging=staging,
                begins=begins,
            )
        except BaseException:
            spark.streams.removeListener(listener)
            raise

    def close(self) -> None:
        """Release the stream for other processes, after its query has ended."""
        if self._undecoded is not None:
            self._undecoded.close()
            self._undecoded = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _require_behind(stream: Flow, sink: Sink, checkpoint: Folder) -> None:
    """Raise InvalidStream if the sink has micro-batches that the checkpoint does not know: it would leave out theirs.

    That is so after the restore of a backup, if the sink is a table that is not in it.
    """
    taken = max(sink.standing([stream.name]).values(), default=0)
    if taken and taken - 1 > (known := newest_offsets(checkpoint)):
        sink.close()
        raise InvalidStream(
            f"the sink of {stream.name!r} has micro-batches up to {taken - 1}, and the checkpoint, which a backup had,"
            f" knows {known}: restore the sink to the same moment, or begin anew after a tick or a time, which writes"
            f" rows of that time again (`millrace flows replay {stream.name}`)"
        )


def queries_of(settings: Settings, streams: list[Flow]) -> list[StartQuery]:
    """Return the queries of a job: streams that are not paused. If all are, the first one reports that at its start."""
    return [StreamQuery(each) for each in _awake(settings, streams)]


def require_startable(settings: Settings, streams: list[Flow]) -> None:
    """Check, without a job, what such a job checks before it asks Spark. Raises InvalidStream."""
    _copy_catalog(settings)
    for each in _awake(settings, streams):
        require_runnable(each, check(settings, each))
        require_reachable(settings, each.name)
        Incarnations(settings, each.name).startable(each)
        window_of(settings, each).require_within()


def _copy_catalog(settings: Settings) -> None:
    """Get the catalog onto this machine: the log's server copies it from the meta store before it responds."""
    if settings.meta_store:
        with connect(settings=settings):
            pass


def _awake(settings: Settings, streams: list[Flow]) -> list[Flow]:
    return [each for each in streams if not Incarnations(settings, each.name).state.paused] or streams[:1]
