"""Permissions to start DAGs: Airflow's simple roles as Millrace's, and the role that may run each DAG of Millrace.

In Airflow, every *user* may trigger any DAG. But some of Millrace's DAGs read paths of the service's user, or remove or
replace data, so they need *op*. The rule applies to everything that changes a DAG, its runs and its tasks (trigger,
clear, mark, pause, approve), through Airflow's pages, the REST API and Millrace's own pages, since all of them ask the
auth manager. Users' own DAGs have Airflow's permissions.
"""

from __future__ import annotations

from typing import Final

from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager, SimpleAuthManagerRole
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

from millrace.access.grants import Role
from millrace.flows.range_host.observed import DAG_PREFIX as PIPELINES
from millrace.flows.spark_host.status import DAG_PREFIX
from millrace.flows.status import SCHEDULED_PREFIX
from millrace.operations.registry import operations

DAG_ROLES: Final = {
    "streaming": Role.OPERATE,
    **{operation.dag_id: operation.role for operation in operations().values()},
}
"""The role that starts each DAG of Millrace. The role *produce* may check, and rebuild derived data.

DAGs of flows, whose ids begin with DAG_PREFIX, PIPELINES and SCHEDULED_PREFIX, need *op*, as `streaming` does. Deleting
the DAG `streaming` needs *admin*: millrace_airflow.ui.access recognises admins by that, with any auth manager.
"""

AIRFLOW_ROLES: Final = {
    Role.READ: SimpleAuthManagerRole.VIEWER,
    Role.PRODUCE: SimpleAuthManagerRole.USER,
    Role.OPERATE: SimpleAuthManagerRole.OP,
    Role.ADMIN: SimpleAuthManagerRole.ADMIN,
}
"""The least Airflow role for each role of Millrace (millrace.access).

Airflow's roles include one another in this order.
"""


class RolesAuthManager(SimpleAuthManager):
    """Airflow's simple auth manager with DAG_ROLES. A request without a single DAG needs *op*."""

    def is_authorized_dag(
        self,
        *,
        method: ResourceMethod,
        user: SimpleAuthManagerUser,
        access_entity: DagAccessEntity | None = None,
        details: DagDetails | None = None,
    ) -> bool:
        allowed = super().is_authorized_dag(method=method, user=user, access_entity=access_entity, details=details)
        if not allowed or method == "GET":
            return bool(allowed)
        dag_id = details.id if details is not None else None
        if dag_id == "streaming" and method == "DELETE" and access_entity is None:
            return bool(self._is_authorized(method=method, allow_role=AIRFLOW_ROLES[Role.ADMIN], user=user))
        needed = (
            Role.OPERATE
            if dag_id is None or dag_id.startswith((DAG_PREFIX, PIPELINES, SCHEDULED_PREFIX))
            else DAG_ROLES.get(dag_id, Role.PRODUCE)
        )
        return bool(self._is_authorized(method=method, allow_role=AIRFLOW_ROLES[needed], user=user))
