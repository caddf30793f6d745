"""What quality runs add up to, who may let a failure go, and what users' suites may hold. Without Spark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, InvalidSuite, QualityBlocked
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.operations.coverage import Coverage
from millrace.operations.quality import collection_frames, results
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.data_docs import put_pages, remove_old_runs, write_index
from millrace.operations.quality.declaration import QualityParams, first_tick_at
from millrace.operations.quality.gate import blocked, require_unblocked
from millrace.operations.quality.quarantine import quarantined, read_slices, record, release_blocks
from millrace.operations.quality.ranges import TickRange, choose_ranges, covers
from millrace.operations.quality.results import read_results, read_state, record_run
from millrace.operations.quality.run import Selection, _frames
from millrace.operations.quality.state import Block, QualityState, apply_release, apply_run
from millrace.operations.quality.user_suites import parse_suite
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore, list_below, store_at
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_checkpoints
from tests.failpoints import at_failpoints
from tests.s3_server import bucket
from tests.tables.wal_maker import Collection, WalMaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

TICKS = Check("ticks", "expect_column_values_to_be_between", {"column": "tick_step", "min_value": 1}, "ticks increase")
SANE = Check("sane", "expect_column_values_to_not_be_null", {"column": "a"}, "a is there", "warning")


def looked(after: int, up_to: int, *, ok: bool, table: str = "wal", collection_id: int = 0) -> TableCheckResult:
    outcome = CheckResult(TICKS, success=ok, unexpected=0 if ok else 3, sample=() if ok else ("7",))
    return TableCheckResult(table, {"p": TickRange(after, up_to)}, (outcome, CheckResult(SANE, False)), collection_id)


def test_a_failure_stands_until_a_check_over_its_whole_range_passes(settings: Settings) -> None:
    record_run(settings, "first", [looked(0, 100, ok=True)])
    assert read_state(settings).checked_ticks("wal") == {"p": 100}
    record_run(settings, "second", [looked(100, 200, ok=False)])
    (block,) = blocked(settings)
    assert (block.run_id, block.expectation, block.unexpected) == ("second", "ticks", 3)
    assert read_state(settings).checked_ticks("wal") == {"p": 100}, "what failed is looked at again"
    with pytest.raises(QualityBlocked, match=f"truncation is blocked .*{block.id}") as caught:
        require_unblocked(settings, what="truncation")
    assert caught.value.blocks == (block.id,)
    record_run(settings, "elsewhere", [looked(150, 300, ok=True)])
    assert [each.id for each in blocked(settings)] == [block.id]
    record_run(settings, "mended", [looked(100, 300, ok=True)])
    assert blocked(settings) == []
    assert read_state(settings).checked_ticks("wal") == {"p": 300}
    rows = read_results(settings)
    assert rows.num_rows == 8
    assert rows["run_id"][0].as_py() == "mended"
    assert read_results(settings, run_id="second", failed_only=True).num_rows == 2


def test_a_slice_is_quarantined_once_and_released_by_a_person(settings: Settings) -> None:
    bad = looked(0, 50, ok=False, table="collections/4", collection_id=4)
    state = record_run(settings, "run", [bad, looked(0, 50, ok=False)])
    assert [each.collection_id for each in record(settings, state.blocks)] == [4], "the WAL has no slice to set aside"
    assert record(settings, state.blocks) == []
    (one,) = quarantined(settings, 4)
    assert one.ranges == {"p": TickRange(0, 50)}
    with pytest.raises(InvalidArgument, match="nonsense: no such block"):
        release_blocks(settings, ["nonsense"], by="somebody")
    release_blocks(settings, [one.id], by="somebody", note="known defect of the source")
    assert quarantined(settings) == []
    assert [(each.status, each.by, each.note) for each in read_slices(settings)] == [
        ("released", "somebody", "known defect of the source")
    ]
    assert [each.table for each in blocked(settings)] == ["wal"]
    assert read_state(settings).checked_ticks("collections/4") == {"p": 50}
    release_blocks(settings, [one.id], by="somebody")
    assert len(read_slices(settings)) == 1


class Died(BaseException):
    """Ends a run where it stands."""


def test_a_release_that_died_leaves_the_block_and_is_completed_by_the_next(settings: Settings) -> None:
    state = record_run(settings, "run", [looked(0, 50, ok=False)])

    def dies(name: str) -> None:
        if name == "quality.released":
            raise Died

    with pytest.raises(Died), at_failpoints(dies):
        release_blocks(settings, [state.blocks[0].id], by="somebody")
    assert len(blocked(settings)) == 1
    release_blocks(settings, [state.blocks[0].id], by="somebody")
    assert blocked(settings) == []


def test_of_two_runs_at_once_neither_loses_what_the_other_found(settings: Settings) -> None:
    record_run(settings, "before", [looked(0, 10, ok=True)])
    once = iter([True])

    def another_run(name: str) -> None:
        if name == "commit.checked" and next(once, False):
            record_run(settings, "other", [looked(0, 10, ok=False, table="segments")])

    with at_failpoints(another_run):
        record_run(settings, "run", [looked(10, 20, ok=False)])
    assert {(each.run_id, each.table) for each in blocked(settings)} == {("other", "segments"), ("run", "wal")}
    assert read_state(settings).revision == 3
    assert read_results(settings).num_rows == 6


def test_the_files_of_many_runs_are_joined(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "COMPACT_REVISIONS", 4)
    for number in range(8):
        record_run(settings, f"run{number}", [looked(number, number + 1, ok=True)])
    table = results.open_table(Path(results.quality_results_uri(settings)))
    assert table is not None
    assert len(table.file_uris()) <= 3
    assert read_results(settings).num_rows == 16
    assert read_state(settings).checked_ticks("wal") == {"p": 8}


RUNS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), max_size=12)


@given(RUNS, st.sets(st.integers(0, 11)))
def test_no_tick_counts_as_checked_that_only_a_failed_run_looked_at(
    runs: list[tuple[int, int, bool]], released: set[int]
) -> None:
    state, accepted = QualityState(), set()
    for number, (after, length, ok) in enumerate(runs):
        state = apply_run(state, str(number), number, [looked(after, after + length, ok=ok)])
        if ok:
            accepted |= set(range(after + 1, after + length + 1))
        mine = [block.id for block in state.blocks if block.run_id == str(number)]
        if number in released and mine:
            state = apply_release(state, mine)
            accepted |= set(range(after + 1, after + length + 1))
    assert set(range(1, state.checked_ticks("wal").get("p", 0) + 1)) <= accepted
    assert QualityState.from_text(state.to_json()) == state
    standing = {block.run_id for block in state.blocks}
    for number, (after, length, ok) in enumerate(runs):
        later = [each for each in runs[number + 1 :] if each[0] <= after and each[0] + each[1] >= after + length]
        if not ok and number not in released and not later:
            assert str(number) in standing, "a failure that nothing passed over, and nobody released, stands"


def test_a_range_begins_behind_what_was_checked_unless_it_is_given() -> None:
    reached = {"a": 100, "b": 40}
    assert choose_ranges(reached, {"a": 60}) == {"a": TickRange(60, 100), "b": TickRange(0, 40)}
    assert choose_ranges(reached, {"a": 60}, start=10, end=51) == {"a": TickRange(9, 50), "b": TickRange(9, 40)}
    assert choose_ranges(reached, {}, start=90)["b"].empty
    assert covers({"a": TickRange(0, 100)}, {"a": TickRange(10, 100)})
    assert not covers({"a": TickRange(0, 100)}, {"a": TickRange(10, 100), "b": TickRange(0, 1)})


def test_a_moment_is_a_tick_or_a_timestamp_in_utc_where_it_names_no_zone() -> None:
    assert first_tick_at("") is None
    assert first_tick_at("17") == 17
    assert first_tick_at("1970-01-01T00:00:01Z") == 1000 << 18
    assert first_tick_at("1970-01-01T01:00:01+01:00") == 1000 << 18
    assert first_tick_at("1970-01-01T00:00:01") == 1000 << 18
    with pytest.raises(InvalidArgument, match="neither a time tick"):
        QualityParams.parse({"start": "yesterday"})


GOOD = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "a"}}


def test_what_great_expectations_exports_is_a_suite() -> None:
    text = json.dumps(
        {
            "name": "mine",
            "id": None,
            "meta": {"great_expectations_version": "1.24.1"},
            "notes": None,
            "expectations": [
                {**GOOD, "id": "x", "meta": {}, "severity": "warning"},
                {**GOOD, "kwargs": {"column": "b"}},
            ],
        }
    )
    one, two = parse_suite(text, where="mine.json", columns=["a", "b"])
    assert (one.critical, two.critical, one.source) == (False, True, "user")
    assert one.name != two.name
    assert parse_suite(text, where="mine.json", columns=["a", "b"])[0].name == one.name


@pytest.mark.parametrize(
    "suite, words",
    [
        ("{", "line 1, column 2: invalid JSON"),
        ([], 'a suite must be an object with a list "expectations"'),
        ({"expectations": [], "expektations": []}, "unknown key 'expektations'"),
        ({"expectations": ["a"]}, r'expectations\[0\]: an expectation must be an object with a string "type"'),
        ({"expectations": [{**GOOD, "kwargs": {"column": "z"}}]}, "has no column 'z'; it has a"),
        ({"expectations": [{**GOOD, "kwargs": {"column_list": ["a", "z"]}}]}, "has no column 'z'"),
        ({"expectations": [{**GOOD, "severity": "fatal"}]}, "severity 'fatal' must be one of critical"),
        ({"expectations": [GOOD, GOOD]}, r"expectations\[1\]: the name .* is already used"),
        ({"expectations": [{**GOOD, "kwargs": ["a"]}]}, "kwargs and meta must be objects"),
    ],
)
def test_a_suite_that_cannot_be_used_says_where_and_why(suite: object, words: str) -> None:
    text = suite if isinstance(suite, str) else json.dumps(suite)
    with pytest.raises(InvalidSuite, match=rf"^mine\.json: .*{words}|^mine\.json: {words}"):
        parse_suite(text, where="mine.json", columns=["a"])


@pytest.fixture(params=["disk", "bucket"])
def docs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TableStore]:
    if request.param == "disk":
        yield store_at(tmp_path / "docs")
        return
    with bucket(monkeypatch) as uri:
        yield store_at(f"{uri}/quality/docs")


def made_by_a_run(folder: Path, day: int, tables: Sequence[str], *, words: str = "Succeeded") -> Path:
    """Pages as Great Expectations leaves them."""
    for table in tables:
        page = folder / "validations" / table / f"202601{day:02d}T000000Z-abcdef" / "moment" / "a #b.html"
        page.parent.mkdir(parents=True)
        page.write_text(f'<span>Status:</span> <i class="fas"></i> {words}')
    for name in ("static/styles.css", "expectations/wal.html", "index.html"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of day {day}")
    return folder


def runs_of(store: TableStore, folder: str) -> set[str]:
    return set(re.findall(r"\d{8}(?=T000000Z)", " ".join(list_below(store, folder))))


def test_the_pages_of_the_newest_runs_stay(docs: TableStore, tmp_path: Path) -> None:
    for day in range(1, 6):
        put_pages(docs, made_by_a_run(tmp_path / str(day), day, ["wal", "collections/1"]))
    assert remove_old_runs(docs, runs=2, dry_run=True) == 3
    assert remove_old_runs(docs, runs=2) == 3
    for folder in ("validations", "runs"):
        assert runs_of(docs, folder) == {"20260104", "20260105"}
    assert docs.read("static/styles.css") == b"static/styles.css of day 1", "copied once"
    assert docs.read("expectations/wal.html") == b"expectations/wal.html of day 5"
    if isinstance(docs, LocalStore):
        assert len([path for path in docs.folder.rglob("*abcdef") if path.is_dir()]) == 4, "no empty folders stay"
    assert remove_old_runs(store_at(f"{docs.uri}/nothing")) == 0


def test_the_index_links_every_result_the_newest_run_first(docs: TableStore, tmp_path: Path) -> None:
    earlier = made_by_a_run(tmp_path / "earlier", 1, ["wal"])
    for name in list_below(store_at(earlier), "validations"):  # of a build that wrote no notes
        docs.replace(name, (earlier / name).read_bytes())
    last = made_by_a_run(tmp_path / "last", 3, ["wal"])
    put_pages(docs, made_by_a_run(last, 3, ["collections/1"], words="Failed"))
    assert write_index(docs) == f"{docs.uri}/index.html"
    text = (docs.read("index.html") or b"").decode()
    found = re.findall(r'<td>(\d{8})T[^<]*</td><td><a href="([^"]+)">([^<]+)</a></td><td class="[^"]*">(\w+)<', text)
    assert [(run, table, words) for run, _, table, words in found] == [
        ("20260103", "collections/1", "Failed"),
        ("20260103", "wal", "Succeeded"),
        ("20260101", "wal", "Succeeded"),
    ]
    assert all(docs.size(unquote(link)) for _, link, *_ in found)


def test_a_collection_without_new_rows_is_passed_over_without_spark(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker)
    collection.create()
    [first, *_] = collection.vchannels
    keys = iter(collection.keys_of(first, 9))

    def write() -> None:
        collection.append(first, collection.insert({"id": [next(keys)], "body": ["x"]}, vchannel=first))
        rest()

    def rest() -> None:
        for pchannel in maker.pchannels:
            maker.append(pchannel, [builders.flush_all(term=1)])
        maker.commit()
        flush_to_end(settings)

    made: list[int] = []
    monkeypatch.setattr(collection_frames, "visible_rows", lambda _spark, _settings, stored, *_: made.append(stored))

    def chosen(state: QualityState | None = None) -> tuple[int, list[TableCheckResult]]:
        """How many collections Spark would check, and those that need no check; they are recorded as a run does."""
        made.clear()
        selection = Selection(Coverage.load(settings, "quality"))
        params = QualityParams(tables=("collections",))
        session = cast("Callable[[], SparkSession]", lambda: None)
        list(_frames(session, settings, params, state or read_state(settings), selection))
        record_run(settings, "run", selection.empty)
        return len(made) + len(selection.small), selection.empty

    write()
    assert chosen() == (1, [])
    record_run(settings, "run", [TableCheckResult("collections/1", _reached(settings), (CheckResult(SANE, True),), 1)])
    assert chosen() == (0, []), "nothing came"
    rest()
    count, empty = chosen()
    assert (count, [each.table for each in empty], empty[0].results) == (0, ["collections/1"], ())
    assert read_state(settings).checked_ticks("collections/1") == {
        name: each.up_to for name, each in _reached(settings).items()
    }
    assert chosen() == (0, []), "it counts as checked"
    rest()
    block = Block("b", "collections/1", "sane", "", "run", 0.0, 1, {}, 1, (), "")
    state = read_state(settings)
    assert chosen(QualityState(state.revision, state.checked, (block,)))[0] == 1, "a check of no rows may lift a block"
    write()
    assert chosen()[0] == 1


def _reached(settings: Settings) -> dict[str, TickRange]:
    checkpoints = read_checkpoints(open_table(settings.checkpoints_uri))
    return {name: TickRange(0, each.time_tick) for name, each in checkpoints.items()}
