"""Reads memory, disk and flush lag for flow control, and relieves a disk that fills up.

A thread passes readings to :class:`millrace.node.append.flow_control.FlowControl` every second. If the free disk space
falls below the slow watermark, it first tries to relieve the disk. It appends a FlushAll to every PChannel (which ends
open transactions there; a full disk would end them worse), waits for the flusher's checkpoints to pass it, and
truncates the log as far as the checkpoints allow, unless failing quality expectations forbid it. Only if that does not
help are appends slowed, and then refused, before the disk is full.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidSettings
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.base.settings.live import LiveSettings
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.log_entries import ENTRY_SCHEMA
from millrace.message.types import Flag, flags_of
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.node.append.flow_control import FlowControl, FlowLimits, FlowWatermark, Level, Mode
from millrace.node.append.host import AppendHost
from millrace.node.retention.truncation import truncate_log
from millrace.runtime.periodic import MAINTENANCE_ERRORS, PeriodicTask
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.quality_state import failed_critical_expectations
from millrace.tables.wal.table import WalTable
from millrace.wal.state import ChannelState

MEMORY: Final = "memory used"
DISK: Final = "free disk bytes"
LAG: Final = "flush lag in seconds"

POLL_SECONDS: Final = 1.0
"""Seconds between two readings."""
RELIEF_SECONDS: Final = 30.0
"""Seconds between two attempts to relieve the disk."""
FLUSH_DEADLINE: Final = 60.0
"""Longest wait for the flusher during a relief."""

_CGROUP: Final = Path("/sys/fs/cgroup")
_log = logging.getLogger(__name__)


def limits_of(settings: Settings) -> FlowLimits:
    """Return the watermarks of the settings. A watermark whose slow value is 0 is off."""
    marks = [
        (MEMORY, settings.flow_memory_slow, settings.flow_memory_reject, False),
        (DISK, settings.flow_disk_slow, settings.flow_disk_reject, True),
        (LAG, settings.flow_lag_slow, settings.flow_lag_reject, False),
    ]
    return FlowLimits(
        tuple(FlowWatermark(name, slow, reject, falling) for name, slow, reject, falling in marks if slow),
        start_rate=settings.flow_start_rate,
        least_rate=min(settings.flow_least_rate, settings.flow_start_rate),
    )


class FlowMonitor(PeriodicTask):
    """Keeps one host's :class:`FlowControl` up to date from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        settings: Settings,
        host: AppendHost,
        service: LogService,
        *,
        metrics: Metrics | None = None,
        pause: float = POLL_SECONDS,
        relief_pause: float = RELIEF_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="flow-control", interval=pause)
        self._settings = settings
        self._host = host
        self._service = service
        self._metrics = metrics
        self._relief_pause = relief_pause
        self._clock = clock
        self._live = LiveSettings(settings)
        self._limited_by = self._live.current()
        self.control = FlowControl(limits_of(self._limited_by))
        self._lag = FlushLag()
        self._newest: dict[str, tuple[ChannelState, int]] = {}
        """State of each PChannel at the last look, and the newest visible tick up to it."""
        self._table: TableHandle | None = None
        self._read: tuple[int, Mapping[str, Checkpoint]] = (-1, {})
        """The checkpoints of a version of their table."""
        self._relief: threading.Thread | None = None
        self._relieved = -relief_pause

    def close(self) -> None:
        """Stop after the work in progress. Idempotent."""
        super().close()
        self.await_relief(timeout=FLUSH_DEADLINE)

    def await_relief(self, *, timeout: float) -> None:
        """Wait for a relief of the disk in progress, at most `timeout` seconds."""
        relief = self._relief
        if relief is not None:
            relief.join(timeout)

    def admit(self, appends: Sequence[pa.LargeBinaryArray]) -> None:
        """Wait as long as the mode requires before `appends` may go to the log.

        Raises RateLimited. Then nothing was appended.
        """
        control = self.control
        if control.is_unrestricted() or not any(carries_rows(values) for values in appends):
            return
        wait = control.admit(sum(values.nbytes for values in appends), now=self._clock())
        if wait > 0:
            self._closed.wait(wait)

    def _follow_settings(self) -> None:
        """Take over limits that were changed while the host runs; those that exclude one another are left out."""
        found = self._live.current()
        if found is self._limited_by:
            return
        self._limited_by = found
        try:
            self.control.change_limits(limits_of(found))
        except InvalidSettings as error:
            _log.warning("flow control continues with its former limits: %s", error)

    def sample(self) -> Mode:
        """Take all readings once, update the mode and return it. Starts to relieve the disk if due."""
        now = self._clock()
        self._follow_settings()
        mode = self.control.observe(self._readings(now), now=now)
        under_way = self._relief is not None and self._relief.is_alive()
        if self.control.level(DISK) > Level.CALM and not under_way and now - self._relieved >= self._relief_pause:
            self._relieved = now
            # In its own thread: it waits for the flusher while the disk keeps filling.
            self._relief = threading.Thread(target=self._relieve, name="disk-relief", daemon=True)
            self._relief.start()
        self._show()
        return mode

    def run_once(self) -> None:
        self.sample()

    def _readings(self, now: float) -> dict[str, float]:
        wanted = {mark.name for mark in self.control.limits.watermarks}
        found: dict[str, float] = {}
        if MEMORY in wanted:
            found[MEMORY] = memory_used_fraction()
        if DISK in wanted:
            found[DISK] = self._free()
        if LAG in wanted:
            visible = self._visible()
            found[LAG] = self._lag.seconds(visible, self._checkpoints(visible), now=now)
        return found

    def _free(self) -> float:
        return float(shutil.disk_usage(self._settings.data_dir).free)

    def _visible(self) -> dict[str, int]:
        """Return, by followed PChannel, the newest tick that a reader can see. Costs the VChannels that changed."""
        found = {}
        for name, state in self._host.states().items():
            before, newest = self._newest.get(name, (ChannelState.new(name), 0))
            changed = map(state.vchannels.get, state.vchannels.changed_keys(before.vchannels))
            newest = max([newest, *(channel.mvcc for channel in changed if channel is not None)])
            self._newest[name] = state, newest
            found[name] = newest
        return found

    def _checkpoints(self, visible: Mapping[str, int] = MappingProxyType({})) -> Mapping[str, Checkpoint]:
        """Return the flusher's checkpoints, reading them only if there are new ones.

        If they have all `visible` ticks, new ones would change nothing, and the store is not asked for them.
        """
        known = self._read[1]
        if self._table is None:
            self._table = open_table(self._settings.checkpoints_uri)
        elif visible and all(name in known and known[name].time_tick >= tick for name, tick in visible.items()):
            self._table.poll()
        else:
            self._table.refresh()
        version = -1 if self._table is None else self._table.version
        if version != self._read[0]:
            self._read = version, read_checkpoints(self._table)
        return self._read[1]

    def _relieve(self) -> None:
        """FlushAll, checkpoint, truncate, as far as possible now."""
        _log.warning("the disk is filling up: flushing, and truncating the log up to the checkpoints")
        try:
            blocks = failed_critical_expectations(self._settings)
            if blocks:
                _log.warning("the log keeps all entries: critical expectations are failing (%s)", ", ".join(blocks))
                return
            freed = self._truncate_flushed(self._flush_all())
        except MAINTENANCE_ERRORS:
            _log.exception("cannot relieve the disk; retrying in %.0f s", self._relief_pause)
            return
        _log.info("truncation freed %d bytes of the log", freed)

    def _flush_all(self) -> dict[str, int]:
        """Append a FlushAll to every open PChannel. Returns their ticks."""
        ticks = {}
        for name, state in self._host.states().items():
            if state.term:
                entry = encode_entry([builders.flush_all(term=state.term)])
                ticks[name] = self._host.append(name, entry, deadline=FLUSH_DEADLINE).result().time_tick
        return ticks

    def _truncate_flushed(self, ticks: Mapping[str, int]) -> int:
        """Truncate repeatedly until the flusher passes `ticks` or FLUSH_DEADLINE ends. Returns the bytes freed."""
        end, freed = Deadline.after(FLUSH_DEADLINE), 0
        while True:
            checkpoints = self._checkpoints()
            flushed = all(name in checkpoints and checkpoints[name].time_tick >= tick for name, tick in ticks.items())
            if WalTable.exists(self._settings.wal_uri):
                for each in truncate_log(self._settings, self._service):
                    freed += each.freed_bytes
                    if self._metrics is not None:
                        self._metrics.truncated_bytes_total.labels(each.pchannel).inc(each.freed_bytes)
            if flushed or end.expired() or self._closed.wait(POLL_SECONDS):
                return freed

    def _show(self) -> None:
        if self._metrics is None:
            return
        found: dict[str, Any] = self.control.describe()
        for mode in Mode:
            self._metrics.wal_rate_limit_state.labels(str(mode)).set(float(found["mode"] == str(mode)))
        self._metrics.wal_rate_limit_bytes_per_second.set(-1.0 if found["rate"] is None else found["rate"])
        self._metrics.wal_rate_limit_refused.set(found["refused"])
        self._metrics.wal_rate_limit_delayed.set(found["delayed"])
        for name, reading in found["readings"].items():
            self._metrics.wal_rate_limit_reading.labels(name).set(reading)


