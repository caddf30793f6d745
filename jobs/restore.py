"""Restore: the rows of a collection at a time tick (or a moment) become a new collection.

    python jobs/restore.py --params '{"collection": "flights", "into": "flights_noon", "at": "2026-11-21T12:00:00Z"}'

"dry_run": true only checks that the moment lies within what can be read, and counts the rows (docs/restore.md).
"""

from __future__ import annotations

import sys

from millrace.ops.entry import run_plain, spark_session
from millrace.ops.operation import Progress
from millrace.ops.restore.params import RestoreParams
from millrace.ops.restore.run import RestoreReport, run
from millrace.settings import Settings


def restore(settings: Settings, params: RestoreParams, progress: Progress) -> RestoreReport:
    """With a session where there is much to read."""
    return run(settings, params, progress, sessions=lambda: spark_session("restore", settings, progress))


if __name__ == "__main__":
    sys.exit(run_plain(RestoreParams, restore, doc=__doc__))
