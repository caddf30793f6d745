"""What a worker may take of its machine: cores and memory, as its pipeline's resources say."""

from __future__ import annotations

import math
import os

from millrace.pipelines.model.pipeline import Resources


def hold_to(resources: Resources) -> None:
    """Run on so many cores of those that this process may use, from now on."""
    mine = sorted(os.sched_getaffinity(0))
    cores = min(len(mine), math.ceil(resources.cpus))
    # Which of them: by process, so that several workers of a machine are not all on the same.
    first = os.getpid() % len(mine)
    os.sched_setaffinity(0, {mine[(first + place) % len(mine)] for place in range(cores)})


def over_memory(resources: Resources, resident: int) -> str:
    """In words, that `resident` bytes are more than the limit; "" where they are not."""
    limit = resources.memory_mib << 20
    return (
        f"the worker takes {resident >> 20} MiB, and resources.memory_mib is {resources.memory_mib}"
        if resident > limit
        else ""
    )
