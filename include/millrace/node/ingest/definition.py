"""Ingest: the log into the ``wal`` table, as one user of the range loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestPlan, IngestReport, run_ingest
from millrace.node.ingest.log_connection import LogConnection, worker_connection
from millrace.node.ingest.planner import LogPlanner
from millrace.node.range_loop.definition import LoopDefinition, OwnershipCheck, always_owned
from millrace.node.range_loop.failure import RangeFailure
from millrace.node.range_loop.ownership import read_assigned
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.table import WalTable


@dataclass(frozen=True)
class IngestLoop(LoopDefinition[IngestPlan, IngestReport]):
    """Of one deployment."""

    name: ClassVar[str] = "streaming-node"
    settings: Settings
    service: LogService | None = None
    table: WalTable | None = None
    """Log and table, for a loop in this process; without them each process connects and opens for itself."""

    @property
    def parked(self) -> Path:
        return self.settings.parked_path

    @property
    def max_bytes(self) -> int:
        return self.settings.max_bytes_per_trigger

    @property
    def interval(self) -> float:
        return self.settings.trigger_interval

    def prepare(self) -> None:
        settings = self.settings
        # Brokers are read directly, but append host and retention live in the log's server on every backend.
        RemoteLogService.connect(
            settings.log_path, deadline=settings.start_deadline, launch=launch_of(settings)
        ).close()
        WalTable.create(settings.wal_uri)
        connection = LogConnection(settings)
        connection.service()
        connection.close()

    def planner(self) -> LogPlanner:
        table = self.table or WalTable.open(self.settings.wal_uri)
        if self.service is not None:
            service = self.service
            return LogPlanner(lambda: service, table, parked=self.parked)
        connection = LogConnection(self.settings)
        return LogPlanner(connection.service, table, parked=self.parked, on_close=connection.close)

    def run(self, plan: IngestPlan) -> IngestReport:
        settings, base = self.settings, plan.base
        try:
            log = (self.service or worker_connection(settings).service()).open(base.pchannel)
        except MillraceError as error:
            position = base.position or EARLIEST
            return IngestReport.without_effect(base, position, RangeFailure.of(error, position))
        try:
            return run_ingest(plan, log=log, table=settings.wal_uri)
        finally:
            log.close()

    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> WalCommitter:
        """There is one commit a micro-batch, before which its caller has asked."""
        assigned = self.assigned
        return WalCommitter(
            self.table or WalTable.create(self.settings.wal_uri),
            metrics=metrics,
            owned=lambda: None if assigned is None else read_assigned(assigned),
        )
