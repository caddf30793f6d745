"""Who may see and do what: Airflow's own login and permissions. The one place that uses Airflow's internal security
API.

A person of Airflow is a principal of millrace.access: who may read the DAG ``streaming`` has the role *read* over the
whole deployment (viewers do), which is what the pages and most of the API ask for; who may start it has *operate*, and
who may delete it *admin* (which only pipelines ask for: they have roles of their own besides, by the same names of
people). An action is a run of a DAG, started through Airflow's REST API, which asks for the permission to trigger that
DAG; :func:`may_trigger` only tells which buttons to show.
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
"""Who may read this DAG may read what Millrace shows; who may start it may drain nodes and freeze the balance."""


async def require_reader(request: Request, credentials: Credentials) -> BaseUser:
    """The person, logged in and allowed to read. Raises HTTPException 401 or 403."""
    user = await get_user(request, None, credentials)
    if not principal_of(user).has_role((Role.READ,), ()):
        raise HTTPException(status.HTTP_403_FORBIDDEN, f"You need the permission to read the DAG {STREAMING!r}.")
    return user


async def authorize(request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
    """The person, logged in, with what Airflow lets them do here (millrace.service.authentication).

    Raises HTTPException 401 or 403.
    """
    return Caller(principal_of(await require_reader(request, credentials)))


def principal_of(user: BaseUser) -> Principal:
    """What Airflow's auth manager, whichever it is, lets a person do here."""
    manager = get_auth_manager()
    reads = manager.is_authorized_view(access_view=AccessView.WEBSITE, user=user) and manager.is_authorized_dag(
        method="GET", details=DagDetails(id=STREAMING), user=user
    )
    deletes = reads and manager.is_authorized_dag(method="DELETE", details=DagDetails(id=STREAMING), user=user)
    roles = [Role.READ] * bool(reads) + [Role.OPERATE] * bool(reads and may_trigger(user, STREAMING))
    roles += [Role.ADMIN] * bool(deletes)
    return Principal(str(user.get_name()), tuple(Grant(role) for role in roles))


def may_trigger(user: BaseUser, dag_id: str) -> bool:
    """Whether a person may start runs of a DAG."""
    return bool(
        get_auth_manager().is_authorized_dag(
            method="POST", access_entity=DagAccessEntity.RUN, details=DagDetails(id=dag_id), user=user
        )
    )


Reader = Annotated[BaseUser, Depends(require_reader)]
"""A route's parameter of this type lets only readers in."""
