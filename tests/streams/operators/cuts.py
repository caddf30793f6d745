"""A stream cut anyhow: the same rows in batches, in an order that a watermark of that delay forgives."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.operator import Operator

Row = dict[str, Any]


@st.composite
def disordered(draw: st.DrawFn, rows: list[Row], delay: int) -> list[list[Row]]:
    """`rows` in batches, each behind at most `delay` of what came before it."""
    jittered = sorted(rows, key=lambda row: row["t"] + draw(st.integers(0, delay)))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=5)))
    return [jittered[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


def streamed(
    operator: Operator, schema: pa.Schema, batches: list[list[Row]], delay: int, shards: int = 1
) -> tuple[list[Row], list[Row], int]:
    """Answers, what went to the side, and how many rows were taken."""
    run = Run(operator, schema, delay, shards)
    steps = [run.batch(pa.Table.from_pylist(each, schema)) for each in batches]
    steps.append(run.finish())
    return (
        [row for each in steps for row in each.output.to_pylist()],
        [row for each in steps for row in each.late.to_pylist()],
        sum(each.counts.taken for each in steps),
    )


def alike(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows without an order."""
    return sorted(tuple(f"{name}={row[name]!r}" for name in sorted(row)) for row in rows)
