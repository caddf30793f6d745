"""Load: the rows of Parquet, CSV or JSON lines files into a collection, each row once.

    python jobs/load_files.py --params '{"collection": "flights", "files": ["/data/*.parquet"], "partition_by": "origin"}'

The parameters are those of millrace.ops.backfill.params.LoadParams (docs/backfill.md). Needs no Spark.
"""

from __future__ import annotations

import sys

from millrace.ops.backfill.load import run
from millrace.ops.backfill.params import LoadParams
from millrace.ops.entry import run_plain

if __name__ == "__main__":
    sys.exit(run_plain(LoadParams, run, doc=__doc__))
