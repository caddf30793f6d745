"""Windows over a stream against plain sums over the whole; nothing is lost: what came was taken or went to the side."""

from __future__ import annotations

import math
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.operator import Counts
from millrace.streams.keyed.shards import shard_numbers
from millrace.streams.operators.windows import Windows
from tests.streams.operators.cuts import Row, alike, disordered, streamed

SCHEMA = pa.schema([("k", pa.utf8()), ("t", pa.int64()), ("v", pa.int64())])
AGGREGATES: dict[str, tuple[str, str | None]] = {
    "n": ("count", None), "known": ("count", "v"), "total": ("sum", "v"), "low": ("min", "v"), "high": ("max", "v"),
    "mean": ("avg", "v"),
}  # fmt: skip
rows_of = st.lists(
    st.fixed_dictionaries(
        {"k": st.sampled_from(["x", "y", None]), "t": st.integers(-5, 40), "v": st.sampled_from([None, 0, 1, 2, 3])}
    ),
    max_size=20,
)


def aggregated(key: str | None, start: int, end: int, rows: list[Row]) -> Row:
    known = [row["v"] for row in rows if row["v"] is not None]
    return {
        "k": key, "window_start": start, "window_end": end, "n": len(rows), "known": len(known),
        "total": sum(known) if known else None,
        "low": min(known, default=None), "high": max(known, default=None),
        "mean": sum(known) / len(known) if known else None,
    }  # fmt: skip


def sized(rows: list[Row], size: int, slide: int) -> list[Row]:
    found: dict[tuple[Any, int], list[Row]] = {}
    for row in rows:
        for start in range(-60, 60):
            if start % slide == 0 and start <= row["t"] < start + size:
                found.setdefault((row["k"], start), []).append(row)
    return [aggregated(key, start, start + size, each) for (key, start), each in found.items()]


def sessions(rows: list[Row], gap: int) -> list[Row]:
    found = []
    for key in {row["k"] for row in rows}:
        mine = sorted((row for row in rows if row["k"] == key), key=lambda row: row["t"])
        open_: list[Row] = []
        for row in mine:
            if open_ and row["t"] >= open_[-1]["t"] + gap:
                found.append(aggregated(key, open_[0]["t"], open_[-1]["t"] + gap, open_))
                open_ = []
            open_.append(row)
        found.append(aggregated(key, open_[0]["t"], open_[-1]["t"] + gap, open_))
    return found


@given(
    st.data(),
    rows_of,
    st.integers(0, 6),
    st.integers(1, 3),
    st.sampled_from([(5, 5), (6, 2), (7, 3), (1, 1), (4, None)]),
)
@profile(max_examples=50)
def test_windows_of_a_stream_are_those_of_the_whole(
    data: st.DataObject, rows: list[Row], delay: int, shards: int, shape: tuple[int, int | None]
) -> None:
    size, slide = shape
    batches = data.draw(disordered(rows, delay))
    operator = Windows(("k",), "t", AGGREGATES, size=size, slide=slide)
    found, late, taken = streamed(operator, SCHEMA, batches, delay, shards)
    assert alike(found) == alike(sized(rows, size, slide or size))
    assert (late, taken) == ([], len(rows))


@given(st.data(), rows_of, st.integers(0, 6), st.integers(1, 3), st.integers(1, 9))
@profile(max_examples=50)
def test_sessions_of_a_stream_are_those_of_the_whole(
    data: st.DataObject, rows: list[Row], delay: int, shards: int, gap: int
) -> None:
    batches = data.draw(disordered(rows, delay))
    operator = Windows(("k",), "t", AGGREGATES, gap=gap)
    found, late, taken = streamed(operator, SCHEMA, batches, delay, shards)
    assert alike(found) == alike(sessions(rows, gap))
    assert (late, taken) == ([], len(rows))


