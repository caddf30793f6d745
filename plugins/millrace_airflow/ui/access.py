"""Permissions on the pages, from Airflow's own login. The only module that uses Airflow's internal security API.

A user of Airflow is a principal of millrace.access. Users who may read the DAG ``streaming`` (viewers) have the role
*read* over the whole deployment, which the pages and most of the API need. Those who may start it have *operate*, and
those who may delete it *admin*. Only pipelines need *admin*; users also have roles on pipelines, under the same names.
An action is a run of a DAG, started through Airflow's REST API, which checks the permission to trigger that DAG;
:func:`may_trigger` only decides which buttons are shown.
"""

from __future__ import annotations

from typing import Annotated, Final

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user
from fastapi import Depends, HTTPException, Request, status
from fastapi.security import HTTPAuthorizationCredentials

from millrace.access.grants import Caller, Grant, Principal, Role
from millrace.service.authentication import Credentials

STREAMING: Final = "streaming"
"""Users who may read this DAG may read Millrace's pages.

Those who may start it may drain nodes and freeze the balance.
"""


async def require_reader(request: Request, credentials: Credentials) -> BaseUser:
    """Return the user, who is logged in and may read. Raises HTTPException 401 or 403."""
    user = await get_user(request, None, credentials)
    if not principal_of(user).has_role((Role.READ,), ()):
        raise HTTPException(status.HTTP_403_FORBIDDEN, f"You need the permission to read the DAG {STREAMING!r}.")
    return user


async def authorize(request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
    """Return the logged-in user with their roles from Airflow (millrace.service.authentication).

    Raises HTTPException 401 or 403.
    """
    return Caller(principal_of(await require_reader(request, credentials)))


def principal_of(user: BaseUser) -> Principal:
    """Return a user's roles here, by any auth manager of Airflow."""
    manager = get_auth_manager()
    reads = manager.is_authorized_view(access_view=AccessView.WEBSITE, user=user) and manager.is_authorized_dag(
        method="GET", details=DagDetails(id=STREAMING), user=user
    )
    deletes = reads and manager.is_authorized_dag(method="DELETE", details=DagDetails(id=STREAMING), user=user)
    roles = [Role.READ] * bool(reads) + [Role.OPERATE] * bool(reads and may_trigger(user, STREAMING))
    roles += [Role.ADMIN] * bool(deletes)
    return Principal(str(user.get_name()), tuple(Grant(role) for role in roles))


def may_trigger(user: BaseUser, dag_id: str) -> bool:
    """Return whether a user may start runs of a DAG."""
    return bool(
        get_auth_manager().is_authorized_dag(
            method="POST", access_entity=DagAccessEntity.RUN, details=DagDetails(id=dag_id), user=user
        )
    )


Reader = Annotated[BaseUser, Depends(require_reader)]
"""A route with a parameter of this type admits only readers."""
