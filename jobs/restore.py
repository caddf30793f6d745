"""Restore: the rows of a collection at a time tick (or a moment) become a new collection.

    python jobs/restore.py --params '{"collection": "flights", "into": "flights_noon", "at": "2026-11-21T12:00:00Z"}'

"dry_run": true only checks that the moment lies within what can be read, and counts the rows (docs/restore.md).
"""

from __future__ import annotations

import sys

from millrace.ops.entry import run_spark
from millrace.ops.restore.params import RestoreParams
from millrace.ops.restore.run import run

if __name__ == "__main__":
    sys.exit(run_spark("restore", RestoreParams, run, doc=__doc__))