@given(st.data(), rows_of, st.integers(0, 6), st.integers(1, 9))
@profile(max_examples=30)
def test_sessions_are_those_of_the_rows_that_were_not_late_and_never_closer_than_the_gap(
    data: st.DataObject, rows: list[Row], delay: int, gap: int
) -> None:
    found, late, taken = streamed(
        Windows(("k",), "t", AGGREGATES, gap=gap), SCHEMA, data.draw(disordered(rows, 40)), delay
    )
    aside = [{name: row[name] for name in SCHEMA.names} for row in late]
    left = list(rows)
    for row in aside:
        left.remove(row)
    assert alike(found) == alike(sessions(left, gap))
    assert taken == len(left)


def test_a_row_behind_the_watermark_lies_in_an_open_session_or_is_late() -> None:
    run = Run(Windows(("k",), "t", {"n": ("count", None)}, gap=5), SCHEMA, 0)
    run.batch(batch(("x", 0, 1), ("y", 6, 1)))
    assert run.batch(batch(("x", 7, 1))).output.column("window_end").to_pylist() == [5]
    step = run.batch(batch(("x", 3, 1), ("x", 9, 1), ("y", 6, 1)))
    assert step.late.select(["k", "t", "late_by"]).to_pylist() == [{"k": "x", "t": 3, "late_by": 4}]
    assert alike(run.finish().output.to_pylist()) == alike(
        [
            {"k": "x", "window_start": 7, "window_end": 14, "n": 2},
            {"k": "y", "window_start": 6, "window_end": 11, "n": 2},
        ]
    )


@given(st.data(), rows_of, st.sampled_from([(5, 5), (6, 2)]))
@profile(max_examples=50)
def test_in_is_out_and_late_for_any_order(data: st.DataObject, rows: list[Row], shape: tuple[int, int]) -> None:
    batches = data.draw(disordered(rows, 40))
    operator = Windows(("k",), "t", {"n": ("count", None)}, size=shape[0], slide=shape[0])
    found, late, taken = streamed(operator, SCHEMA, batches, 0)
    assert taken + len(late) == len(rows)
    assert sum(row["n"] for row in found) == taken
    starts = [(row["k"], row["window_start"]) for row in found]
    assert len(set(starts)) == len(starts)  # answered once


@given(
    st.data(),
    st.lists(st.tuples(st.sampled_from(["x", "y"]), st.none() | st.integers(0, 40)), max_size=30),
    st.sampled_from(["drop", "side", "correct", "session"]),
    st.integers(0, 3),
)
@profile(max_examples=50)
def test_every_row_that_came_was_taken_late_or_rejected(
    data: st.DataObject, came: list[tuple[str, int | None]], how: Any, delay: int
) -> None:
    shape: dict[str, Any] = {"gap": 3} if how == "session" else {"size": 6, "slide": 2, "late": how}
    run = Run(
        Windows(("k",), "t", {"n": ("count", None)}, **shape, keep=4 if how == "correct" else None), SCHEMA, delay
    )
    at = 0
    while at < len(came):
        size = data.draw(st.integers(1, 8))
        step = run.batch(batch(*((k, t, 1) for k, t in came[at : at + size])))
        counts = step.counts
        assert counts.came == len(came[at : at + size])
        reasons = step.late.column("reason").to_pylist()
        assert reasons.count("no time") == counts.rejected
        if how != "drop":
            assert reasons.count("late") == counts.late
            assert reasons.count("late for a window") == counts.partly_late
        else:
            assert "late" not in reasons
        at += size


@given(st.data(), rows_of, st.sampled_from([(5, 5), (6, 2)]))
@profile(max_examples=50)
def test_with_corrections_the_last_revision_is_the_answer_of_the_whole(
    data: st.DataObject, rows: list[Row], shape: tuple[int, int]
) -> None:
    batches = data.draw(disordered(rows, 40))
    operator = Windows(("k",), "t", AGGREGATES, size=shape[0], slide=shape[1], late="correct", keep=200)
    found, late, taken = streamed(operator, SCHEMA, batches, 0, shards=2)
    newest: dict[tuple[Any, int], Row] = {}
    for row in found:
        at = (row["k"], row["window_start"])
        assert row["revision"] == newest.get(at, {"revision": -1})["revision"] + 1
        newest[at] = row
    meant = sized(rows, *shape)
    assert alike([{name: row[name] for name in row if name != "revision"} for row in newest.values()]) == alike(meant)
    assert (late, taken) == ([], len(rows))


