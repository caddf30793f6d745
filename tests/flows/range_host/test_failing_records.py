"""Records that fail, in a whole runner: put aside by name, counted, and stopping the flow where they are too many."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.base.errors import BatchRefused, ErrorLimitExceeded, InvalidArgument, MemoryExceeded, SinkBusy
from millrace.base.metrics import Metrics
from millrace.commands.main import app
from millrace.flows.batch import Batch
from millrace.flows.range_host.beat import Beat
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.positions import reset_windows
from millrace.flows.range_host.skipped import skip_record
from millrace.flows.range_host.supervision import read_status, read_tasks, tasks_path, want
from millrace.flows.records import TASK_PUT, Failure
from millrace.flows.sinks.sink import Verdicts
from millrace.flows.sources.source import SourceLag
from millrace.pipelines.declaration import pipeline_of
from tests.flows.range_host.lines import Folder, LinesFlow, numbers


class Taking:
    """Takes all but what fails by a verdict (`bad`), or with its batch (`poison`)."""

    def __init__(self, *, bad: frozenset[int] = frozenset(), poison: frozenset[int] = frozenset()) -> None:
        self.bad, self.poison = bad, poison
        self.taken: list[int] = []
        self.given: list[int] = []
        self.busy = 0

    def __call__(self, batch: Batch) -> Verdicts:
        mine = numbers(batch)
        self.given.append(len(mine))
        if self.busy:
            self.busy -= 1
            raise SinkBusy("not now", retry_after=0.0)
        if self.poison & set(mine):
            raise BatchRefused("one of them is odd")
        documents = batch.documents or ()
        failures = [
            Failure(each.record, TASK_PUT, "s", "ODD", "odd")
            for each, number in zip(documents, mine, strict=True)
            if number in self.bad
        ]
        self.taken += [number for number in mine if number not in self.bad]
        return Verdicts(acknowledged=len(mine) - len(failures), failures=failures)


def test_poison_is_put_aside_with_its_place_and_the_rest_goes_on(tmp_path: Path) -> None:
    sink = Taking(poison=frozenset({17, 700}))
    flow = LinesFlow(tmp_path, sink, errors={"tries": 2})
    flow.fill(range(1000))
    flow.run()
    assert sink.taken == [number for number in range(1000) if number not in sink.poison]
    first, second = flow.letters
    assert [json.loads(each.record.value or b"")["n"] for each in (first, second)] == [17, 700]
    assert (first.record.topic, first.record.partition, first.kind, first.attempts) == ("a", 0, "BATCH_REFUSED", 2)
    place = flow.positions["a-0"]
    assert (place.records_in, place.records_out, place.records_error, place.in_a_row) == (1000, 998, 2, 0)


def test_what_a_busy_sink_took_of_a_range_is_committed_and_the_rest_follows_in_smaller_ranges(tmp_path: Path) -> None:
    sink = Taking(poison=frozenset({30}))
    flow = LinesFlow(tmp_path, sink)
    flow.fill(range(64))
    calls = [0]

    def write(batch: Batch) -> Verdicts:
        calls[0] += 1
        if calls[0] == 4:  # after two halves
            sink.busy = 1
        return sink(batch)

    flow.write = write
    flow.run()
    assert sink.taken == [number for number in range(64) if number != 30], "nothing again"
    place = flow.positions["a-0"]
    assert (place.records_in, place.records_out, place.records_error) == (64, 63, 1)


def test_a_named_record_is_put_aside_without_being_transformed_or_written(tmp_path: Path) -> None:
    sink = Taking()
    flow = LinesFlow(tmp_path, sink)
    flow.fill(range(10))
    position = len(json.dumps({"n": 0})) + 1
    flow.declared |= {"errors": {"skip": [{"lane": "a-0", "position": position}, {"lane": "b-0", "position": 0}]}}
    flow.run()
    assert sink.taken == [0, *range(2, 10)]
    (letter,) = flow.letters
    assert (letter.record.offset, letter.kind, letter.step) == (position, "SKIPPED", "skip")
    assert (flow.positions["a-0"].records_out, flow.positions["a-0"].records_error) == (9, 1)


def test_a_command_names_a_record_of_a_lane_before_the_flow_has_passed_it(tmp_path: Path) -> None:
    sink = Taking()
    flow = LinesFlow(tmp_path, sink)
    with pytest.raises(InvalidArgument, match="none yet"):
        skip_record(flow.settings, "lines", "a-0", 0)
    flow.fill(range(3))
    flow.run()
    end = flow.positions["a-0"].position
    with pytest.raises(InvalidArgument, match="has no lane 'c-0': it has a-0"):
        skip_record(flow.settings, "lines", "c-0", end)
    with pytest.raises(InvalidArgument, match="has passed 0"):
        skip_record(flow.settings, "lines", "a-0", 0)
    for number in (3, 5):
        skip_record(flow.settings, "lines", "a-0", end + 9 * (number - 3))
    flow.fill(range(3, 7))
    flow.run()
    assert sink.taken == [0, 1, 2, 4, 6]
    assert [each.record.offset for each in flow.letters] == [end, end + 18]
    # What was passed is forgotten with the next one.
    skip_record(flow.settings, "lines", "a-0", 10_000)
    assert json.loads((tmp_path / "data/pipelines/lines/skip.json").read_text()) == {"a-0": [10_000]}


@pytest.mark.parametrize("limit", [{"count": 5}, {"share": 0.05, "over": 100}])
def test_more_failures_than_the_limit_stop_the_flow_also_after_a_restart(tmp_path: Path, limit: dict[str, int]) -> None:
    sink = Taking(bad=frozenset(range(200, 206)))
    flow = LinesFlow(tmp_path, sink, errors={"limit": limit, "collection": "letters"})
    flow.declared["flush"] = {"items": 10}
    for start in range(0, 220, 20):
        flow.fill(range(start, start + 20))
        if start < 200:
            flow.run()
    with pytest.raises(ErrorLimitExceeded, match=r"6 .*records.* in letters.*flows errors reset lines"):
        flow.run()
    assert flow.positions["a-0"].records_error == 6
    flow.fill(range(220, 230))
    for _ in range(2):  # the counts are the position's
        with pytest.raises(ErrorLimitExceeded):
            flow.run()
    assert len(flow.letters) == 6
    assert reset_windows(flow.settings, "lines") == ["a-0"]
    assert reset_windows(flow.settings, "lines") == []
    flow.run()
    assert sink.taken == [number for number in range(230) if number not in sink.bad]
    assert len(flow.letters) == 6


def test_the_limit_counts_all_lanes_together(tmp_path: Path) -> None:
    sink = Taking(bad=frozenset({1, 101}))
    flow = LinesFlow(tmp_path, sink, errors={"limit": {"count": 1}})
    flow.fill(range(10), "a")
    flow.fill(range(100, 110), "b")
    with pytest.raises(ErrorLimitExceeded, match="2 records failed"):
        flow.run()


def test_failures_of_an_earlier_window_do_not_count(tmp_path: Path) -> None:
    sink = Taking(bad=frozenset(range(0, 300, 10)))
    flow = LinesFlow(tmp_path, sink, errors={"limit": {"count": 5, "over": 30}})
    for start in range(0, 300, 20):
        flow.fill(range(start, start + 20))
        flow.run()
    assert len(flow.letters) == 30


def test_a_sink_that_refuses_everything_fails_its_lane_and_keeps_the_topic(tmp_path: Path) -> None:
    sink = Taking(poison=frozenset(range(1000)))
    flow = LinesFlow(tmp_path, sink, errors={"tries": 1}, failure_threshold=1)
    failures = tasks_path(flow.settings, "lines")
    for start in range(0, 50, 5):
        flow.fill(range(start, start + 5))
        flow.run()
    (health,) = read_tasks(failures).values()
    assert health.code == "SINK_REFUSED"
    assert "records in a row" in health.cause
    assert len(flow.letters) == flow.positions["a-0"].in_a_row < 20
    sink.poison = frozenset()
    failures.unlink()  # its pause is over
    flow.run()
    assert sink.taken == list(range(len(flow.letters), 50))
    assert flow.positions["a-0"].in_a_row == 0


def test_the_commands_name_a_record_and_begin_the_count_anew(tmp_path: Path) -> None:
    flow = LinesFlow(tmp_path, Taking(bad=frozenset({1})), errors={"limit": {"count": 0}})
    flow.fill(range(3))
    with pytest.raises(ErrorLimitExceeded):
        flow.run()

    def call(*words: str) -> str:
        done = CliRunner().invoke(app, ["flows", *words], env={"MILLRACE_DATA": str(flow.settings.data_dir)})
        assert done.exit_code == (1 if "passed" in done.output else 0), done.output
        return done.output

    assert "passed 0" in call("skip", "lines", "a-0", "0")
    assert "aside when it comes to it" in call("skip", "lines", "a-0", "27")
    assert "anew (a-0)" in call("errors", "reset", "lines")
    assert "it was empty" in call("errors", "reset", "lines")
    flow.fill(range(3, 5))
    flow.declared["errors"] = {"limit": {"count": 1}}
    flow.run()
    assert [each.kind for each in flow.letters] == ["ODD", "SKIPPED"]


def test_a_restart_that_somebody_asks_for_begins_the_count_anew(tmp_path: Path) -> None:
    flow = LinesFlow(tmp_path, Taking(bad=frozenset({1})), errors={"limit": {"count": 0}})
    flow.fill(range(3))
    with pytest.raises(ErrorLimitExceeded):
        flow.run()
    want(flow.settings, "lines", paused=False)
    assert flow.positions["a-0"].window_error == 1
    want(flow.settings, "lines", restart="failed")
    assert flow.positions["a-0"].window_error == 0
    flow.run()


@pytest.mark.parametrize("own_process", [True, False])
def test_the_limit_of_memory_is_of_a_worker_process_not_of_a_program_that_runs_a_flow(
    tmp_path: Path, own_process: bool
) -> None:
    taking = Taking()

    def slowly(batch: Batch) -> Verdicts:
        time.sleep(1.5)  # the memory is looked at once a second
        return taking(batch)

    flow = LinesFlow(tmp_path, slowly, resources={"memory_mib": 128})  # less than this process takes
    flow.fill(range(10))
    if own_process:
        with pytest.raises(MemoryExceeded, match=r"resources\.memory_mib is 128"):
            flow.run(own_process=True)
    else:
        flow.run()
        assert taking.taken == list(range(10))


def test_how_far_a_source_is_behind_what_it_reads_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = LinesFlow(tmp_path, Taking())
    monkeypatch.setattr(Folder, "lag", lambda _: SourceLag(1_000, 12.5, "it is away", {"lost": 3}))
    metrics = Metrics()
    with pytest.MonkeyPatch.context() as patched:
        flow.patch(patched)
        beat = Beat(FlowRun(flow.settings, pipeline_of(flow.declared)), metrics)
        beat.run_once()
        beat.close()
    told = metrics.render().decode()
    assert 'millrace_flow_source_lag_bytes{flow="lines"} 1000.0' in told
    assert 'millrace_flow_source_lag_seconds{flow="lines"} 12.5' in told
    assert 'millrace_flow_source_messages{flow="lines",outcome="lost"} 3.0' in told
    found = read_status(flow.settings, "lines")
    assert (found.source_lag_bytes, found.source_lag_seconds) == (1_000, 12.5)
    assert found.source_counts == {"lost": 3}
