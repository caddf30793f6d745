"""Operators in the calling process, batch by batch: the same functions that tasks run, over one shard or several, without a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa

from millrace.streams.keyed.operator import END, Counts, Operator, State, Step, times_of, units
from millrace.streams.keyed.shards import shards_of


@dataclass
class Run:
    """A stream of batches through an operator. `delay`: the watermark is that far behind the newest time of the batches before."""

    operator: Operator
    schema: pa.Schema
    delay: timedelta | int
    shards: int = 1
    newest: int | None = None
    states: dict[int, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        self.warnings = self.operator.check(self.schema)

    def batch(self, rows: pa.Table) -> Step:
        """Take a batch; the answers of all shards together."""
        step = self._advance(rows, None if self.newest is None else self.newest - units(self.delay))
        times, valid = times_of(rows, self.operator.time)
        if valid.any():
            newest = int(times[valid].max())
            self.newest = newest if self.newest is None else max(self.newest, newest)
        return step

    def finish(self) -> Step:
        """The stream has ended: what waited is answered."""
        return self._advance(self.schema.empty_table(), END)

    @property
    def state_bytes(self) -> int:
        """Of all tables of the state."""
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
            step = self.operator.advance(self.states.get(shard, {}), part, watermark)
            self.states[shard] = step.state
            yield step
