"""Recovery: find what is wrong between log, WAL and collections; with "mode": "repair", repair it and prove the repair.

    python jobs/recovery.py [--params '{"mode": "diagnose|rehearse|repair", "depth": "quick|full"}'] [--result FILE]

The report names each finding, what became of it, and what a second look found (docs/operating.md, "Recovery").
"""

from __future__ import annotations

import sys

from millrace.ops.entry import run_plain
from millrace.ops.recovery.params import RecoveryParams
from millrace.ops.recovery.run import run

if __name__ == "__main__":
    sys.exit(run_plain(RecoveryParams, run, doc=__doc__))
