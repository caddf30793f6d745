"""Operators over numbered batches, exactly once: repeating a batch, after any crash, is idempotent."""

from __future__ import annotations

from datetime import timedelta

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.streams.keyed.clock import Clock
from millrace.streams.keyed.operator import Operator
from millrace.streams.keyed.shards import shards_of
from millrace.streams.keyed.store import Advanced, KeyedTable


class DurableRun:
    """A stream in the calling process whose answers, late rows and state are a table at `uri`.

    Processes may restart, and two may run at a time: only one commit succeeds. `warnings` say what lets the state grow.
    Raises InvalidArgument.
    """

    def __init__(
        self,
        uri: str,
        operator: Operator,
        schema: pa.Schema,
        *,
        delay: timedelta | int,
        shards: int = 1,
        max_ahead: timedelta | None = None,
    ) -> None:
        self.warnings = operator.check(schema)
        self._clock = Clock(delay, max_ahead)
        self._clock.check(operator, schema)
        self.table = KeyedTable(uri, operator, schema, placement=f"xxh64/{shards}")
        self._operator, self._schema, self._shards = operator, schema, shards

    @property
    def next_batch(self) -> int:
        """Number of the next batch."""
        return self.table.base().batch + 1

    def batch(self, number: int, rows: pa.Table) -> bool:
        """Take the batch of that number; return False if it, or a later one, was taken before.

        Raises CommitFenced if another process committed meanwhile: ask :attr:`next_batch`.
        """
        return self._take(number, rows, ended=False)

    def finish(self, number: int) -> bool:
        """End the stream: answer waiting rows as the batch of that number, and accept no later batch.

        Returns False if that batch was taken before.
        """
        return self._take(number, self._schema.empty_table(), ended=True)

    def _take(self, number: int, rows: pa.Table, *, ended: bool) -> bool:
        base = self.table.base()
        if number <= base.batch:
            return False
        if base.ended:
            raise InvalidArgument(
                f"the stream of {self.table.table.uri} ended with batch {base.batch} and accepts no further batch"
            )
        taken = Advanced()
        for shard, part in enumerate(shards_of(rows, self._operator.keys, self._shards)):
            taken += self.table.advance(base, shard, part, self._clock, ended=ended)
        self.table.commit(base, number, taken, ended=ended)
        return True
