"""A disk that fills up under load.

Relieved, slowed, refused, then really full, and nothing acknowledged is lost or doubled.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_small_disk_is_filled_to_the_last_byte_and_each_acknowledged_row_is_there_once(tmp_path: Path) -> None:
    program = shlex.quote(str(Path(__file__).with_name("fill_disk.py")))
    place, python = shlex.quote(str(tmp_path)), shlex.quote(sys.executable)
    script = f"mount -t tmpfs -o size=208m tmpfs {place} && exec {python} {program} {place}"
    # A mount namespace of its own: the file system goes with the process, whatever becomes of it.
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["truncated"], "the log was not truncated on the way"
    assert seen["delayed"] > 0
    assert seen["refused"].startswith("appends are refused: free disk bytes is ")
    assert seen["errno"] == errno.ENOSPC
    assert seen["without room"], "every append found room on a full disk"
    assert "No space left" in seen["without room"][0]
    assert seen["node without room"] == "TABLE_UNAVAILABLE"
    assert seen["acknowledged"] > 100
    assert seen["each once"]
