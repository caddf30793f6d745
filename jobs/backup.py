"""Backup: the whole deployment, while it runs, into a folder of backups (docs/operating.md, "Backup").

    python jobs/backup.py --params '{"to": "/mnt/backups/millrace", "keep": 7}'

"dry_run": true only says what would be copied. Needs no Spark.
"""

from __future__ import annotations

import os
import sys

from millrace.ops.backup.params import BackupParams
from millrace.ops.backup.run import run
from millrace.ops.entry import run_plain

if __name__ == "__main__":
    os.nice(10)  # what copies may wait, what streams may not
    sys.exit(run_plain(BackupParams, run, doc=__doc__))
