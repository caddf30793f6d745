"""The limits of a worker on its machine, from its pipeline's resources, and its usage.

On Spark, the usage includes the child processes, which do the work.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import NamedTuple

import psutil

from millrace.flows.declare.worker import Resources


def hold_to(resources: Resources) -> None:
    """Restrict this process, and those that it starts, to `resources.cpus` of the cores that it may use."""
    mine = sorted(os.sched_getaffinity(0))
    cores = min(len(mine), math.ceil(resources.cpus))
    # Choose cores by process id, so that several workers of a machine do not all use the same ones.
    first = os.getpid() % len(mine)
    os.sched_setaffinity(0, {mine[(first + place) % len(mine)] for place in range(cores)})


class Taken(NamedTuple):
    """The resources that a process uses, with its child processes if they are counted."""

    cpu_seconds: float
    """Since their start, including child processes that have ended."""
    memory_bytes: int
    """Resident memory. Pages that several processes share (as Spark's Python workers do) count once."""
    jvm_bytes: int
    """The part of a JVM, whose heap has its own setting (spark_memory)."""


def taken_by(process: psutil.Process, *, below: bool) -> Taken:
    """Return the resources that `process` uses now, alone or with the processes `below` it."""
    cpu, memory, jvm = 0.0, 0, 0
    for each in [process, *(process.children(recursive=True) if below else ())]:
        with suppress(psutil.Error):  # it has ended in the meantime
            with each.oneshot():
                used = sum(each.cpu_times()[:4])
                resident = each.memory_full_info().pss if below else each.memory_info().rss
                java = each.name() == "java"
            cpu, memory, jvm = cpu + used, memory + resident, jvm + resident * java
    return Taken(cpu, memory, jvm)


def over_memory(resources: Resources, resident: int) -> str:
    """Describe that `resident` bytes exceed the memory limit; empty if they do not."""
    limit = resources.memory_mib << 20
    return (
        f"the worker uses {resident >> 20} MiB, and resources.memory_mib is {resources.memory_mib}"
        if resident > limit
        else ""
    )
