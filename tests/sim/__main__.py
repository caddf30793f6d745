"""Replay seeds: ``PYTHONPATH=include python -m tests.sim SEED...``.

Each with its events, faults, rows and broadcasts.
"""

from __future__ import annotations

import sys

from tests.sim.run import play

for seed in map(int, sys.argv[1:]):
    outcome = play(seed)
    faults = ", ".join(f"{name} {count}" for name, count in sorted(outcome.faults.items()))
    print(f"{seed}: {outcome.events} events, {outcome.rows} rows, {outcome.broadcasts} broadcasts; {faults}")
