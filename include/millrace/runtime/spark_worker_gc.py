"""What Spark's Python workers collect behind each task: not our modules.

Spark's worker daemon runs a full garbage collection after each task (``pyspark/daemon.py``). It looks at each object of
each module that is imported, some hundred thousand with Arrow and delta-rs: more CPU than all else that a small
micro-batch's task takes, and at the same time as the driver commits what the task wrote. Objects that stand once a task
is done are modules, classes and connections.
"""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_modules(source: str) -> None:
    """Have later collections of this process leave out what it holds now. To be called at the end of a task of
    `source`.

    Does something once for each `source`: another one's first task imports more. What is let go later is freed all the
    same, unless it is part of a cycle.
    """
    gc.collect()
    gc.freeze()
