"""What Spark's tasks write and Millrace commits, with the tables in a bucket: backfill, compaction, Z-order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import millrace
from tests.s3_server import Faults, bucket

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slices_compaction_and_z_order_on_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own: a session for a bucket has other jars and another environment than the tests' one."""
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    with Faults() as faults, bucket(monkeypatch, faults.at) as uri:
        paths = os.pathsep.join([str(Path(millrace.__file__).parent.parent), str(ROOT)])
        process = [sys.executable, "-m", "tests.operations.rewrites_in_store_process", str(tmp_path / "data")]
        done = subprocess.run(
            [*process, f"{uri}/tables"],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert not list((tmp_path / "data").rglob("*.parquet"))
