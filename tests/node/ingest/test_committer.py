"""The committer on its own: what goes in, what is fenced, what a commit says."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from prometheus_client import CollectorRegistry

from millrace.base.errors import DeadlineExceeded, InvalidArgument
from millrace.base.metrics import Metrics
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestReport
from millrace.storage.delta_log import COMMIT_INFO_KEY
from millrace.tables.wal.table import WalTable
from tests.client.medium import Medium
from tests.failpoints import at_failpoints
from tests.node.wal_samples import inserts, message, outcome, rejection, write_range


@pytest.fixture
def table(tmp_path: Path) -> WalTable:
    return WalTable.create(tmp_path / "wal")


@pytest.fixture
def committer(table: WalTable) -> WalCommitter:
    return WalCommitter(WalTable.open(table.uri))


def entries(table: WalTable) -> list[tuple[str, str, int]]:
    """(kind, PChannel, log entry) of every message and rejection, sorted."""
    columns = ["kind", "pchannel", "entry"]
    rows = DeltaTable(str(Path(table.uri))).to_pyarrow_table(columns=columns).to_pylist()
    return sorted((row["kind"], row["pchannel"], row["entry"]) for row in rows if row["kind"] != "state")


def files(table: WalTable) -> set[Path]:
    return set(Path(table.uri).rglob("kind=*/**/*.parquet"))


def test_several_pchannels_go_in_with_one_commit(table: WalTable, committer: WalCommitter) -> None:
    result = committer.commit([inserts(Path(table.uri), table.position(name), 1) for name in ("p0", "p1", "p2")])
    assert (len(result.committed), len(result.fenced), result.version) == (3, 0, 1)
    assert entries(table) == [("message", name, 1) for name in ("p0", "p1", "p2")]


def test_a_range_from_an_older_base_is_fenced_and_its_files_go(table: WalTable, committer: WalCommitter) -> None:
    old = table.position("p0")
    committer.commit([inserts(Path(table.uri), old, 1)])
    before = files(table)
    late = inserts(Path(table.uri), old, 1, 2)
    result = committer.commit([late])
    assert result.fenced == (late,)
    assert files(table) == before
    assert entries(table) == [("message", "p0", 1)]


def test_the_fenced_range_goes_and_the_others_of_its_batch_stay(table: WalTable, committer: WalCommitter) -> None:
    old = table.position("p0")
    committer.commit([inserts(Path(table.uri), old, 1)])
    good = inserts(Path(table.uri), table.position("p1"), 7)
    result = committer.commit([inserts(Path(table.uri), old, 1), good])
    assert result.committed == (good,)
    assert entries(table) == [("message", "p0", 1), ("message", "p1", 7)]


def test_a_first_commit_is_fenced_by_another_first_commit(table: WalTable) -> None:
    ranges = [inserts(Path(table.uri), table.position("p0"), 1) for _ in range(2)]
    committers = [WalCommitter(WalTable.open(table.uri)) for _ in range(2)]
    results = [committer.commit([item]) for committer, item in zip(committers, ranges, strict=True)]
    assert [len(result.committed) for result in results] == [1, 0]
    assert results[1].conflicts == 1, "its handle did not know of the first one yet"
    assert entries(table) == [("message", "p0", 1)]


def test_ranges_of_rejections_alone_fence_each_other_although_the_tick_stands(
    table: WalTable, committer: WalCommitter
) -> None:
    committer.commit([inserts(Path(table.uri), table.position("p0"), 1)])
    table.refresh()
    base = table.position("p0")

    def rejected() -> IngestReport:
        return write_range(Path(table.uri), base, outcome(base, rejections=[rejection(2, tick=base.last_tick)]))

    first, second = rejected(), rejected()
    assert first.last_tick == base.last_tick
    assert committer.commit([first]).committed
    assert committer.commit([second]).fenced
    assert entries(table) == [("message", "p0", 1), ("rejection", "p0", 2)]
    table.refresh()
    assert committer.commit([inserts(Path(table.uri), table.position("p0"), 3)]).committed


def test_rejections_before_any_tick_fence_each_other_too(table: WalTable, committer: WalCommitter) -> None:
    base = table.position("p0")
    ranges = [write_range(Path(table.uri), base, outcome(base, rejections=[rejection(1)])) for _ in range(2)]
    assert [len(committer.commit([item]).committed) for item in ranges] == [1, 0]
    assert entries(table) == [("rejection", "p0", 1)]


def test_a_range_without_rows_makes_no_commit(table: WalTable, committer: WalCommitter) -> None:
    base = table.position("p0")
    idle = IngestReport("p0", base.commits, base.last_tick, base.last_tick, (0, 5), base.totals)  # type: ignore[arg-type]
    result = committer.commit([idle])
    assert (result.committed, result.fenced, result.version) == ((), (), 0)


def test_two_ranges_of_one_pchannel_are_a_callers_mistake(table: WalTable, committer: WalCommitter) -> None:
    with pytest.raises(InvalidArgument):
        committer.commit([inserts(Path(table.uri), table.position("p0"), entry) for entry in (1, 2)])


def test_a_commit_describes_each_pchannels_range(table: WalTable, committer: WalCommitter) -> None:
    committer.commit([inserts(Path(table.uri), table.position("p0"), 1)])
    report = inserts(Path(table.uri), committer.table.position("p0"), 2, 3)
    committer.commit([report])
    described = committer.table.table.history(1)[0][COMMIT_INFO_KEY]
    assert described == {
        "p0": {
            "commit": 2,
            "previous_tick": message(1)["time_tick"],
            "tick": message(3)["time_tick"],
            "position": "0:4",
            "messages": 2,
            "rejections": 0,
            "digest": str(report.totals.digest),
        }
    }


def test_a_report_crosses_into_the_jvm_and_back_unchanged_and_is_small(table: WalTable) -> None:
    report = inserts(Path(table.uri), table.position("p0"), 1)
    assert pickle.loads(pickle.dumps(report)) == report
    assert len(pickle.dumps(report)) < 2000


class _Unlucky:
    """A handle's Delta table whose commits fail in a way of our choosing."""

    def __init__(self, table: WalTable, *, lands: bool, times: int, error: type[Exception]) -> None:
        self._delta: Any = table.table.delta
        self._lands, self._times, self._error = lands, times, error
        table.table.delta = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delta, name)

    def create_write_transaction(self, *args: Any, **options: Any) -> None:
        if self._times == 0:
            return self._delta.create_write_transaction(*args, **options)
        self._times -= 1
        if self._lands:
            self._delta.create_write_transaction(*args, **options)
        raise self._error("the answer got lost")