def batch(*rows: tuple[str, int | None, int]) -> pa.Table:
    return pa.Table.from_pylist([{"k": k, "t": t, "v": v} for k, t, v in rows], SCHEMA)


def test_a_late_row_says_for_which_window_and_how_late() -> None:
    run = Run(Windows(("k",), "t", {"n": ("count", None)}, size=10, lateness=3), SCHEMA, 2)
    run.batch(batch(("x", 1, 1), ("x", 25, 1)))
    step = run.batch(batch(("x", 9, 7), ("x", None, 8), ("x", 21, 9), ("x", 12, 6)))
    assert step.output.to_pylist() == [{"k": "x", "window_start": 0, "window_end": 10, "n": 1}]
    assert [(row["v"], row["late_by"], row["window_start"], row["reason"]) for row in step.late.to_pylist()] == [
        (8, 0, None, "no time"), (7, 11, 0, "late"), (6, 8, 10, "late"),
    ]  # fmt: skip
    dropping = Run(Windows(("k",), "t", {"n": ("count", None)}, size=10, late="drop"), SCHEMA, 0)
    dropping.batch(batch(("x", 25, 1)))
    dropped = dropping.batch(batch(("x", 9, 7)))
    assert (dropped.late.num_rows, dropped.counts) == (0, Counts(late=1))


def test_the_state_is_open_windows_alone() -> None:
    run = Run(Windows(("k",), "t", {"n": ("count", None)}, size=10), SCHEMA, 5)
    sizes = []
    for at in range(200):
        run.batch(batch(*[(f"k{key}", at, 1) for key in range(10)]))
        sizes.append(run.state_rows)
    assert max(sizes) <= 30


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either a size, or a gap"),
        ({"size": 5, "gap": 5}, "either a size, or a gap"),
        ({"size": 0}, "not the length"),
        ({"size": 5, "slide": 6}, "would skip rows"),
        ({"size": 5, "late": "correct"}, "bounds the state"),
        ({"size": 5, "aggregates": {}}, "aggregates is empty"),
        ({"size": 5, "aggregates": {"x": ("median", "v")}}, "use count"),
        ({"size": 5, "aggregates": {"x": ("sum", "k")}}, "sum does not apply to string"),
        ({"size": 5, "time": "k"}, "not an event time"),
        ({"size": 5000, "slide": 1}, "in more than 1000 windows"),
        ({"size": 5, "aggregates": {"k": ("count", None)}}, "the same name"),
        ({"size": 5, "aggregates": {"window_start": ("count", None)}}, "the same name"),
        ({"size": 5, "aggregates": {"x": ("max", "list")}}, "max does not apply to list"),
        ({"size": timedelta(hours=12), "time": "day"}, "must be a number of days"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    chosen: dict[str, Any] = {"keys": ("k",), "time": "t", "aggregates": {"n": ("count", None)}} | options
    with pytest.raises(InvalidArgument, match=words):
        Run(Windows(**chosen), pa.schema([*SCHEMA, ("list", pa.list_(pa.int64())), ("day", pa.date32())]), 0)


@pytest.mark.parametrize("key", ["changed", "revision", "n.count", "k0"])
def test_a_key_may_have_the_name_of_a_column_of_the_state(key: str) -> None:
    schema = pa.schema([(key, pa.utf8()), ("t", pa.int64())])
    run = Run(Windows((key,), "t", {"n": ("count", None)}, size=5), schema, 0)
    run.batch(pa.table({key: ["x"], "t": [1]}, schema))
    assert run.finish().output.to_pylist() == [{key: "x", "window_start": 0, "window_end": 5, "n": 1}]


@pytest.mark.parametrize("name", ["reason", "Late_By", "window_start"])
def test_a_stream_with_a_column_of_late_rows_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="late rows get a column"):
        Run(Windows(("k",), "t", {"n": ("count", None)}, size=5), pa.schema([*SCHEMA, (name, pa.utf8())]), 0)


