"""A supervised query without Spark: step by step, with time that passes when told to."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client import CollectorRegistry

from millrace.base.metrics import Metrics
from millrace.node.range.batches import Batches
from millrace.node.range.definition import Definition, run_range
from millrace.node.range.schedule import START, Offset, Schedule, Stalls
from tests.node.range.lists import Clock


class Host:
    """One process of a definition's, from its start on."""

    def __init__(self, definition: Definition[Any, Any]) -> None:
        self.definition = definition
        definition.prepare()
        self.clock = Clock()
        stalls = Stalls(clock=self.clock, sleep=self.clock.sleep)
        self.schedule = Schedule(definition.planner(), parked=definition.parked, stalls=stalls)
        self.batches = Batches(definition, metrics=Metrics(registry=CollectorRegistry()))
        self.offset: Offset = START

    def step(self) -> list[str]:
        """One micro-batch; the channels that were planned."""
        following = self.schedule.latest(self.offset, max_bytes=self.definition.max_bytes)
        if following == self.offset:
            return []
        self.offset = following
        plans = self.schedule.plan(self.offset)
        self.batches.settle([run_range(self.definition, plan) for plan in plans])
        return [plan.channel for plan in plans]

    def progress(self) -> dict[str, Any]:
        """What it said last."""
        path = self.definition.settings.progress_path(self.definition.name)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def close(self) -> None:
        self.schedule.close()
