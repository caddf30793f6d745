"""Test your own program on a whole deployment without a JVM. Run it with pytest."""

from collections.abc import Iterator

import pytest

import millrace.testing


def busiest(db: millrace.Database) -> str:
    """The program under test: the station with the most trips."""
    trips = db["trips"].to_pandas()
    return str(trips.station.value_counts().idxmax())


@pytest.fixture
def db() -> Iterator[millrace.Database]:
    with millrace.testing.deployment() as made:
        yield made


def test_the_busiest_station_has_the_most_trips(db: millrace.Database) -> None:
    trips = db.create_collection("trips", {"id": "int64", "station": "string"}, key="id")
    trips.insert({"id": [1, 2, 3], "station": ["Centre", "Port", "Port"]})
    assert busiest(db) == "Port"
    trips.delete([2, 3])
    assert busiest(db) == "Centre"
