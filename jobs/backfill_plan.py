"""Plan of a backfill: the slices of a range and the tick they are read at, as parameters for a run of each; writes nothing.

python jobs/backfill_plan.py --params '{"table": "flights_hourly", "start": "2013-01-01T00:00Z", "end": "2013-02-01T00:00Z"}'
"""

from __future__ import annotations

import sys

from millrace.ops.backfill.params import BackfillParams
from millrace.ops.backfill.run import plan
from millrace.ops.entry import run_spark

if __name__ == "__main__":
    sys.exit(run_spark("backfill-plan", BackfillParams, plan, doc=__doc__))
