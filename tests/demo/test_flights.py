"""The demo's input: every flight of the package, typed, with a primary key of its own."""

from __future__ import annotations

import csv
import io
import zipfile

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.demo.flights import data_file, flights, flights_schema
from millrace.message.field_types import SCALAR_TYPES


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return flights()


def test_every_flight_is_there_under_an_id_of_its_own(table: pa.Table) -> None:
    assert table.num_rows == 336_776
    assert pc.count_distinct(table["id"]).as_py() == table.num_rows


def test_the_columns_are_those_of_the_schema_and_nothing_required_is_null(table: pa.Table) -> None:
    expected = pa.schema([pa.field(name, SCALAR_TYPES[kind], nullable=null) for name, kind, null in flights_schema()])
    assert table.schema == expected
    table.validate(full=True)
    assert not [name for name, _, nullable in flights_schema() if not nullable and table[name].null_count]


def test_cancelled_flights_and_origins_are_what_the_published_data_says(table: pa.Table) -> None:
    assert table["dep_time"].null_count == 8_255
    counts = {row["values"]: row["counts"] for row in pc.value_counts(table["origin"]).to_pylist()}
    assert counts == {"EWR": 120_835, "JFK": 111_279, "LGA": 104_662}


@pytest.mark.slow
def test_values_are_those_of_the_file(table: pa.Table) -> None:
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive, archive.open("flights.csv") as file:
        rows = csv.DictReader(io.TextIOWrapper(file))
        for number, row in enumerate(rows):
            if number % 20_011 and not (number < 2_000 and not row["dep_time"]):
                continue
            ours = table.slice(number, 1).to_pylist()[0]
            assert ours["time_hour"].strftime("%Y-%m-%dT%H:%M:%SZ") == row["time_hour"]
            parts = f"{row['time_hour'][:10]}-{row['carrier']}-{row['flight']}-{row['origin']}"
            assert ours["id"] == parts or ours["id"].startswith(f"{parts}-")
            for name, text in row.items():
                if name != "time_hour":
                    assert (str(ours[name]) if ours[name] is not None else "NA") == text, (number, name)


def test_two_readings_are_equal(table: pa.Table) -> None:
    assert flights().equals(table)
