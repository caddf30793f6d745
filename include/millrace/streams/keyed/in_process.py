"""Operators in the calling process, batch by batch: the functions that tasks run, over shards, without a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa

from millrace.streams.keyed.clock import Clock, Newest
from millrace.streams.keyed.operator import END, Counts, Operator, State, Step
from millrace.streams.keyed.shards import shards_of


@dataclass
class Run:
    """A stream of batches through an operator.

    The watermark is `delay` before the newest time of earlier batches. `max_ahead` bounds how far a row's time may be
    ahead of its log time (millrace.streams.keyed.clock).
    """

    operator: Operator
    schema: pa.Schema
    delay: timedelta | int
    shards: int = 1
    max_ahead: timedelta | None = None
    newest: Newest = field(default_factory=Newest)
    states: dict[int, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        self.warnings = self.operator.check(self.schema)
        self._clock = Clock(self.delay, self.max_ahead)
        self._clock.check(self.operator, self.schema)

    def batch(self, rows: pa.Table) -> Step:
        """Take a batch; return the answers of all shards."""
        return self._advance(rows, self._clock.watermark(self.operator, self.newest))

    def finish(self) -> Step:
        """End the stream; return the answers of all waiting rows."""
        return self._advance(self.schema.empty_table(), END)

    @property
    def state_bytes(self) -> int:
        """Bytes of all tables of the state."""
        return sum(table.nbytes for state in self.states.values() for table in state.values())

    @property
    def state_rows(self) -> int:
        return sum(table.num_rows for state in self.states.values() for table in state.values())

    def _advance(self, rows: pa.Table, watermark: int | None) -> Step:
        steps = list(self._steps(rows, watermark))
        return Step(
            pa.concat_tables([each.output for each in steps]),
            {},
            pa.concat_tables([each.late for each in steps]),
            sum((each.counts for each in steps), Counts()),
        )

    def _steps(self, rows: pa.Table, watermark: int | None) -> Iterator[Step]:
        for shard, part in enumerate(shards_of(rows, self.operator.keys, self.shards)):
            step, newest = self._clock.advance(self.operator, self.states.get(shard, {}), part, watermark)
            self.states[shard] = step.state
            self.newest |= newest
            yield step
