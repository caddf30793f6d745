"""The status of an installation: Airflow's components, the streaming job, the log, memory. Starts nothing."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from millrace.base.errors import AirflowUnavailable
from millrace.base.process import all_processes
from millrace.installation.system import Installation
from millrace.observe.models import HealthFinding
from millrace.observe.observer import Observer
from millrace.runtime.processes import pss_bytes, with_descendants


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationStatus:
    """An installation at one moment, as plain data."""

    at: float
    data: str
    running: bool
    """Whether Airflow's keeper runs."""
    address: str
    components: dict[str, str]
    """State of each Airflow component: healthy, starting or unhealthy. Empty if Airflow does not answer."""
    restarts: int
    reason: str
    """Restarts of Airflow since the system started, and the reason of the last one."""
    streaming: bool
    """Whether the streaming job runs."""
    state: str
    words: str
    """State of the data and a sentence about it, as in the overview of the UI."""
    findings: tuple[HealthFinding, ...]
    """Problems (millrace.observe.health)."""
    rows_per_second: float
    lag_seconds: float | None
    """Age of the oldest log entry that the WAL lacks, in seconds. None if the log does not answer."""
    log_server: bool
    processes: dict[str, int]
    """Number of processes by group: airflow, jobs, log."""
    pss_bytes: dict[str, int]
    """Their memory in bytes; shared pages count once."""

    @property
    def healthy(self) -> bool:
        """Whether every part of a running system runs and is healthy.

        A lag, and failed maintenance, are only warnings.
        """
        well = not any(each.severity == "critical" for each in self.findings)
        return self.running and self.streaming and set(self.components.values()) == {"healthy"} and well

    def to_json(self) -> dict[str, Any]:
        findings = [each.model_dump() for each in self.findings]
        return {
            **asdict(self),
            "findings": findings,
            "healthy": self.healthy,
            "total_pss_bytes": sum(self.pss_bytes.values()),
        }


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The processes of an installation and their memory, the most expensive part of a status."""

    counts: dict[str, int]
    """Number of processes by group: airflow, jobs, log."""
    pss_bytes: dict[str, int]

    @classmethod
    def measure(cls, installation: Installation) -> ProcessUsage:
        groups = _groups(installation)
        return cls(
            {name: len(each) for name, each in groups.items()}, {name: pss_bytes(each) for name, each in groups.items()}
        )


def read_status(
    installation: Installation, observer: Observer, processes: ProcessUsage | None = None
) -> InstallationStatus:
    """Return the current status. `processes` may be those of an earlier status, to save the scan."""
    found = installation.running()
    components: dict[str, str] = {}
    if found is not None:
        try:
            components = installation.api(found.address).health(since=found.record.at)
        except AirflowUnavailable:
            pass  # an empty dictionary says so
    overview = observer.overview()
    streaming = installation.streaming_job_running()
    # The overview reads what queries write after a micro-batch; a job that has just started has not written anything.
    starting = streaming and overview.state == "stopped"
    processes = processes or ProcessUsage.measure(installation)
    return InstallationStatus(
        at=time.time(),
        data=str(installation.settings.data_dir),
        running=found is not None,
        address=found.address if found is not None else "",
        components=components,
        restarts=found.record.restarts if found is not None else 0,
        reason=found.record.reason if found is not None else "",
        streaming=streaming,
        state=overview.state,
        findings=tuple(each for each in overview.findings if not starting or each.kind != "job_stopped"),
        words="The streaming job is in its first micro-batch." if starting else overview.words,
        rows_per_second=overview.totals.rows_per_second,
        lag_seconds=overview.totals.lag_seconds,
        log_server=overview.log_server,
        processes=processes.counts,
        pss_bytes=processes.pss_bytes,
    )


def _groups(installation: Installation) -> dict[str, list[Any]]:
    """Group the processes: Airflow's are in its keeper's session, the log's descend from its server."""
    found = installation.running()
    keeper = found.record.pid if found is not None else 0
    server = installation.log_server()
    log = with_descendants([server.pid] if server is not None else [], all_processes())
    groups: dict[str, list[Any]] = {"airflow": [], "jobs": [], "log": []}
    for each in installation.processes():
        groups["log" if each.pid in log else "airflow" if each.session == keeper else "jobs"].append(each)
    return groups
