"""``make run STORE=s3``: every check holds, on an S3 of this host, and the disk's digests are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.settings import Settings


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first run of a machine builds the store
def test_the_demo_on_an_object_store_equals_a_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millrace.demo", "--store=s3", "--rows=5000", "--seconds=3", "--times=1"]
    environment = os.environ | Settings.load().environment()
    environment |= {"MILLRACE_DATA": str(tmp_path / "d"), "MILLRACE_TABLES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ the same log gives equal tables on a disk" in done.stdout
    assert not list((tmp_path / "d").glob("wal*")), "no table lies in the data folder"
