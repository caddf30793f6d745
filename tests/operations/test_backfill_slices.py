"""A range is cut into slices that cover it once, on one grid; what cannot be cut is refused in words."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.demo.flights_hourly import TABLES
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill.declaration import BackfillParams
from millrace.operations.backfill.derived import DerivedTable, derived_table
from millrace.operations.backfill.run import plan, split_evenly
from millrace.operations.backfill.slices import EPOCH, TimeSlice, cut_range, record_slices, recorded_slices
from millrace.runtime.progress import Progress
from tests.operations.backfill_rig import SCHEMA as TRIPS

HOURLY = TABLES[0]
DAILY = DerivedTable(name="daily", source="flights", build=HOURLY.build, bucket="day", grain="day")
START = datetime(2013, 1, 1, tzinfo=UTC)


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 100))
def test_slices_cover_the_range_once_and_meet_on_the_grid(first: int, count: int, hours: int) -> None:
    start = START + timedelta(hours=first)
    end = start + timedelta(hours=count)
    found = cut_range(start, end, hours=hours, table=HOURLY)
    assert (found[0].start, found[-1].end) == (start, end)
    for one, two in pairwise(found):
        assert one.end == two.start
        assert (one.end - EPOCH) % timedelta(hours=hours) == timedelta(0)
    assert all(timedelta(0) < part.end - part.start <= timedelta(hours=hours) for part in found)


def test_the_zone_that_a_bound_is_given_in_makes_no_difference() -> None:
    east = timezone(timedelta(hours=2))
    given_east = cut_range(
        datetime(2013, 1, 1, 2, tzinfo=east), datetime(2013, 1, 2, 2, tzinfo=east), hours=24, table=HOURLY
    )
    assert given_east == [TimeSlice(START, START + timedelta(days=1))]
    assert given_east[0].whole_days


@pytest.mark.parametrize(
    ("start", "end", "hours", "table"),
    [
        (START + timedelta(minutes=30), START + timedelta(hours=1), 24, HOURLY),
        (START, START + timedelta(hours=1, seconds=1), 24, HOURLY),
        (START, START + timedelta(hours=12), 24, DAILY),
        (START, START + timedelta(days=2), 36, DAILY),
        (START, START + timedelta(days=2000), 1, HOURLY),
    ],
)
def test_a_range_that_cannot_be_cut_is_refused(start: datetime, end: datetime, hours: int, table: DerivedTable) -> None:
    with pytest.raises(InvalidArgument, match=r"whole|more than"):
        cut_range(start, end, hours=hours, table=table)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"end": START}, "is empty"),
        ({"end": START - timedelta(days=1)}, "is after end"),
        ({"start": "2013-01-01T00:00:00"}, "start: needs a zone"),
        ({"range_of": "moons"}, "range_of"),
        ({"slice_hours": 0}, "slice_hours"),
    ],
)
def test_parameters_that_can_never_be_right_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        BackfillParams.parse({"start": START, "end": START + timedelta(days=1), **change})


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_hold_every_slice_once_and_are_as_equal_as_can_be(count: int, places: int) -> None:
    slices = [TimeSlice(START + timedelta(days=each), START + timedelta(days=each + 1)) for each in range(count)]
    found = split_evenly(slices, places)
    assert [each for share in found for each in share] == slices
    assert len(found) == min(count, places)
    assert not found or max(map(len, found)) - min(map(len, found)) <= 1


def test_the_parameters_of_a_share_are_its_slices_alone() -> None:
    params = BackfillParams.parse(
        {"start": START, "end": START + timedelta(days=3), "range_of": "ticks", "run_id": "r"}
    )
    days = [START + timedelta(days=each) for each in range(6)]
    chosen = [(days[0], days[1]), (days[3], days[4])]
    one = BackfillParams.parse(params.for_slices(chosen, at=7).model_dump(mode="json"))
    assert one.stretches == chosen
    assert (one.range_of, one.at, one.run_id) == ("event_time", 7, "r")
    for wrong in ("2013-01-01", "2013-01-01T00:00/2013-01-02T00:00", "2013-01-02T00:00Z/2013-01-01T00:00Z"):
        with pytest.raises(InvalidArgument, match="slice"):
            BackfillParams.parse({**params.model_dump(), "slices": [wrong]})


def test_tables_of_ones_own_are_found_by_the_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = Settings(data_dir=tmp_path_factory.getbasetemp(), derived_modules="tests.operations.backfill_rig")
    assert derived_table(settings, "trips_hourly").source == "trips"
    with pytest.raises(InvalidArgument, match="flights_hourly, "):
        derived_table(settings, "elsewhere")
    for wrong in ("tests.operations.no_such_module", "millrace.operations"):
        with pytest.raises(InvalidSettings, match=wrong):
            derived_table(Settings(data_dir=settings.data_dir, derived_modules=wrong), "trips_hourly")
    with pytest.raises(InvalidArgument, match="name"):
        DerivedTable(name="slices", source="flights", build=HOURLY.build, bucket="hour")


def test_what_was_recorded_is_found_by_table_and_run(settings: Settings) -> None:
    assert recorded_slices(settings).num_rows == 0
    row = {
        "start": START, "end": START + timedelta(days=1), "at_tick": 5, "rows": 2, "digest": "0f", "definition": 1,
    }  # fmt: skip
    record_slices(settings, [{**row, "table": "a", "delta_version": 4, "run_id": "one"}])
    record_slices(settings, [{**row, "table": "a", "delta_version": 3, "run_id": "two"}])
    record_slices(settings, [{**row, "table": "b", "delta_version": 1, "run_id": "one"}])
    assert recorded_slices(settings, table="a")["delta_version"].to_pylist() == [3, 4]
    assert recorded_slices(settings, table="a", run_id="one")["start"].to_pylist() == [START]
    assert recorded_slices(settings).num_rows == 3


@pytest.mark.slow
def test_the_plan_of_event_time_needs_no_session_and_its_runs_hold_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(*_: object) -> NoReturn:
        raise AssertionError("a session was made")

    monkeypatch.setattr("millrace.operations.entry.spark_session", session)
    modules = "tests.operations.backfill_rig"
    settings = Settings(data_dir=tmp_path / "data", derived_modules=modules, operations_at_once=2)
    with connect(settings=settings) as client, ExitStack() as stack:
        stack.callback(client.connection.service.shutdown)
        client.catalog.ensure_pchannels(1)
        client.catalog.create_collection("trips", TRIPS, vchannels=1)
        ingest_to_end(settings, client.log)
        flush_to_end(settings)
        asked = {"table": "trips_hourly", "start": START, "end": START + timedelta(days=5), "run_id": "r"}
        found = plan(settings, BackfillParams.parse(asked), Progress())
        with pytest.raises(AssertionError, match="a session was made"):
            plan(settings, BackfillParams.parse({**asked, "range_of": "ticks"}), Progress())
    assert [each.start for each in found.slices] == [START + timedelta(days=number) for number in range(5)]
    runs = [BackfillParams.parse(each) for each in found.runs]
    assert [len(each.slices) for each in runs] == [2, 3]
    assert [part for each in runs for part in each.stretches] == [(each.start, each.end) for each in found.slices]
    assert {each.at for each in runs} == {found.at}
