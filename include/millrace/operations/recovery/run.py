"""One recovery run: diagnose, repair what can be repaired, diagnose again.

A rehearsal does this on a clone of the tables, which is then discarded. It only reads the real log, with one exception:
a stuck transaction needs a time tick, which is appended and affects no row. A repair that would lose rows needs
approval. One repair may also resolve another finding. Repairs therefore run in the order WAL, state, catalog, tables,
channels, jobs, and each checks again what it is about to change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path
from millrace.client.append_client import AppendClient
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.parking import parked_names, restart_follower, unpark
from millrace.operations.checkpoint import recovery_checkpoints
from millrace.operations.recovery import catalog_repair, table_repair, wal_repair
from millrace.operations.recovery.clone import clone
from millrace.operations.recovery.declaration import RecoveryParams
from millrace.operations.recovery.diagnose import diagnose
from millrace.operations.recovery.findings import RecoveryFinding, RecoveryReport, RepairResult
from millrace.rpc.launch import launch_of
from millrace.runtime.progress import Progress

ORDER: Final = (
    "wal_file_damaged",
    "wal_rows_differ",
    "wal_state_damaged",
    "catalog_differs",
    "table_file_damaged",
    "collection_differs",
    "channel_parked",
    "txn_stuck",
    "job_dead",
    "log_regressed",
    "staged_file_damaged",
)
"""Order in which findings are repaired."""

MANUAL_REPAIRS: Final = {
    "log_regressed": "no repair is possible: restore the log (docs/operating.md)",
    "staged_file_damaged": 'no repair is possible: put the file back (docs/tables.md, "staged")',
}
"""Work for a person on findings that have no automatic repair."""

ROUNDS: Final = 3
"""Maximum number of diagnoses after repairs. Collections can be compared only once the WAL is intact."""


def run(settings: Settings, params: RecoveryParams, progress: Progress) -> RecoveryReport:
    """Run in the mode of `params`. Findings are not errors. Raises MillraceError if the diagnosis itself fails."""
    started = time.monotonic()
    with AppendClient.connect(
        settings.data_dir, deadline=settings.start_deadline, launch=launch_of(settings)
    ) as client:
        run_ = _Run(settings, client, params, progress)
        if params.mode == "rehearse":
            with clone(settings) as copy:
                run_ = _Run(copy, client, params, progress)
                run_.all()
        elif params.mode == "repair":
            run_.all()
        else:
            run_.findings = run_.remaining = run_.look()
    return RecoveryReport(
        mode=params.mode,
        depth=params.depth,
        findings=tuple(run_.findings),
        repairs=tuple(run_.repairs),
        remaining=tuple(run_.remaining) if params.mode != "diagnose" else (),
        healthy=not run_.remaining,
        needs_approval=any(each.destructive for each in run_.remaining),
        seconds=round(time.monotonic() - started, 3),
    )


class _Run:
    """Findings and repairs on one set of tables: the real ones, or a clone."""

    def __init__(self, settings: Settings, client: AppendClient, params: RecoveryParams, progress: Progress) -> None:
        self._settings = settings
        self._client = client
        self._params = params
        self._progress = progress
        self.findings: list[RecoveryFinding] = []
        self.repairs: list[RepairResult] = []
        self.remaining: list[RecoveryFinding] = []

    def look(self) -> list[RecoveryFinding]:
        return diagnose(
            self._settings,
            self._client.service,
            depth=self._params.depth,
            stale_after=self._params.stale_after,
            progress=self._progress,
            ask=self._client.definitions,
        )

    def all(self) -> None:
        """Diagnose and repair until nothing is wrong, nothing more can be done, or ROUNDS is reached."""
        for _ in range(ROUNDS):
            self.remaining = self.look()
            known = {(each.kind, each.subject) for each in self.findings}
            fresh = [each for each in self.remaining if (each.kind, each.subject) not in known]
            if not fresh:
                return
            self.findings += fresh
            for finding in sorted(fresh, key=lambda each: ORDER.index(each.kind)):
                self.repairs.append(self._repair(finding))
        self.remaining = self.look()

    def _repair(self, finding: RecoveryFinding) -> RepairResult:
        started = time.monotonic()
        self._progress.update(f"repairing {finding.kind}", subject=finding.subject)
        if finding.destructive and not self._params.allow_destructive:
            return RepairResult(
                finding=finding, done=False, words="the repair loses rows: waits for approval", seconds=0.0
            )
        repairs: dict[str, Callable[[RecoveryFinding], str]] = {
            "wal_file_damaged": self._wal_files,
            "wal_rows_differ": self._wal_rows,
            "wal_state_damaged": self._wal_state,
            "catalog_differs": self._catalog,
            "table_file_damaged": self._table,
            "collection_differs": self._table,
            "channel_parked": self._unpark,
            "txn_stuck": self._tick,
            "job_dead": self._catch_up,
        }
        act = repairs.get(finding.kind)
        try:
            words = MANUAL_REPAIRS[finding.kind] if act is None else act(finding)
            done = act is not None
        except (MillraceError, OSError) as error:
            done, words = False, f"{error.code if isinstance(error, MillraceError) else type(error).__name__}: {error}"
        return RepairResult(finding=finding, done=done, words=words, seconds=round(time.monotonic() - started, 3))

    def _wal_files(self, finding: RecoveryFinding) -> str:
        rows = wal_repair.rebuild_files(self._settings, self._client.service, finding.subject, finding.files)
        return f"{rows} rows computed again from the log"

    def _wal_rows(self, finding: RecoveryFinding) -> str:
        names = wal_repair.differing_files(self._settings, self._client.service, finding.subject)
        rows = wal_repair.rebuild_files(self._settings, self._client.service, finding.subject, names)
        return f"{len(names)} files differed; {rows} rows computed again from the log"

    def _wal_state(self, finding: RecoveryFinding) -> str:
        wal_repair.rebuild_state(self._settings, self._client.service, finding.subject)
        return "the state row was computed again from the log"

    def _catalog(self, finding: RecoveryFinding) -> str:
        settings, service = self._settings, self._client.service
        if self._params.mode != "repair":
            settings = replace(settings, meta_store="")  # change only the clone's file
        lost = not catalog_path(settings.data_dir).exists()
        ingest_to_end(settings, service)  # the WAL must have all DDL that the chain has
        words = catalog_repair.rebuild_catalog(
            settings, service, self._client.definitions, lambda name: int(self._client.describe(name)["term"])
        )
        if lost and self._params.mode == "repair":
            # The server still has the removed file open. The next call starts a server that opens the new file.
            service.shutdown()
        return words

    def _table(self, finding: RecoveryFinding) -> str:
        settings, progress = self._settings, self._progress
        folder, _, name = finding.subject.partition("/")
        if folder == "recovery_checkpoints":
            count = recovery_checkpoints.remove(settings, finding.files)
            return f"{count} removed from the table; the DAG `checkpoint` writes new ones"
        if folder == "segments":
            files = table_repair.rebuild_segments(settings, progress=progress)
        elif folder == "checkpoints":
            files = table_repair.rebuild_checkpoints(settings, progress=progress)
        else:
            files = table_repair.rebuild_collection(settings, int(name.partition("/")[0]), progress=progress)
        return f"rebuilt from the WAL, {files} files"

    def _unpark(self, finding: RecoveryFinding) -> str:
        unpark(self._settings.parked_path, finding.subject)
        ingest_to_end(self._settings, self._client.service)  # parks the channel again, and raises, if the cause remains
        if finding.subject in parked_names(self._settings.parked_path):
            return "retried, and parked again"
        if self._params.mode == "repair":  # a rehearsal must not restart the running follower
            restart_follower(self._client, finding.subject)
        return "retried, and running again"

    def _tick(self, finding: RecoveryFinding) -> str:
        tick = self._client.tick(finding.subject)
        ingest_to_end(self._settings, self._client.service)
        return f"a time tick was appended ({tick}): the chain ends transactions past their lease"

    def _catch_up(self, finding: RecoveryFinding) -> str:
        ticks = ingest_to_end(self._settings, self._client.service)
        flush_to_end(self._settings)
        return f"its work was done here ({len(ticks)} PChannels); the DAG `streaming` restarts the job itself"
