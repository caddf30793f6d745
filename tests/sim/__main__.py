"""Replay seeds: ``PYTHONPATH=include python -m tests.sim [members|tasks|tasks-by-key] SEED...``.

Each with its events, faults, rows and broadcasts: of the cluster, or of a consumer group's members or a work queue's
tasks.
"""

from __future__ import annotations

import sys

from tests.sim import members, tasks
from tests.sim.run import play

kind, seeds = (sys.argv[1], sys.argv[2:]) if sys.argv[1:] and not sys.argv[1].isdecimal() else ("", sys.argv[1:])
for seed in map(int, seeds):
    if kind == "":
        outcome = play(seed)
        faults = ", ".join(f"{name} {count}" for name, count in sorted(outcome.faults.items()))
        print(f"{seed}: {outcome.events} events, {outcome.rows} rows, {outcome.broadcasts} broadcasts; {faults}")
        continue
    world = {
        "members": members.play,
        "tasks": tasks.play,
        "tasks-by-key": lambda seed: tasks.play(seed, order="key"),
    }[kind](seed)
    happened = ", ".join(f"{name} {count}" for name, count in sorted(world.events.items()))
    again = sum(count > 1 for count in world.times.values())
    print(f"{seed}: {len(world.times)} processed, {again} of them again; {happened}")
