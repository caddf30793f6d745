"""Five operations that a person starts together on the whole system: the time of each from its trigger to its end.

That includes what surrounds the work: Airflow's slots, the queue for Spark, the JVMs. The baseline is the sum of the
same five when each starts after the previous one has ended: in parallel they must not take longer than that.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from millrace.base.errors import AirflowUnavailable
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.demo.flights import flights
from millrace.demo.load import COLLECTION, FULL_SPEED_ROWS, ensure_collection
from millrace.installation.airflow_api import AirflowApi
from millrace.installation.system import Installation

START: Final = datetime(2013, 1, 1, tzinfo=UTC)
ENDED: Final = ("success", "failed")
POLL_SECONDS: Final = 1.0
EMPTY_COLLECTIONS: Final = 4
"""Collections without a row beside the flights, as an installation that is used has them."""


def concurrent_operations(
    folder: Path, *, rows: int | None = None, slices: int = 7, seconds: float = 1800.0, alone: bool = True
) -> dict[str, Any]:
    """Return seconds from trigger to end of each of the five, started together and, if `alone`, one after the other.

    Loads `rows` of the flights (default: all) and rebuilds `slices` days. A run that has not ended after `seconds` is
    None.
    """
    settings = Settings(data_dir=folder / "data", cache_dir=Settings.load().cache_dir, start_deadline=240.0)
    installation = Installation(settings)
    try:
        running = installation.start(port=0)
        installation.wait_airflow(running)
        installation.wait_streaming(running)
        _load(settings, rows)
        api = installation.api(running.address)
        days = {"start": START.isoformat(), "end": (START + timedelta(days=slices)).isoformat()}
        five: dict[str, dict[str, Any]] = {
            "checkpoint": {},
            "recovery": {"mode": "diagnose"},
            "quality": {},
            "compaction": {},
            "backfill_range": days,
        }
        _wait_idle(api, list(five), seconds=seconds)
        found: dict[str, Any] = {"five_together": _run(api, five, seconds=seconds)}
        if alone:
            in_turn: dict[str, float | None] = {}
            for dag_id, conf in five.items():
                in_turn |= _run(api, {dag_id: conf}, seconds=seconds)
            found |= {"each_alone": in_turn}
        return {name: each | _ends(each) if name == "five_together" else each for name, each in found.items()}
    finally:
        installation.stop()


def _ends(found: dict[str, float | None]) -> dict[str, float | None]:
    ended = [each for each in found.values() if each is not None]
    return {"first": min(ended, default=None), "all": max(ended) if len(ended) == len(found) else None}


def _load(settings: Settings, rows: int | None) -> None:
    """Load the flights through a producer, make empty collections, and flush everything."""
    year = flights().sort_by("time_hour").slice(0, rows)
    with connect(settings=settings) as db:
        db.catalog.ensure_pchannels(settings.pchannels)
        collection = ensure_collection(db)
        for number in range(EMPTY_COLLECTIONS):
            db.catalog.create_collection(f"empty{number}", collection.schema, vchannels=len(collection.vchannels))
        producer = db.new_producer()
        for start in range(0, len(year), FULL_SPEED_ROWS):
            producer.insert(collection, year.slice(start, FULL_SPEED_ROWS), partition_by="origin")
        db.catalog.flush(COLLECTION)
        db.collection(COLLECTION).read(deadline=300.0)


def _wait_idle(api: AirflowApi, dag_ids: list[str], *, seconds: float) -> None:
    """Wait until no run that a schedule began goes on."""
    end = time.monotonic() + seconds
    while any(each["state"] not in ENDED for dag_id in dag_ids for each in _runs(api, dag_id)):
        if time.monotonic() > end:
            return
        time.sleep(POLL_SECONDS)


def _runs(api: AirflowApi, dag_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.call("GET", f"/api/v2/dags/{dag_id}/dagRuns?order_by=-run_after&limit=10")[
        "dag_runs"
    ]
    return found


def _run(api: AirflowApi, chosen: dict[str, dict[str, Any]], *, seconds: float) -> dict[str, float | None]:
    """Start each, and wait for all; seconds from the first trigger to the end of each, rounded."""
    began = time.monotonic()
    started = {}
    for dag_id, conf in chosen.items():
        run_id = f"bench-{dag_id}-{time.time_ns()}"
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        try:
            api.call("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)
        except AirflowUnavailable as error:
            if error.status != 409:  # the call was repeated, and the first one had been taken
                raise
        started[dag_id] = run_id
    found: dict[str, float | None] = dict.fromkeys(started)
    while None in found.values() and time.monotonic() - began < seconds:
        for dag_id in [each for each in started if found[each] is None]:
            path = f"/api/v2/dags/{dag_id}/dagRuns/{quote(started[dag_id], safe='')}"
            try:
                state = api.call("GET", path)["state"]
            except AirflowUnavailable as error:
                if error.status is not None:
                    raise
                continue  # a busy API server that did not answer in time is asked again
            if state in ENDED:
                found[dag_id] = round(time.monotonic() - began, 1)
                if state == "failed":
                    raise RuntimeError(f"the run {started[dag_id]} of {dag_id} failed")
        time.sleep(POLL_SECONDS)
    return found