def test_a_commit_that_stands_although_its_answer_got_lost_is_found_and_its_files_stay(
    table: WalTable, committer: WalCommitter
) -> None:
    _Unlucky(committer.table, lands=True, times=1, error=DeltaError)
    report = inserts(Path(table.uri), table.position("p0"), 1)
    result = committer.commit([report])
    assert result.committed == (report,)
    assert files(table) == {Path(table.uri) / item.path for item in report.actions}
    assert entries(table) == [("message", "p0", 1)]


def test_a_commit_that_stands_and_was_overtaken_before_anybody_looked_keeps_its_files(
    table: WalTable, committer: WalCommitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = inserts(Path(table.uri), table.position("p0"), 1)
    real = DeltaTable.create_write_transaction

    def unlucky(delta: DeltaTable, *args: Any, **options: Any) -> None:
        monkeypatch.undo()
        real(delta, *args, **options)
        other = WalCommitter(WalTable.open(table.uri))
        other.commit([inserts(Path(table.uri), other.table.position("p0"), 2)])
        raise CommitFailedError("the answer got lost")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", unlucky)
    assert committer.commit([report]).committed == (report,)
    assert entries(table) == [("message", "p0", 1), ("message", "p0", 2)]


def test_a_storage_error_that_passes_is_tried_again(table: WalTable, committer: WalCommitter) -> None:
    _Unlucky(committer.table, lands=False, times=2, error=CommitFailedError)
    assert committer.commit([inserts(Path(table.uri), table.position("p0"), 1)]).committed
    assert entries(table) == [("message", "p0", 1)]


def test_a_storage_error_that_stays_is_raised_and_the_files_stay_because_the_commit_may_stand(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri), deadline=0.0)
    _Unlucky(committer.table, lands=False, times=100, error=CommitFailedError)
    report = inserts(Path(table.uri), table.position("p0"), 1)
    with pytest.raises(DeadlineExceeded):
        committer.commit([report])
    assert files(table) == {Path(table.uri) / item.path for item in report.actions}


