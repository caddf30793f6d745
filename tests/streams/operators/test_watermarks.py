"""What the watermark goes by: the side that is further behind, and no row whose time is too far ahead of the log's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.message.ids import LOGICAL_BITS
from millrace.streams.keyed.durable import DurableRun
from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.operator import Counts, Operator
from millrace.streams.operators.joins import AsOf, Distinct
from millrace.streams.operators.patterns import Patterns
from millrace.streams.operators.windows import Windows
from millrace.streams.patterns.sql import parse
from tests.streams.operators.cuts import Row, alike, disordered, streamed
from tests.streams.operators.test_joins import SCHEMA, joined, rows_of

LAST = AsOf(("k",), "t", "right", ("k", "t", "v"), (("t", "since"), ("v", "value")), 4)


@given(st.data(), rows_of, st.integers(0, 5), st.integers(1, 3))
@profile(max_examples=30)
def test_no_row_is_late_for_the_other_side_was_quicker(
    data: st.DataObject, rows: list[Row], delay: int, shards: int
) -> None:
    left, right = (
        data.draw(disordered([row for row in rows if row["right"] is side], delay)) for side in (False, True)
    )
    turns = data.draw(st.permutations([False] * len(left) + [True] * len(right)))
    batches = [(right if turn else left).pop(0) for turn in turns]
    found, late, taken = streamed(LAST, SCHEMA, batches, delay, shards)
    assert alike(found) == alike(joined(rows, 4, False, False))
    assert (late, taken) == ([], len(rows))


def of(right: bool, *times: int) -> pa.Table:
    return pa.Table.from_pylist([{"k": "x", "t": t, "v": t, "right": right, "gone": False} for t in times], SCHEMA)


def test_one_side_alone_answers_nothing_and_the_policy_max_takes_the_quicker_one() -> None:
    least = Run(LAST, SCHEMA, 0)
    greatest = Run(AsOf(**{**vars(LAST), "policy": "max"}), SCHEMA, 0)
    told = {}
    for name, run in (("min", least), ("max", greatest)):
        steps = [
            run.batch(of(*each)) for each in ((False, 10, 20), (False, 30), (True, 9, 19), (True, 40), (False, 50))
        ]
        told[name] = [step.output.num_rows for step in steps], sum(step.counts.late for step in steps)
    assert told == {"min": ([0, 0, 0, 1, 1], 0), "max": ([0, 1, 1, 0, 1], 2)}
    with pytest.raises(InvalidArgument, match="'min' or 'max'"):
        Run(AsOf(**{**vars(LAST), "policy": "first"}), SCHEMA, 0)


BEGIN = datetime(2026, 11, 25, tzinfo=UTC)
AHEAD = timedelta(seconds=3)
TIMED = pa.schema(
    [("k", pa.utf8()), ("t", pa.timestamp("us", "UTC")), ("v", pa.int64()), ("right", pa.bool_()),
        ("_time_tick", pa.int64())]
)  # fmt: skip
OPERATORS: dict[str, Operator] = {
    "windows": Windows(("k",), "t", {"n": ("count", None)}, size=timedelta(seconds=4), slide=timedelta(seconds=2)),
    "sessions": Windows(("k",), "t", {"n": ("count", None)}, gap=timedelta(seconds=2)),
    "distinct": Distinct(("k", "v"), "t", timedelta(seconds=3)),
    "as of": AsOf(("k",), "t", "right", ("k", "t", "v"), (("v", "value"),), timedelta(seconds=4)),
    "pattern": Patterns(
        parse(
            "PARTITION BY k ORDER BY t MEASURES A.v AS a PATTERN (A B) WITHIN INTERVAL '5' SECOND DEFINE B AS v > A.v"
        ),
        "t",
    ),
}


def tick(seconds: float) -> int:
    return int((BEGIN + timedelta(seconds=seconds)).timestamp() * 1000) << LOGICAL_BITS | 7


def timed(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, TIMED)


ahead_of = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.sampled_from(["x", "y", None]),
            "t": st.none() | st.builds(lambda at, more: BEGIN + timedelta(seconds=at, microseconds=more),
                st.integers(0, 15), st.sampled_from([-1, 0, 0, 1])),
            "v": st.integers(0, 3),
            "right": st.booleans(),
            "_time_tick": st.builds(tick, st.integers(0, 9)),
        }
    ),
    max_size=16,
)  # fmt: skip


@given(st.data(), ahead_of, st.sampled_from(sorted(OPERATORS)), st.integers(1, 2))
@profile(max_examples=50)
def test_rows_ahead_of_the_log_are_put_aside_and_the_others_answered_as_if_they_had_not_come(
    data: st.DataObject, rows: list[Row], name: str, shards: int
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounded = Run(OPERATORS[name], TIMED, timedelta(seconds=1), shards, max_ahead=AHEAD)
    without = Run(OPERATORS[name], TIMED, timedelta(seconds=1), shards)

    def ahead(row: Row) -> bool:
        physical = datetime.fromtimestamp((row["_time_tick"] >> LOGICAL_BITS) / 1000, UTC)
        return row["t"] is not None and row["t"] - physical > AHEAD

    for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        came = rows[begin:end]
        step, other = bounded.batch(timed(came)), without.batch(timed([row for row in came if not ahead(row)]))
        aside = [row for row in step.late.to_pylist() if row["reason"] == "ahead of the log"]
        assert alike([{name: row[name] for name in TIMED.names} for row in aside]) == alike(
            timed(list(filter(ahead, came))).to_pylist()
        )
        assert all(row["late_by"] < -AHEAD / timedelta(microseconds=1) for row in aside)
        assert alike(step.output.to_pylist()) == alike(other.output.to_pylist())
        assert step.counts == other.counts + Counts(rejected=len(aside))
        assert step.counts.came == len(came)
        assert step.late.num_rows == other.late.num_rows + len(aside)
    assert alike(bounded.finish().output.to_pylist()) == alike(without.finish().output.to_pylist())


def test_what_a_table_remembers_of_both_sides_is_what_a_run_in_memory_does(tmp_path: Path) -> None:
    memory = Run(OPERATORS["as of"], TIMED, timedelta(seconds=1), max_ahead=AHEAD)
    batches = [
        [{"k": "x", "t": BEGIN + timedelta(seconds=at), "v": at, "right": right, "_time_tick": tick(log)}
         for right, at, log in each]
        for each in ([(False, 5, 9), (False, 20, 9)], [(True, 4, 9), (True, 9, 9)], [(False, 9, 9), (True, 1, 9)], [],
            [(True, 12, 9), (False, 12, 9)])
    ]  # fmt: skip
    steps = [memory.batch(timed(each)) for each in batches]
    assert sum(step.counts.rejected for step in steps) == 1
    for number, each in enumerate(batches):
        durable = DurableRun(
            str(tmp_path / "table"), OPERATORS["as of"], TIMED, delay=timedelta(seconds=1), max_ahead=AHEAD
        )
        assert durable.batch(number, timed(each))
        found = durable.table.answers_of(number)
        assert found is not None
        assert [rows.to_pylist() for rows in found] == [
            steps[number].output.to_pylist(),
            steps[number].late.to_pylist(),
        ]
    assert sum(step.output.num_rows for step in steps) > 0
    assert sum(step.counts.late for step in steps) == 1


@pytest.mark.parametrize(
    ("schema", "most", "words"),
    [
        (SCHEMA, AHEAD, "t with the log's time: leave it out for numbers"),
        (pa.schema(list(TIMED)[:-1]), AHEAD, "needs the column _time_tick"),
        (pa.schema([*list(TIMED)[:-1], ("_time_tick", pa.utf8())]), AHEAD, "needs the column _time_tick"),
        (TIMED, -AHEAD, "negative"),
    ],
)
def test_times_that_cannot_be_held_against_the_log_are_refused(schema: pa.Schema, most: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Run(Distinct(("k",), "t"), schema, 0 if schema is SCHEMA else timedelta(0), max_ahead=most)
