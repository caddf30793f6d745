"""The Python data source ``millrace``: one row for each range of a micro-batch, not one for each message.

``spark.readStream.format("millrace")`` plans ranges (millrace.node.ingest.planner), and each task runs the chain over one range and
writes the Parquet files itself (millrace.node.ingest.ranges). What crosses into the JVM is a report of a few hundred bytes; the
driver's foreachBatch commits the files it names (millrace.node.ingest.streaming).

Options: ``log`` (URL of the registry, or a folder whose log is used through its server), ``folder`` (with a URL: the deployment's
log folder, where a switch of the backend is written down), ``server`` (how its log server is started where none runs, as
ServerLaunch.to_json), ``wal`` (the table's folder), ``parked`` (folder),
``maxBytesPerTrigger`` (log bytes a micro-batch takes from each PChannel).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import millrace.runtime.arrow_start  # noqa: F401 - first, before an array is made
from millrace.base.errors import InvalidSettings, MillraceError
from millrace.base.log_backends import backend_of, in_own_folder
from millrace.base.settings import Settings
from millrace.log.generations.listing import GenerationFile
from millrace.log.generations.service import open_deployment_log
from millrace.log.protocol import LogService
from millrace.log.registry import open_service
from millrace.message.ids import LogId
from millrace.node.ingest.planner import START, UNBOUNDED, Offset, Planner
from millrace.node.ingest.ranges import Failure, RangePlan, RangeReport, run_range
from millrace.node.ingest.task_memory import keep_modules
from millrace.rpc.launch import APPEND_HOST, ServerLaunch, launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.table import Totals, WalTable

FORMAT: Final = "millrace"
REPORT_SCHEMA: Final = pa.schema([pa.field("pchannel", pa.utf8()), pa.field("report", pa.utf8())])
"""A RangeReport as JSON, and its PChannel."""

_OPTIONS: Final = ("log", "wal", "parked", "maxBytesPerTrigger")


def source_options(settings: Settings) -> dict[str, str]:
    """The options of this source for a deployment."""
    return {
        "log": str(settings.log_path) if in_own_folder(settings.log) else settings.log,
        "folder": str(settings.log_path),
        "server": launch_of(settings).to_json(),
        "wal": str(settings.wal_uri),
        "parked": str(settings.parked_path),
        "maxBytesPerTrigger": str(settings.max_bytes_per_trigger),
    }


def connect(log: str, folder: str = "", server: str = "") -> LogService:
    """The log service of a source's options ``log``, ``folder`` and ``server``.

    Brokers are read directly, the embedded log through its server, as one of many; so is a log that was switched from or to it.
    """
    if through_server(log, folder):
        # Whoever starts the server starts the append host with it: clients must find both, whoever came first.
        launch = ServerLaunch.from_json(server) if server else ServerLaunch(extensions=(APPEND_HOST,))
        return RemoteLogService.connect(folder or log, launch=launch)
    return open_deployment_log(Path(folder), log, embedded=False) if folder else open_service(log)


def through_server(log: str, folder: str) -> bool:
    """Whether a log has a part that only its server may open. A look at one file's stat."""
    if "://" not in log:
        return True
    return bool(folder) and any(
        backend_of(item.url).local for item in GenerationFile(Path(folder), log).generations.items
    )


@lru_cache(maxsize=4)
def _worker_service(log: str, folder: str, server: str, through_server: bool) -> LogService:
    """One connection for all tasks that a Python worker runs, one after the other; it mends itself when it breaks."""
    return connect(log, folder, server)


class MillraceDataSource(DataSource):
    """Registered with ``spark.dataSource.register(MillraceDataSource)``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "pchannel STRING, report STRING"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        missing = [name for name in _OPTIONS if not self.options.get(name)]
        if missing:
            raise InvalidSettings(f"the source {FORMAT!r} needs the options {', '.join(missing)}")
        return MillraceStreamReader({name: str(self.options.get(name, "")) for name in (*_OPTIONS, "folder", "server")})


class RangePartition(InputPartition):
    """One task: one range of one PChannel."""

    def __init__(self, plan: RangePlan) -> None:
        self.value = plan


class MillraceStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's view of a :class:`millrace.node.ingest.planner.Planner`, which it makes when first asked; `read` runs in a worker."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._planner: Planner | None = None
        self._through_server = False
        self._fixed = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_planner": None, "_through_server": False, "_fixed": False}

    def initialOffset(self) -> dict[str, Any]:
        return dict(START)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(int(self._options["maxBytesPerTrigger"]))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else UNBOUNDED
        if not isinstance(limit, ReadMaxBytes | ReadAllAvailable):
            raise InvalidSettings(f"the source {FORMAT!r} takes a limit in bytes, not {limit}")
        return dict(self._plan().latest(_offset(start), max_bytes=max_bytes))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """For the progress report: what latestOffset, which Spark calls before, has found, and not asked again."""
        found = {} if self._planner is None else self._planner.found_ends
        return {"batch": 0, "max_bytes": 0, "ends": {name: str(end) for name, end in found.items()}} if found else None

    def prepareForTriggerAvailableNow(self) -> None:
        self._plan().fix_target()
        self._fixed = True

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [RangePartition(plan) for plan in self._plan().plan(_offset(end))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        report = _run(partition.value, self._options)
        yield pa.RecordBatch.from_pydict(
            {"pchannel": [report.pchannel], "report": [report.to_json()]}, schema=REPORT_SCHEMA
        )
        keep_modules(FORMAT)

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _plan(self) -> Planner:
        log, folder = self._options["log"], self._options["folder"]
        if self._planner is not None and through_server(log, folder) != self._through_server:
            self.stop()  # the log was switched to a backend that is reached in another way
        if self._planner is None:
            table = WalTable.open(self._options["wal"])
            self._through_server = through_server(log, folder)
            self._planner = Planner(
                connect(log, folder, self._options["server"]), table, parked=Path(self._options["parked"])
            )
            if self._fixed:
                self._planner.fix_target()
        return self._planner


def _run(plan: RangePlan, options: dict[str, str]) -> RangeReport:
    base = plan.base
    try:
        place = options["log"], options["folder"]
        log = _worker_service(*place, options["server"], through_server(*place)).open(base.pchannel)
    except MillraceError as error:
        failure = Failure(error.code, str(error), error.retriable, base.position or LogId(0, 0))
        return RangeReport(
            base.pchannel, base.commits, base.last_tick, base.version, base.last_tick, failure.position, Totals(),
            failure=failure,
        )  # fmt: skip
    try:
        return run_range(plan, log=log, table=Path(options["wal"]))
    finally:
        log.close()


def _offset(data: dict[str, Any]) -> Offset:
    """An offset as it came back from Spark; one that is not ours counts as the start, since offsets are hints."""
    if not isinstance(data.get("ends"), dict) or not isinstance(data.get("batch"), int):
        return START
    return {"batch": data["batch"], "max_bytes": int(data.get("max_bytes", UNBOUNDED)), "ends": dict(data["ends"])}
