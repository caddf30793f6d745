"""What may wait has a lower priority, and so has its session where it leads one: the kernel may rank sessions before processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millrace.ops.priority import NICE

AUTOGROUP = Path("/proc/self/autogroup")
SAY = (
    "import os; from pathlib import Path; from millrace.ops.priority import stand_behind; stand_behind();"
    "group = Path('/proc/self/autogroup'); print(os.nice(0), group.read_text().split()[-1] if group.exists() else 'none')"
)


def said(*, leads: bool) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", SAY], start_new_session=leads, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


@pytest.mark.parametrize("leads", [True, False])
def test_a_job_in_a_session_of_its_own_lowers_it_and_leaves_others_alone(leads: bool) -> None:
    before = AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none"
    nice, group = said(leads=leads)
    assert int(nice) >= NICE
    assert group == (str(NICE) if leads and before != "none" else before)
