"""Backfill: rebuilds a range of a derived table from its source, slice by slice, each in one commit.

    python jobs/backfill.py --params '{"table": "flights_hourly", "start": "2013-01-01T00:00Z", "end": "2013-02-01T00:00Z"}'

The parameters are those of millrace.ops.backfill.params.BackfillParams (docs/backfill.md).
"""

from __future__ import annotations

import sys

from millrace.ops.backfill.params import BackfillParams
from millrace.ops.backfill.run import run
from millrace.ops.entry import run_spark

if __name__ == "__main__":
    sys.exit(run_spark("backfill", BackfillParams, run, doc=__doc__))
