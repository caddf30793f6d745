"""The input of the streams: flights as they are reported, at their departure, and the weather of each hour.

A cancelled flight is reported when it was due. One flight in :data:`LATE_EVERY` is reported a month late, after every
watermark.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.demo.flights import data_file, flights, flights_schema

LATE_EVERY: Final = 500
LATE_BY: Final = timedelta(days=30)
_DAY: Final = 86_400_000_000
_MINUTE: Final = 60_000_000
_WEATHER: Final = {"temp": pa.float64(), "wind_speed": pa.float64(), "precip": pa.float64(), "visib": pa.float64()}

OnSent = Callable[[int], None]


def weather() -> pa.Table:
    """Return the weather at the three airports, hour by hour: 26,115 rows in order of time."""
    columns = {"origin": pa.string(), "time_hour": pa.timestamp("us", "UTC"), **_WEATHER}
    options = csv.ConvertOptions(column_types=columns, null_values=["", "NA"], include_columns=list(columns))
    table = csv.read_csv(data_file("weather.csv"), convert_options=options)
    return table.sort_by([("time_hour", "ascending"), ("origin", "ascending")])


def flights_by_report_time(count: int | None = None) -> tuple[pa.Table, pa.Array]:
    """Return the first `count` flights in the order of their reports, and the time of each report in microseconds."""
    table = flights().sort_by([("time_hour", "ascending"), ("id", "ascending")]).slice(0, count)
    due = table["time_hour"].cast(pa.int64()).to_numpy() + table["minute"].to_numpy().astype(np.int64) * _MINUTE
    at = due + pc.fill_null(table["dep_delay"], 0).to_numpy().astype(np.int64) * _MINUTE
    at[np.arange(0, len(at), LATE_EVERY)] += LATE_BY // timedelta(microseconds=1)
    order = np.argsort(at, kind="stable")
    return table.take(pa.array(order)), pa.array(at[order])


class FlightFeed:
    """Inserts both into their collections, a day of reports at a time: first the weather, then the flights."""

    def __init__(self, db: Database, rows: int | None) -> None:
        columns = {name: f"{kind}?" if nullable else kind for name, kind, nullable in flights_schema()}
        self.flights, times = flights_by_report_time(rows)
        self._flights_at = times.to_numpy()
        until = self.flights["time_hour"].cast(pa.int64()).to_numpy().max() + _DAY
        found = weather()
        self.weather = found.filter(pa.array(found["time_hour"].cast(pa.int64()).to_numpy() < until))
        self._weather_at = self.weather["time_hour"].cast(pa.int64()).to_numpy()
        self._into_flights = db.create_collection("flights", columns, key="id", vchannels=2)
        measured = {"origin": "string", "time_hour": "timestamp", **dict.fromkeys(_WEATHER, "float64?")}
        self._into_weather = db.create_collection("weather", measured, key=("origin", "time_hour"))
        self.days = int((self._flights_at.max() - self._weather_at.min()) // _DAY) + 1

    def run(self, seconds: float, stop: threading.Event, sent: OnSent) -> None:
        """Insert all days within `seconds`, or as fast as the log accepts them if that is longer.

        Calls `sent` with the number of rows of each insert. Ends early once `stop` is set.
        """
        begun, first = time.monotonic(), int(self._weather_at.min())
        for day in range(self.days):
            if stop.wait(max(0.0, begun + seconds * day / self.days - time.monotonic())):
                return
            until = (first + day * _DAY, first + (day + 1) * _DAY)
            for into, rows, times in (
                (self._into_weather, self.weather, self._weather_at),
                (self._into_flights, self.flights, self._flights_at),
            ):
                sent(_insert(into, rows, times, until))


def _insert(into: Collection, rows: pa.Table, times: np.ndarray, between: tuple[int, int]) -> int:
    start, end = (int(np.searchsorted(times, each)) for each in between)
    if start < end:
        into.insert(rows.slice(start, end - start))
    return end - start
