"""Ingest: brings the log into the ``wal`` table, as an implementation of the range loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.base.settings.live import LiveSettings
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST
from millrace.node.ingest.committer import RETAINED_STATES, WalCommitter
from millrace.node.ingest.ingester import IngestPlan, IngestReport, run_ingest
from millrace.node.ingest.log_connection import (
    LogConnection,
    require_reachable_log,
    service_of_task,
    shipped_generations,
)
from millrace.node.ingest.planner import LogPlanner
from millrace.node.range_loop.definition import LoopDefinition, OwnershipCheck, always_owned
from millrace.node.range_loop.failure import RangeFailure
from millrace.node.range_loop.in_process import run_to_end
from millrace.node.range_loop.ownership import read_assigned
from millrace.node.retention.file_removal import DeploymentFileRemover
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.reader import is_followed
from millrace.tables.wal.table import WalTable


@dataclass(frozen=True)
class IngestLoop(LoopDefinition[IngestPlan, IngestReport]):
    """The ingest loop of one deployment."""

    name: ClassVar[str] = "streaming-node"
    settings: Settings
    service: LogService | None = None
    table: WalTable | None = None
    """Log and table for a loop in this process. If None, each process opens its own."""

    @cached_property
    def live(self) -> LiveSettings:
        """The settings as they are now."""
        return LiveSettings(self.settings)

    @property
    def parked(self) -> Path:
        return self.settings.parked_path

    @property
    def max_bytes(self) -> int:
        return self.live.current().max_bytes_per_trigger

    @property
    def interval(self) -> float:
        return self.settings.trigger_interval

    def prepare(self) -> None:
        settings = self.settings
        require_reachable_log(settings)
        # Brokers are read directly, but the append host and retention live in the log's server on every backend.
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
        return LogPlanner(
            connection.service,
            table,
            parked=self.parked,
            linger=self.settings.wal_linger,
            is_followed=partial(is_followed, self.settings),
            generations=partial(shipped_generations, self.settings),
            on_close=connection.close,
        )

    def run(self, plan: IngestPlan) -> IngestReport:
        settings, base = self.settings, plan.base
        try:
            log = (self.service or service_of_task(settings, plan.generations)).open(base.pchannel)
        except MillraceError as error:
            position = base.position or EARLIEST
            return IngestReport.without_effect(base, position, RangeFailure.of(error, position))
        try:
            return run_ingest(plan, log=log, table=settings.wal_uri)
        finally:
            log.close()

    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> WalCommitter:
        """Make the committer. It makes one commit per micro-batch, whose caller has checked ownership."""
        assigned = self.assigned
        return WalCommitter(
            self.table or WalTable.create(self.settings.wal_uri),
            metrics=metrics,
            owned=lambda: None if assigned is None else read_assigned(assigned),
            keep_commits=RETAINED_STATES,
            remover=DeploymentFileRemover(self.settings, keep=RETAINED_STATES),
        )


def ingest_to_end(settings: Settings, service: LogService, *, metrics: Metrics | None = None) -> dict[str, int]:
    """Bring the ``wal`` table to the current end of the logs of `service`. Returns the tick of each PChannel that
    moved.

    Raises as :func:`run_to_end`: ChannelParked for a range that cannot be run, TableUnavailable for one that can be
    retried.
    """
    ingest = IngestLoop(settings, service, WalTable.create(settings.wal_uri))
    return run_to_end(ingest, ingest.committer(metrics))
