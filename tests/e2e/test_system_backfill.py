"""Three days rebuilt through Airflow's own backfill, by its command line and by REST, against
what DuckDB makes of the flights.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millrace.base.errors import AirflowUnavailable
from tests.e2e.flown import START, days, derived, fly, hourly, visible
from tests.e2e.system import ENDED, Airflow, System, until

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.spark, pytest.mark.timeout(1800)]

FIRST, LAST = (START + timedelta(days=number) for number in (0, 2))
DAYS = {
    (_day.strftime("%Y-%m-%dT00:00:00Z"), (_day + timedelta(days=1)).strftime("%Y-%m-%dT00:00:00Z"))
    for _day in (START + timedelta(days=number) for number in range(3))
}


def finished(airflow: Airflow, *, since: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """The three runs of a backfill, once all of them have ended since.

    `since`: (run id, end) of those that had before.
    """

    def ended() -> list[dict[str, Any]] | None:
        found = [each for each in airflow.runs("backfill") if each["run_type"] == "backfill"]
        fresh = [
            each for each in found if each["state"] in ENDED and (each["dag_run_id"], each["end_date"]) not in since
        ]
        return fresh if len(fresh) == 3 else None

    return until(ended, seconds=900, what="the three runs of the backfill have ended")


def known(airflow: Airflow) -> set[tuple[str, str]]:
    return {(each["dag_run_id"], each["end_date"]) for each in airflow.runs("backfill")}


def ask(create: Callable[[], Any]) -> None:
    """Create a backfill, again where Airflow's SQLite was locked.

    Airflow takes back what it has made then, for a retry.

    Each of its runs is a transaction there that reads before it writes, and fails at once where another
    process wrote in between. A backfill whose runs have all ended counts as running until the scheduler
    looks again, each half minute.
    """

    def created() -> bool:
        try:
            create()
        except (AirflowUnavailable, AssertionError) as error:
            locked = "database is locked" in str(error) or getattr(error, "status", None) == 503
            if not locked and "already a running backfill" not in str(error):
                raise
            return False
        return True

    until(created, seconds=120, what="Airflow takes the backfill")


def slices(system: System) -> dict[Any, str]:
    """The newest digest of each slice, by its start."""
    table = DeltaTable(str(system.settings.data_dir / "derived" / "slices")).to_pyarrow_table()
    rows = sorted(table.to_pylist(), key=lambda row: row["delta_version"])
    return {row["start"]: row["digest"] for row in rows}


def test_three_days_by_the_command_line_and_again_by_rest_and_after_late_rows(system: System, airflow: Airflow) -> None:
    rows = days(4)  # the fourth day is not asked for
    fly(system.settings, rows)
    airflow.pause("backfill", False)
    asked = ["--from-date", f"{FIRST:%Y-%m-%d}", "--to-date", f"{LAST:%Y-%m-%d}", "--reprocess-behavior", "completed"]
    before = known(airflow)
    ask(lambda: system.run("airflow", "backfill", "create", "--dag-id", "backfill", *asked))
    runs = finished(airflow, since=before)
    assert {each["state"] for each in runs} == {"success"}
    assert {(each["data_interval_start"], each["data_interval_end"]) for each in runs} == DAYS
    made, _ = derived(system.settings)
    assert made == hourly(visible(rows), first=0, count=3)
    digests = slices(system)
    assert len(digests) >= 3

    before = known(airflow)
    body = {"dag_id": "backfill", "from_date": FIRST.isoformat(), "to_date": LAST.isoformat()}
    body |= {"reprocess_behavior": "completed", "max_active_runs": 2}
    ask(lambda: airflow.api.call("POST", "/api/v2/backfills", body))
    assert {each["state"] for each in finished(airflow, since=before)} == {"success"}
    assert derived(system.settings)[0] == made, "a second backfill of the same rows changes nothing"
    assert slices(system) == digests

    late = days(1, first=1)
    late = late.set_column(0, late.schema.field("id"), pa.array([f"{key.as_py()}/late" for key in late["id"]]))
    fly(system.settings, late)
    before = known(airflow)
    ask(lambda: airflow.api.call("POST", "/api/v2/backfills", body))
    assert {each["state"] for each in finished(airflow, since=before)} == {"success"}
    made, _ = derived(system.settings)
    assert made == hourly(pa.concat_tables([visible(rows), visible(late)]), first=0, count=3)
    assert {start for start, digest in slices(system).items() if digests.get(start) != digest} == {
        START + timedelta(days=1)
    }
    system.verified()
