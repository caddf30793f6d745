"""What may wait has a lower priority, and so has its session where it leads one.

The kernel may rank sessions before processes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from millrace.runtime.process_setup import NICE

SAY = """
import os
from pathlib import Path
from millrace.runtime.process_setup import lower_priority

def group():
    file = Path("/proc/self/autogroup")
    words = file.read_text().split() if file.exists() else []
    return words[-1] if words else "none"

before = group()
lower_priority()
print(os.nice(0), before, group())
"""


@pytest.mark.parametrize("leads", [True, False])
def test_a_job_in_a_session_of_its_own_lowers_it_and_leaves_others_alone(leads: bool) -> None:
    said = subprocess.run(
        [sys.executable, "-c", SAY], start_new_session=leads, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    nice, before, after = said.split()
    assert int(nice) >= NICE
    # A kernel without such groups, or one that has them turned off, shows none.
    assert after == (str(NICE) if leads and before != "none" else before)
