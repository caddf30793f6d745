"""A checkpoint run that is killed at any of its steps removes nothing that is needed, and the next run completes it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import millrace
from millrace.base.failpoint import VARIABLE
from millrace.node.flush.definition import flush_to_end
from millrace.operations.checkpoint import recovery_checkpoints
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from tests.operations.log_maker import LOG, Things

RUN = """
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.runtime.progress import Progress
from millrace.base.settings import Settings
settings = Settings.load()
rocksmq = RocksMQSettings(segment_bytes={segment}, spare_files=2, max_entry_bytes={entry})
log = RocksMQ(settings.log_path, settings=rocksmq)
checkpoint(settings, log, CheckpointParams(), Progress())
"""


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("checkpoint.recorded", marks=pytest.mark.slow),
        pytest.param("checkpoint.synced", marks=pytest.mark.slow),
        "truncation.after",
        pytest.param("base.written", marks=pytest.mark.slow),
        pytest.param("wal_trim.recorded", marks=pytest.mark.slow),
        "wal_trim.done@2",
    ],
)
def test_a_killed_run_is_completed_by_the_next(place: str, tmp_path: Path) -> None:
    things = Things(tmp_path)
    things.fill(3, size=5000)
    settings = replace(things.settings, wal_retention=0.001)
    rows = sorted(read_arrow(settings, 1)["id"].to_pylist())
    things.close()
    env = {**os.environ, **settings.environment(), VARIABLE: place}
    env["PYTHONPATH"] = str(Path(millrace.__file__).resolve().parent.parent)
    code = RUN.format(segment=LOG.segment_bytes, entry=LOG.max_entry_bytes)
    killed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert killed.returncode == -9, killed.stderr.decode()
    again = Things.reopened(tmp_path, things)
    try:
        assert sorted(read_arrow(settings, 1)["id"].to_pylist()) == rows
        assert checkpoint(settings, again.log, CheckpointParams(), Progress()).ok
        again.fill(2)
        report = checkpoint(settings, again.log, CheckpointParams(), Progress())
        assert report.ok
        assert all(channel.by_log for channel in report.channels), "the log was not cut before the last checkpoint"
        flush_to_end(settings)
        snapshot, wal = WalSnapshot.open(Path(settings.wal_uri)), WalTable.open(Path(settings.wal_uri))
        assert snapshot is not None
        assert all(verify_channel(snapshot, wal, None, name).ok for name in wal.pchannels())
        assert all(found.ok for found in verify_collections(settings).values())
        assert set(recovery_checkpoints.newest(settings)) == {"p0", "p1"}
        assert len(read_arrow(settings, 1)) > len(rows)
    finally:
        again.close()
