"""The checkpoint DAG on a real deployment.

One job a run, its report as the task's result, red where a replay differs.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millrace.client.database import Database
from millrace.message.ids import EARLIEST
from tests.dags.conftest import RunDag


@pytest.mark.slow
def test_a_checkpoint_is_written_and_the_log_truncated(run_dag: RunDag, client: Database) -> None:
    ran = run_dag("checkpoint")
    assert ran.state == "success"
    report = ran.results["checkpoint"]
    assert [each["written"] for each in report["channels"]] == [True]
    assert client.log.open("dml_0").describe().begin > EARLIEST
    assert report["truncated"][0]["pchannel"] == "dml_0"


@pytest.mark.slow
def test_a_replay_that_differs_fails_the_task_and_removes_nothing(run_dag: RunDag, client: Database) -> None:
    table = DeltaTable(str(Path(client.settings.wal_uri)))
    victim = next(uri for uri in table.file_uris() if "kind=message" in uri).removeprefix("file://")
    rows = pq.ParquetFile(victim).read()
    place = rows.schema.get_field_index("term")
    pq.write_table(rows.set_column(place, rows.schema.field(place), pa.array([7] * rows.num_rows, pa.int64())), victim)
    ran = run_dag("checkpoint")
    assert ran.tasks["checkpoint"] == "failed"
    assert client.log.open("dml_0").describe().begin == EARLIEST
