"""A durable stream across kills at every step: content equal to the answer over the whole, each row once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest

from millrace.base.errors import CommitFenced, InvalidArgument, TableDamaged, TableUnavailable
from millrace.streams.keyed import store
from millrace.streams.keyed.clock import Newest
from millrace.streams.keyed.durable import DurableRun
from millrace.streams.keyed.store import Advanced, KeyedTable
from millrace.streams.operators.patterns import Patterns
from millrace.streams.operators.windows import Windows
from millrace.streams.patterns.table import match_table
from tests.flows.spark_host.stream_process import BATCHES, QUERY, SCHEMA, run, stream
from tests.streams.operators.cuts import alike


def whole() -> list[tuple[str, ...]]:
    return alike(match_table(QUERY, pa.concat_tables(BATCHES)).to_pylist())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "point", ["keyed.written@1", "keyed.written@4", "commit.checked@3", "keyed.committed@1", "keyed.committed@3"]
)
def test_a_kill_at_any_step_changes_nothing(point: str, tmp_path: Path) -> None:
    path = os.pathsep.join(each for each in sys.path if each)
    environment = os.environ | {"MILLRACE_TEST_FAILPOINTS": point, "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.flows.spark_host.stream_process", str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=60, check=False)
    assert done.returncode == -9
    run(tmp_path)
    assert alike(stream(tmp_path).table.answers().to_pylist()) == whole()
    assert stream(tmp_path).next_batch == len(BATCHES) + 1


def test_of_two_that_take_a_batch_one_is_fenced(tmp_path: Path) -> None:
    first, second = stream(tmp_path), stream(tmp_path)
    base = second.table.base()
    assert first.batch(0, BATCHES[0])
    assert not second.batch(0, BATCHES[0])
    with pytest.raises(CommitFenced):
        second.table.commit(base, 0, Advanced(newest=Newest(19)))


def test_a_state_that_became_empty_is_empty_for_the_next_batch(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.utf8()), ("t", pa.int64())])
    windows = Windows(("k",), "t", {"n": ("count", None)}, size=5)
    for number, times in enumerate(([1, 20], [], [])):
        durable = DurableRun(str(tmp_path / "table"), windows, schema, delay=-5)
        durable.batch(
            number, pa.table({"k": pa.array(["x"] * len(times), pa.utf8()), "t": pa.array(times, pa.int64())})
        )
    assert durable.table.answers().column("window_start").to_pylist() == [0, 20]


def test_late_rows_lie_beside_the_answers(tmp_path: Path) -> None:
    durable = stream(tmp_path)
    durable.batch(0, BATCHES[1])
    durable.batch(1, BATCHES[0])
    late = durable.table.late()
    assert late.num_rows == 20
    assert set(late.column("reason").to_pylist()) == {"late"}


def test_another_operator_does_not_go_on_from_this_ones_state(tmp_path: Path) -> None:
    stream(tmp_path)
    with pytest.raises(InvalidArgument, match="another operator"):
        DurableRun(str(tmp_path / "stream"), Windows(("k",), "t", {"n": ("count", None)}, size=5), SCHEMA, delay=3)


@pytest.mark.slow
def test_old_states_are_dropped(tmp_path: Path) -> None:
    durable = stream(tmp_path)
    for number in range(21):
        durable.batch(number, BATCHES[0].set_column(1, "t", pa.array(range(20 * number, 20 * number + 20))))
    assert len(durable.table.base().stale) <= 6  # those of one batch: two shards with three tables each


def test_a_stream_that_has_ended_takes_no_more(tmp_path: Path) -> None:
    durable = stream(tmp_path)
    durable.batch(0, BATCHES[0])
    assert durable.finish(1)
    assert not durable.finish(1)
    with pytest.raises(InvalidArgument, match="ended with batch 1"):
        durable.batch(2, BATCHES[1])


def test_rows_of_other_columns_are_refused_before_any_is_taken(tmp_path: Path) -> None:
    stream(tmp_path).batch(0, BATCHES[0])
    with pytest.raises(InvalidArgument, match=r"the rows were k string, t int64, v int64 .* select the columns"):
        DurableRun(
            str(tmp_path / "stream"), Patterns(QUERY, "t"), pa.schema([*SCHEMA, ("new", pa.utf8())]), delay=3, shards=2
        )


def test_small_files_are_joined_and_old_ones_removed(tmp_path: Path) -> None:
    operator = Windows(("k",), "t", {"n": ("count", None)}, size=5)
    durable = DurableRun(str(tmp_path / "stream"), operator, SCHEMA, delay=0)
    for number in range(25):
        durable.batch(number, BATCHES[0].set_column(1, "t", pa.array(range(20 * number, 20 * number + 20))))
    before = alike(durable.table.answers().to_pylist())
    newest = durable.table.answers_of(24)
    assert newest is not None
    assert durable.table.answers_of(23) is None
    durable.table.tidy(0)
    there = [each for each in (tmp_path / "stream").rglob("*.parquet") if "_delta_log" not in each.parts]
    assert len(there) <= 12
    assert alike(durable.table.answers().to_pylist()) == before
    assert durable.batch(25, BATCHES[0].slice(0, 0)), "and the stream goes on"


def test_a_state_that_another_program_rewrote_is_damage(tmp_path: Path) -> None:
    durable = stream(tmp_path)
    for number, rows in enumerate(BATCHES):
        durable.batch(number, rows)
    durable.table.table.compact([("kind", "=", "state")])
    with pytest.raises(TableDamaged, match="OPTIMIZE takes"):
        durable.batch(4, BATCHES[0])


def test_files_that_could_not_be_joined_do_not_stop_the_stream(tmp_path: Path) -> None:
    durable = stream(tmp_path)
    failing = patch.object(KeyedTable, "tidy", side_effect=TableUnavailable("another writer was in between"))
    with patch.object(store, "_TIDY_EVERY", 2), failing as tidy:
        for number, rows in enumerate(BATCHES):
            assert durable.batch(number, rows)
    assert tidy.call_count == 2
