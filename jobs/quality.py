"""Data quality: Great Expectations over WAL, segments, checkpoints and collections, for what came since the last check.

python jobs/quality.py --params '{"tables": ["wal"], "start": "2026-01-01T00:00:00Z"}'
"""

from __future__ import annotations

import sys

from millrace.ops.entry import run_spark
from millrace.ops.quality.params import QualityParams
from millrace.ops.quality.run import run

if __name__ == "__main__":
    sys.exit(run_spark("quality", QualityParams, run, doc=__doc__))
