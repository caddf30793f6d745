"""Every DAG file is light and complete.

Quick to import, nothing heavy with it, docs, tags, owner, form, retries, deadline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.airflow_home import ROOT
from tests.airflow_loads import LARGEST_SHARE, airflow_loads

FILES = sorted((ROOT / "dags").rglob("*.py"))
OF_A_STORE = {"pipelines", "flows"}
"""Files that have a DAG for each thing that is declared in a store, and none where nothing is.

Tests/plugins/test_pipelines.py.
"""


def looked(path: Path) -> dict[str, Any]:
    found = airflow_loads()[str(path)]
    assert "error" not in found, found["error"]
    return found


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_dag_file_is_quick_and_loads_nothing_heavy(path: Path) -> None:
    found = looked(path)
    assert found["heavy"] == []
    assert found["share"] < LARGEST_SHARE


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_dag_says_what_it_is_and_how_it_fails(path: Path) -> None:
    dags = looked(path)["dags"]
    assert bool(dags) != (path.stem in OF_A_STORE), f"{path.name} has {len(dags)} DAGs"
    for dag in dags:
        assert dag["docs"], dag["dag_id"]
        assert dag["description"]
        assert "millrace" in dag["tags"]
        assert dag["owners"] == ["millrace"]
        assert all(dag["params"].values()), f"{dag['dag_id']}: a parameter without a description in {dag['params']}"
        assert dag["deadlines"]
        assert set(dag["policies"]) == {"FaultClassPolicy"}


def test_the_folder_of_dags_has_no_import_error(airflow: Path) -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(ROOT / "dags"), collect_dags=True)
    assert bag.import_errors == {}
    assert len(bag.dags) >= len(FILES) - len(OF_A_STORE)
