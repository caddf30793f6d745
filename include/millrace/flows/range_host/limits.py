"""The limits of a worker on its machine, from its pipeline's resources, and its usage.

On Spark the usage includes the processes below it, which do the work there.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import NamedTuple

import psutil

from millrace.flows.declare.worker import Resources


def hold_to(resources: Resources) -> None:
    """Run on so many cores of those that this process may use, from now on, and so will what it starts."""
    mine = sorted(os.sched_getaffinity(0))
    cores = min(len(mine), math.ceil(resources.cpus))
    # Which of them: by process, so that several workers of a machine are not all on the same.
    first = os.getpid() % len(mine)
    os.sched_setaffinity(0, {mine[(first + place) % len(mine)] for place in range(cores)})


class Taken(NamedTuple):
    """By a process, and those below it where they are counted."""

    cpu_seconds: float
    """Since they began, with those that ended."""
    memory_bytes: int
    """Resident; what several processes share, as those that Spark forks for Python do, counts once."""
    jvm_bytes: int
    """Of these what a JVM takes, whose heap has a setting of its own (spark_memory)."""


def taken_by(process: psutil.Process, *, below: bool) -> Taken:
    """What `process` takes now, with the processes `below` it or alone."""
    cpu, memory, jvm = 0.0, 0, 0
    for each in [process, *(process.children(recursive=True) if below else ())]:
        with suppress(psutil.Error):  # it has ended meanwhile
            with each.oneshot():
                used = sum(each.cpu_times()[:4])
                resident = each.memory_full_info().pss if below else each.memory_info().rss
                java = each.name() == "java"
            cpu, memory, jvm = cpu + used, memory + resident, jvm + resident * java
    return Taken(cpu, memory, jvm)


def over_memory(resources: Resources, resident: int) -> str:
    """In words, that `resident` bytes are more than the limit; "" where they are not."""
    limit = resources.memory_mib << 20
    return (
        f"the worker takes {resident >> 20} MiB, and resources.memory_mib is {resources.memory_mib}"
        if resident > limit
        else ""
    )
