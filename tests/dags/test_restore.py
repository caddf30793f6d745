"""The restore DAG: looked at first, made without anybody where nothing is replaced, and
decided by a person where it is.
"""

from __future__ import annotations

from typing import Any

import pytest

from millrace.client.database import Database
from millrace.node.ingest.definition import ingest_to_end
from tests.dags.conftest import RunDag, load_dag


@pytest.mark.slow
def test_a_new_collection_is_made_without_asking(run_dag: RunDag, client: Database) -> None:
    conf: dict[str, Any] = {"collection": "c", "into": "then"}
    dry = run_dag("restore", {**conf, "dry_run": True})
    assert (dry.results["check"]["rows"], dry.tasks["approve"], dry.tasks["restore"]) == (9, "skipped", "skipped")
    ran = run_dag("restore", conf)
    assert (ran.state, ran.tasks["approve"], ran.tasks["restore"]) == ("success", "skipped", "success")
    ingest_to_end(client.settings, client.log)
    assert sorted(client.collection("then").read()["id"].to_pylist()) == list(range(9))


def test_a_person_decides_where_rows_are_replaced(airflow: object) -> None:
    dag = load_dag("restore")
    decides: Any = dag.get_task("who_decides").python_callable
    assert decides(params={"in_place": True}) == "approve"
    assert decides(params={"in_place": False}) == "restore"
    assert dag.get_task("restore").upstream_task_ids == {"who_decides", "approve"}
    assert dag.get_task("restore").job_params["run_id"] == "{{ run_id }}", (
        "a task that is cleared does not replace again"
    )
