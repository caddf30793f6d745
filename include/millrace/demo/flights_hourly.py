"""The demo's derived table: the declared stream of the same name (:mod:`millrace.demo.streams`), rebuilt in slices."""

from __future__ import annotations

from typing import Final

from millrace.demo.streams import FLOWS
from millrace.operations.backfill.derived import of_stream

TABLES: Final = [of_stream(each, bucket="hour") for each in FLOWS if each.name == "flights_hourly"]