def test_days_without_a_date_go_to_the_side() -> None:
    schema = pa.schema([("k", pa.utf8()), ("t", pa.date32())])
    run = Run(Windows(("k",), "t", {"n": ("count", None)}, size=timedelta(days=2)), schema, timedelta(0))
    days = [None, date(2026, 1, 1), None, date(2026, 1, 4)]
    step = run.batch(pa.table({"k": ["x"] * 4, "t": days}, schema))
    assert step.counts == Counts(taken=2, rejected=2)
    assert run.finish().output.column("window_start").to_pylist() == [date(2026, 1, 1), date(2026, 1, 3)]


def test_zeros_and_nans_are_one_key_each_and_nan_is_the_greatest_value() -> None:
    schema = pa.schema([("k", pa.float64()), ("t", pa.int64()), ("v", pa.float64())])
    rows = [(0.0, 1, 1.0), (-0.0, 2, math.nan), (math.nan, 1, math.nan), (-math.nan, 2, 5.0), (0.0, 3, None)]
    table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
    for shards in (1, 3):
        run = Run(
            Windows(("k",), "t", {"n": ("count", None), "low": ("min", "v"), "high": ("max", "v")}, size=9),
            schema,
            9,
            shards,
        )
        run.batch(table.slice(0, 1))
        run.batch(table.slice(1))
        found = run.finish().output
        with duckdb.connect() as ducks:
            ducks.register("rows", table)
            meant = ducks.sql("select k, count(*), min(v), max(v) from rows group by k").fetchall()
        mine = [tuple(row[name] for name in ("k", "n", "low", "high")) for row in found.to_pylist()]
        assert sorted(map(repr, mine)) == sorted(map(repr, meant))


def test_decimals_are_summed_exactly_and_a_sum_of_more_digits_than_there_are_is_an_error() -> None:
    schema = pa.schema([("k", pa.utf8()), ("t", pa.int64()), ("v", pa.decimal128(38, 2))])
    windows = Windows(("k",), "t", {"total": ("sum", "v"), "mean": ("avg", "v"), "n": ("count", "v")}, size=9)

    def of(*values: str) -> pa.Table:
        return pa.table(
            {"k": ["x"] * len(values), "t": [1] * len(values), "v": [Decimal(each) for each in values]}
        ).cast(schema)

    run = Run(windows, schema, 9)
    run.batch(of("0.10", "0.20", "9999999999999999999999999999.99"))
    assert run.finish().output.select(["total", "n"]).to_pylist() == [
        {"total": Decimal("10000000000000000000000000000.29"), "n": 3}
    ]
    nines = "9" * 36 + ".99"
    with pytest.raises(InvalidArgument, match="more than 38 digits"):
        Run(windows, schema, 9).batch(of(nines, nines))


def test_a_sum_that_no_bigint_holds_is_an_error_and_no_other_number() -> None:
    run = Run(Windows(("k",), "t", {"n": ("sum", "v")}, size=5), SCHEMA, 0)
    run.batch(batch(("x", 1, 1 << 62), ("y", 1, 1 << 62)))
    with pytest.raises(InvalidArgument, match="exceeds a bigint"):
        run.batch(batch(("x", 1, 1 << 62)))
    assert Run(run.operator, SCHEMA, 0).batch(batch(("x", 1, 1 << 62), ("x", 1, -(1 << 62)))).counts.taken == 2


def test_a_key_with_most_rows_has_one_shard_and_the_other_keys_are_answered_beside_it() -> None:
    rows = [("hot", at % 50, 1) for at in range(2_000)] + [(f"k{key}", key % 50, 1) for key in range(64)]
    numbers = shard_numbers(batch(*rows), ("k",), 4)
    assert len(set(numbers[:2_000].tolist())) == 1
    assert np.bincount(numbers[2_000:], minlength=4).min() >= 8, "the others are spread"
    answers = []
    for shards in (1, 4):
        run = Run(Windows(("k",), "t", {"n": ("count", None)}, size=10), SCHEMA, 0, shards)
        run.batch(batch(*rows))
        assert run.state_rows == 5 + 64, "a row for each open window, however many rows it has"
        answers.append(alike(run.finish().output.to_pylist()))
    assert answers[0] == answers[1]
