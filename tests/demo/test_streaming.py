"""The demo's questions: an operator and DuckDB give the same, late rows too, and a difference of one row is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.demo.streaming.duckdb_check import CheckpointBatches, CheckResult, compare, flights_of, without_time_zones
from millrace.demo.streaming.feed import LATE_EVERY, flights_by_report_time, weather
from millrace.demo.streaming.queries import HOURS, QUERIES, WEATHER, DemoQuery
from millrace.streams.keyed.durable import DurableRun
from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.operator import LATE_BY, REASON, WINDOW
from millrace.streams.operators.joins import Distinct
from millrace.testing import deployment

ROWS = 12_000
BATCHES = 12
UTC = pa.timestamp("us", "UTC")


@cache
def batched(batches: int = BATCHES) -> tuple[pa.Table, pa.Table]:
    """Flights and weather with the number of the micro-batch that has them, by the times when they are reported."""
    flights, times = flights_by_report_time(ROWS)
    table = flights_of(flights)
    ends = np.quantile(times.to_numpy(), np.arange(1, batches) / batches)
    measured = weather()
    measured = measured.slice(0, 3 * 24 * 20)
    until = measured["time_hour"].cast(pa.int64()).to_numpy()
    return (
        table.append_column("batch", pa.array(np.searchsorted(ends, times.to_numpy()))),
        without_time_zones(measured).append_column("batch", pa.array(np.searchsorted(ends, until))),
    )


def given(question: DemoQuery, flights: pa.Table, measured: pa.Table, count: int) -> Iterator[pa.Table]:
    """Batch by batch, `count` of them, as the operator takes them."""
    with duckdb.connect() as asked:
        asked.register("flights", flights)
        asked.register("weather", measured)
        rows = asked.sql(question.rows_sql).to_arrow_table()
    rows = rows.set_column(rows.column_names.index("due"), "due", rows["due"].cast(UTC))
    if question is WEATHER:
        for name in ("temp", "visib"):
            rows = rows.set_column(rows.column_names.index(name), name, rows[name].cast(pa.float64()))
    for number in range(count):
        yield rows.filter(pc.equal(rows["batch"], number)).drop_columns(["batch"])


def run(question: DemoQuery, *, spoil: str = "", count: int = BATCHES) -> CheckResult:
    flights, measured = batched(count)
    batches = list(given(question, flights, measured, count))
    ran = Run(question.operator, batches[0].schema, question.delay, shards=2)
    steps = [ran.batch(each) for each in batches]
    aside = pa.concat_tables([each.late for each in steps])
    answers = pa.concat_tables([each.output for each in steps])
    late = aside.drop_columns([LATE_BY, REASON, WINDOW])
    if spoil == "answers":
        answers = answers.slice(1)
    if spoil == "late":
        late = pa.concat_tables([late.slice(1), late.slice(2, 1)])
    with duckdb.connect() as asked:
        for name, table in (("flights", flights), ("weather", measured), ("answers", answers), ("late", late)):
            asked.register(name, without_time_zones(table))
        return compare(question, asked, count - 1, 0)


@pytest.mark.parametrize("question", QUERIES, ids=lambda each: each.name)
def test_an_operator_and_duckdb_say_the_same_of_each_row(question: DemoQuery) -> None:
    found = run(question)
    assert found.passed, found
    assert found.answers > 50
    assert found.late > ROWS / LATE_EVERY / 2
    assert found.waiting


@pytest.mark.parametrize("question", QUERIES, ids=lambda each: each.name)
def test_rows_of_one_micro_batch_all_wait_for_a_watermark(question: DemoQuery) -> None:
    found = run(question, count=1)
    assert found.passed, found
    assert (found.answers, found.late, found.waiting) == (0, 0, found.rows)


def test_one_answer_that_is_missing_is_seen() -> None:
    found = run(HOURS, spoil="answers")
    assert found.mismatches == 1
    assert not found.passed


def test_a_late_row_in_the_place_of_another_is_seen() -> None:
    found = run(HOURS, spoil="late")
    assert (found.mismatches, found.late_mismatches) == (0, 2)
    assert not found.passed


@pytest.mark.slow
def test_a_rows_micro_batch_is_told_by_the_checkpoint_and_the_newest_by_the_table(tmp_path: Path) -> None:
    """Spark was stopped between the commit of a micro-batch and its note of that."""
    with deployment(tmp_path / "data") as db:
        flights = db.create_collection("flights", {"id": "int64"}, key="id", vchannels=2)
        ends: list[dict[str, int]] = []
        for number in range(3):
            flights.insert([{"id": 10 * number + each} for each in range(10)])
            db.settle()
            ends.append({each: db.connection.tick(each) for each in flights.definition.pchannels})
        (tmp_path / "checkpoint" / "offsets").mkdir(parents=True)
        for number, ticks in enumerate(ends):
            place = json.dumps({"collection": flights.definition.id, "ticks": ticks})
            (tmp_path / "checkpoint" / "offsets" / str(number)).write_text(f"v1\n{{}}\n{place}")
        schema = pa.schema([("k", pa.int64()), ("due", pa.int64())])
        ran = DurableRun(str(tmp_path / "answers"), Distinct(("k",), "due"), schema, delay=0)
        assert [ran.batch(number, schema.empty_table()) for number in range(2)] == [True, True]
        batches = CheckpointBatches(tmp_path / "checkpoint", str(tmp_path / "answers"))
        assert batches.last == 1
        found = batches.with_batch_numbers(flights, lambda rows: rows)
        assert {row["id"]: row["batch"] for row in found.to_pylist()} == {
            each: min(each // 10, 2) for each in range(30)
        }