class FlushLag:
    """Measures how long data waits to be flushed, by the times of our own observations: no clocks are compared."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def seconds(self, visible: Mapping[str, int], checkpoints: Mapping[str, Checkpoint], *, now: float) -> float:
        """Return the longest wait of all PChannels, given each one's newest visible tick and checkpoint."""
        longest = 0.0
        for name, tick in visible.items():
            seen = self._seen.setdefault(name, deque())
            if not seen or tick > seen[-1][1]:
                seen.append((now, tick))
            done = checkpoints[name].time_tick if name in checkpoints else 0
            while seen and seen[0][1] <= done:
                seen.popleft()
            if len(seen) > _SAMPLES:  # thin the middle: the oldest sample gives the lag, the newest detects changes
                self._seen[name] = seen = deque([seen[0], *list(seen)[1:-1:2], seen[-1]])
            if seen:
                longest = max(longest, now - seen[0][0])
        return longest


_SAMPLES: Final = 512


def carries_rows(values: pa.LargeBinaryArray) -> bool:
    """Return whether entries hold a message that changes rows. Entries that do not decode count, since the log stores
    them.
    """
    count = len(values)
    ids = pa.array(np.arange(count, dtype=np.int64))
    zero = pa.array(np.zeros(count, dtype=np.int64))
    decoded = decode_entries(pa.RecordBatch.from_arrays([zero, ids, zero, values], schema=ENTRY_SCHEMA))
    kinds = decoded.column("type").unique().to_pylist()
    flags = [flags_of(kind) for kind in kinds]
    return any(each is None or Flag.DML in each for each in flags)


def memory_used_fraction() -> float:
    """Return the fraction of memory in use that cannot be reclaimed, of the machine or of this control group."""
    machine = psutil.virtual_memory()
    used = 1.0 - machine.available / machine.total
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            held = int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            used = max(used, held / int(limit))
    except (OSError, ValueError):
        pass  # no control groups, or an unknown version: use the machine's figure
    return used
