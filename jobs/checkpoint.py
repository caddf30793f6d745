"""Checkpoints: write one of each PChannel, verify it by a replay, then truncate the log and trim the WAL behind them.

python jobs/checkpoint.py --params '{"dry_run": true}'
"""

from __future__ import annotations

import sys

from millrace.ops.checkpoint.params import CheckpointParams
from millrace.ops.checkpoint.run import run
from millrace.ops.entry import run_plain

if __name__ == "__main__":
    sys.exit(run_plain(CheckpointParams, run, doc=__doc__))
