"""Example: your own DAG, which starts whenever the streaming flusher has flushed segments.

It reads the collections that the event names, at the tick of the newest segment. Copy it, and replace `count_rows` with
your own work.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import task

from millrace_airflow.assets import segments_flushed
from millrace_airflow.defaults import millrace_dag
from millrace_airflow.hooks import MillraceHook

with millrace_dag("example_on_segments_flushed", doc=__doc__, schedule=[segments_flushed], tags=["example"]) as dag:

    @task
    def count_rows(triggering_asset_events: Any = None) -> dict[str, int]:
        """Count the rows of each collection that the events name, at the tick of its newest segment."""
        ticks: dict[int, int] = {}
        for event in triggering_asset_events[segments_flushed]:
            news = event.extra["payload"]
            for collection in news["collections"]:
                ticks[collection] = max(ticks.get(collection, 0), news["time_tick"])
        with MillraceHook().database(start=False) as db:
            names = {each.id: each.name for each in db.catalog.collections()}
            return {names[number]: db[names[number]].read(at=tick).num_rows for number, tick in ticks.items()}

    count_rows()
