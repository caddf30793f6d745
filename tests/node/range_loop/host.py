"""A supervised query without Spark: step by step, with time that passes when told to."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client import CollectorRegistry

from millrace.base.metrics import Metrics
from millrace.node.range_loop.batch_driver import BatchDriver
from millrace.node.range_loop.definition import LoopDefinition, run_range
from millrace.node.range_loop.schedule import START, BatchOffset, RangeSchedule, StallBackoff
from tests.node.range_loop.lists import Clock


class Host:
    """One process of a definition's, from its start on."""

    def __init__(self, definition: LoopDefinition[Any, Any]) -> None:
        self.definition = definition
        definition.prepare()
        self.clock = Clock()
        stalls = StallBackoff(clock=self.clock, sleep=self.clock.sleep)
        self.schedule = RangeSchedule(definition.planner(), parked=definition.parked, stalls=stalls)
        self.batches = BatchDriver(definition, metrics=Metrics(registry=CollectorRegistry()))
        self.offset: BatchOffset = START

    def step(self) -> list[str]:
        """One micro-batch; the channels that were planned."""
        following = self.schedule.next_offset(self.offset, max_bytes=self.definition.max_bytes)
        if following == self.offset:
            return []
        self.offset = following
        plans = self.schedule.plan(self.offset)
        self.batches.commit([run_range(self.definition, plan) for plan in plans])
        return [plan.channel for plan in plans]

    def progress(self) -> dict[str, Any]:
        """What it said last."""
        path = self.definition.settings.progress_path(self.definition.name)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def close(self) -> None:
        self.schedule.close()
