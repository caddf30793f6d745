"""Release what quality blocked: a person accepts failed expectations, by the ids of their blocks.

python jobs/quality_release.py --params '{"blocks": ["0123456789ab"], "by": "somebody"}'
"""

from __future__ import annotations

import sys

from millrace.ops.entry import run_plain
from millrace.ops.quality.params import ReleaseParams
from millrace.ops.quality.release import run

if __name__ == "__main__":
    sys.exit(run_plain(ReleaseParams, run, doc=__doc__))
