"""Compaction: small files and segments into larger ones, deletes folded in, files clustered, VACUUM.

Safe while the streaming jobs run, and behind them in line: this process has a lower priority. What it found and did is its
result; --params '{"dry_run": true}' only says what would be done.
"""

from __future__ import annotations

import sys

from millrace.ops.compaction.params import CompactionParams
from millrace.ops.compaction.run import run
from millrace.ops.entry import run_spark
from millrace.ops.priority import stand_behind

if __name__ == "__main__":
    stand_behind()
    sys.exit(run_spark("compaction", CompactionParams, run, doc=__doc__))
