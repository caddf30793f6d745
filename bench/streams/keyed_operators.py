"""Keyed operators in one process beside Bytewax on one worker, and the size of their state as events go on."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import bytewax.operators as op
import pyarrow as pa
from bytewax.dataflow import Dataflow
from bytewax.testing import TestingSink, TestingSource, run_main

from bench.streams.events import LAST, RISING, SECOND, batches, events
from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.operator import Operator
from millrace.streams.operators.joins import AsOf, Distinct
from millrace.streams.operators.patterns import Patterns
from millrace.streams.operators.windows import Windows

Step = Callable[[Any, Any], tuple[Any, list[Any]]]


def compare_with_bytewax(operator: Operator, *, count: int, keys: int, size: int, pairs: int) -> dict[str, Any]:
    """Return events/s of both, alternating, and verify that they agree. Bytewax gets its events as Python objects."""
    step: Step = _rising if isinstance(operator, Patterns) else _last
    items = [
        (str(row["k"]), (row["t"], row["v"], row["right"]))
        for each in batches(count, keys=keys, size=size)
        for row in each.to_pylist()
    ]
    given = list(batches(count, keys=keys, size=size))
    ours, theirs = [], []
    for _ in range(pairs):
        mine, one = timed(lambda: in_process(operator, given))
        found, other = timed(lambda: _bytewax(items, step))
        ours.append(one)
        theirs.append(other)
        assert Counter(mine) == Counter(found), "both answer the same question"
    return {
        "events": count,
        "keys": keys,
        "batch": size,
        "answers": len(mine),
        "ours_per_s": round(count / statistics.median(each[0] for each in ours)),
        "bytewax_per_s": round(count / statistics.median(each[0] for each in theirs)),
        "ratio": round(statistics.median(b[0] / a[0] for a, b in zip(ours, theirs, strict=True)), 2),
        "ours_cpu_us": round(statistics.median(each[1] for each in ours) / count * 1e6, 2),
        "bytewax_cpu_us": round(statistics.median(each[1] for each in theirs) / count * 1e6, 2),
    }


def timed(work: Callable[[], list[tuple[Any, ...]]]) -> tuple[list[tuple[Any, ...]], tuple[float, float]]:
    """Return the result of `work`, its seconds, and this process's CPU seconds, which other load changes least."""
    clock, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, (time.perf_counter() - clock, time.process_time() - cpu)


def in_process(operator: Operator, given: list[pa.Table]) -> list[tuple[Any, ...]]:
    """The operator's answers, as rows."""
    run = Run(operator, given[0].schema, 0)
    steps = [run.batch(each) for each in given] + [run.finish()]
    found = pa.concat_tables([each.output for each in steps])
    return list(zip(*(found.column(each).to_pylist() for each in found.column_names), strict=True))


def _bytewax(items: list[tuple[str, Any]], step: Step) -> list[tuple[Any, ...]]:
    flow = Dataflow("beside")
    found: list[tuple[str, tuple[Any, ...]]] = []
    read = op.input("read", flow, TestingSource(items, batch_size=1000))
    op.output("write", op.stateful_flat_map("step", read, step), TestingSink(found))
    run_main(flow)  # type: ignore[no-untyped-call]
    return [(int(key), *rest) for key, rest in found]


def _rising(
    state: tuple[int, ...] | None, event: tuple[int, int, bool]
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    last = (*(state or ()), event[1])
    if len(last) < 3:
        return last, []
    one, two, three = last
    return (two, three), [(one, three)] if one < two < three else []


def _last(state: int | None, event: tuple[int, int, bool]) -> tuple[int | None, list[tuple[int, int | None]]]:
    at, value, right = event
    return (value, []) if right else (state, [(at, state)])


def state_size(*, count: int, keys: int, size: int) -> dict[str, Any]:
    """Rows and bytes of each operator's state, at tenths of the events, and events a second in each tenth."""
    operators: dict[str, Operator] = {
        "windows": Windows(keys=("k",), time="t", size=SECOND, aggregates={"n": ("count", None), "v": ("sum", "v")}),
        "sessions": Windows(keys=("k",), time="t", gap=SECOND, aggregates={"n": ("count", None)}),
        "pattern": Patterns(RISING.query, "t", forget=600 * SECOND),
        "as_of": AsOf(LAST.keys, "t", "right", LAST.left, LAST.right, tolerance=600 * SECOND),
        "distinct": Distinct(("k",), "t", within=60 * SECOND),
    }
    found: dict[str, Any] = {}
    for name, operator in operators.items():
        run = Run(operator, events(0, 1, keys=keys).schema, SECOND)
        rows, sizes, rates = [], [], []
        for tenth in range(10):
            begun = time.perf_counter()
            for first in range(tenth * count // 10, (tenth + 1) * count // 10, size):
                run.batch(events(first, size, keys=keys))
            rates.append(round(count / 10 / (time.perf_counter() - begun)))
            rows.append(run.state_rows)
            sizes.append(run.state_bytes)
        found[name] = {"rows": rows, "bytes": sizes, "events_per_s": rates}
    return {"events": count, "keys": keys, **found}