def test_a_commit_that_counts_is_on_the_disk_with_its_files(
    table: WalTable, committer: WalCommitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = Medium(monkeypatch)
    report = inserts(Path(table.uri), table.position("p0"), 1)
    committer.commit([report])
    entry = Path(table.uri) / "_delta_log" / f"{committer.table.version:020d}.json"
    for path in (entry, *(Path(table.uri) / action.path for action in report.actions)):
        assert medium.has(path), path


def test_metrics_say_what_was_committed_and_what_was_fenced(table: WalTable) -> None:
    metrics = Metrics(registry=CollectorRegistry())
    committer = WalCommitter(WalTable.open(table.uri), metrics=metrics)
    base = table.position("p0")
    first = inserts(Path(table.uri), base, 1, 2)
    committer.commit([first])
    committer.commit([inserts(Path(table.uri), base, 1, 2)])

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"millrace_{name}", labels)

    assert value("wal_committed_rows_total", pchannel="p0", kind="message") == 2
    assert value("wal_commit_fenced_total", pchannel="p0") == 1
    assert value("wal_committed_bytes_total", pchannel="p0") == sum(file.size for file in first.actions)
    assert value("wal_commit_duration_seconds_count", pchannel="p0") == 1
    assert value("wal_commit_part_duration_seconds_count", part="commit") == 1
    assert value("wal_commit_conflict_total") == 0
    other = iter([inserts(Path(table.uri), committer.table.position("p1"), 1)])

    def somebody_is_first(place: str) -> None:
        if place == "commit.checked" and (report := next(other, None)) is not None:
            WalCommitter(WalTable.open(table.uri)).commit([report])

    late = WalCommitter(WalTable.open(table.uri), metrics=metrics)
    with at_failpoints(somebody_is_first):
        assert late.commit([inserts(Path(table.uri), late.table.position("p0"), 3)]).committed
    assert value("wal_commit_conflict_total") == 1
    assert value("wal_committed_time_tick", pchannel="p0") == float(message(2)["time_tick"])


def test_the_delta_log_is_checkpointed_now_and_then_and_commits_go_on(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri), checkpoint_commits=3)
    for entry in range(8):
        assert committer.commit([inserts(Path(table.uri), committer.table.position("p0"), entry)]).committed
    last = json.loads((Path(table.uri) / "_delta_log" / "_last_checkpoint").read_text())
    assert last["version"] == 6
    assert entries(table) == [("message", "p0", entry) for entry in range(8)]


@pytest.mark.slow
def test_the_delta_log_is_cleaned_up_behind_checkpoints(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri), checkpoint_commits=3, keep_commits=4)
    for entry in range(20):
        assert committer.commit([inserts(Path(table.uri), committer.table.position("p0"), entry)]).committed
    log = sorted(path.name for path in (Path(table.uri) / "_delta_log").glob("*.json"))
    assert len(log) < 12
    table.refresh()
    assert table.version == committer.table.version, "a handle from before the first commit"
    assert table.position("p0") == committer.table.position("p0")
    assert entries(WalTable.open(table.uri)) == [("message", "p0", entry) for entry in range(20)]


def test_a_committer_whose_version_was_cleaned_away_is_fenced_or_commits_behind_the_others(table: WalTable) -> None:
    asleep = WalCommitter(WalTable.open(table.uri))
    late = inserts(Path(table.uri), table.position("p0"), 1)
    other = inserts(Path(table.uri), table.position("p1"), 7)
    awake = WalCommitter(WalTable.open(table.uri), checkpoint_commits=3, keep_commits=1)
    for entry in range(8):
        assert awake.commit([inserts(Path(table.uri), awake.table.position("p0"), entry)]).committed
    result = asleep.commit([late, other])
    assert result.fenced == (late,)
    assert result.committed == (other,)
    assert result.version == awake.table.version + 1
    found = WalTable.open(table.uri)
    assert found.position("p1").commits == 1
    assert entries(found) == [*(("message", "p0", entry) for entry in range(8)), ("message", "p1", 7)]


def test_a_committer_that_sleeps_between_check_and_commit_holds_the_clean_up_off(table: WalTable) -> None:
    awake = WalCommitter(WalTable.open(table.uri), checkpoint_commits=1, keep_commits=0)

    def meanwhile(place: str) -> None:
        if place == "commit.checked" and awake.table.commits("p0") < 6:
            for entry in range(6):
                awake.commit([inserts(Path(table.uri), awake.table.position("p0"), entry)])

    asleep = WalCommitter(WalTable.open(table.uri))
    with at_failpoints(meanwhile):
        result = asleep.commit([inserts(Path(table.uri), table.position("p1"), 7)])
    assert (len(result.committed), result.conflicts) == (1, 1), "the name of its next version was still taken"
    found = WalTable.open(table.uri)
    assert found.commits("p0") == 6
    assert found.commits("p1") == 1
