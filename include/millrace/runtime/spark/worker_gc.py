"""Keep the modules of Spark's Python workers out of garbage collection.

Spark's worker daemon runs a full garbage collection after each task (``pyspark/daemon.py``). It visits each object of
each imported module, some hundred thousand with Arrow and delta-rs. That costs more CPU than the rest of a small
micro-batch's task, at the moment at which the driver commits what the task wrote. The objects that exist once a task is
done are modules, classes and connections: nothing of them will be garbage.
"""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_modules(source: str) -> None:
    """Exclude the objects that this process holds from later collections. Call it at the end of a task of `source`.

    Acts once for each `source`: the first task of another source imports more. An excluded object that loses its last
    reference is freed all the same, unless it is part of a cycle.
    """
    gc.collect()
    gc.freeze()
