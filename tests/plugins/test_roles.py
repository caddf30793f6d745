"""Each of Millrace's DAGs is started by who may, by whatever way; what a user may not start is refused, not hidden."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManagerRole
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

from millrace.access.grants import Role
from millrace.flows.range_host.observed import dag_id as pipeline_dag
from millrace.flows.spark_host.status import dag_id
from millrace.flows.status import scheduled_dag_id
from millrace_airflow.roles import AIRFLOW_ROLES, DAG_ROLES, RolesAuthManager
from millrace_airflow.standalone import Standalone
from tests.airflow_home import ROOT

CHANGES = ("POST", "PUT", "DELETE")
ENTITIES = (None, *DagAccessEntity)


def may(
    role: str | None, method: Any, dag_id: str | None, entity: DagAccessEntity | None = DagAccessEntity.RUN
) -> bool:
    user = SimpleAuthManagerUser(username="somebody", role=role)
    return RolesAuthManager().is_authorized_dag(
        method=method, user=user, access_entity=entity, details=DagDetails(id=dag_id)
    )


def test_every_dag_of_ours_has_its_role() -> None:
    assert set(DAG_ROLES) | {"streams", "pipelines", "flows"} == {
        path.stem for path in (ROOT / "dags").glob("*.py")
    }  # a DAG a flow


def test_the_dag_of_a_flow_is_started_by_who_may_operate_alone() -> None:
    for method in CHANGES:
        for entity in ENTITIES:
            for name in (dag_id("hourly"), pipeline_dag("flights"), scheduled_dag_id("nightly")):
                assert [may(role, method, name, entity) for role in (None, "viewer", "user", "op", "admin")] == [
                    False, False, False, True, True,
                ], (method, entity)  # fmt: skip


@pytest.mark.parametrize("name", sorted(DAG_ROLES))
def test_a_dag_is_changed_by_who_may_start_it_in_any_way(name: str) -> None:
    user_may = name in {"backfill", "backfill_range", "quality"}
    for method in CHANGES:
        for entity in ENTITIES:
            op_may = (name, method, entity) != ("streaming", "DELETE", None)  # by that the pages know an admin
            assert [may(role, method, name, entity) for role in (None, "viewer", "user", "op", "admin")] == [
                False, False, user_may, op_may, True,
            ], (method, entity)  # fmt: skip
    assert [may(role, "GET", name) for role in (None, "viewer", "user")] == [False, True, True]


def test_airflows_roles_are_those_of_the_project_in_order() -> None:
    assert [AIRFLOW_ROLES[role] for role in Role] == sorted(AIRFLOW_ROLES.values(), key=lambda role: role.order)
    assert set(AIRFLOW_ROLES.values()) == set(SimpleAuthManagerRole)


def test_what_names_no_dag_needs_op_and_dags_of_yours_are_as_airflow_has_them() -> None:
    assert [may(role, "PUT", None) for role in ("viewer", "user", "op")] == [False, False, True]
    assert [may(role, "POST", "mine") for role in ("viewer", "user", "op")] == [False, True, True]


def test_the_installation_runs_with_these_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    named = "auth_manager = millrace_airflow.roles.RolesAuthManager"
    assert named in (Path(ROOT) / "airflow.cfg").read_text().splitlines()
    monkeypatch.setenv("AIRFLOW__CORE__AUTH_MANAGER", "millrace_airflow.roles.RolesAuthManager")
    assert Standalone().calculate_env()["AIRFLOW__CORE__AUTH_MANAGER"] == "millrace_airflow.roles.RolesAuthManager"
    assert os.environ["AIRFLOW__CORE__AUTH_MANAGER"] == "millrace_airflow.roles.RolesAuthManager"
