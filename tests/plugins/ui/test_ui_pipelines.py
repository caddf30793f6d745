"""Pipelines inside Airflow: the management API behind its login, by its roles and those of each pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from millrace.access.grants import Role
from millrace.base.settings import Settings
from millrace.pipelines.api.management import Management
from millrace.pipelines.api.routes import CALLS
from millrace.service.pipelines import StoreOnce
from millrace_airflow.roles import RolesAuthManager
from millrace_airflow.ui import access
from tests.pipelines.api.matrix import calls, expected, got
from tests.pipelines.api.test_routes import DECLARED, NoProcess, NoServers
from tests.plugins.ui.conftest import Site, make_site

OVER_ALL = {"viewer": Role.READ, "user": Role.READ, "op": Role.OPERATE, "admin": Role.ADMIN}


@pytest.fixture(scope="module")
def pipelines(airflow_database: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The application with the roles of `make up`, over a folder that is not there yet."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("ui-pipelines") / "data")
    with StoreOnce(settings) as store, pytest.MonkeyPatch.context() as patch:
        deployment = NoProcess(settings)
        management = Management(settings, store, deployment=deployment)
        management._world = NoServers(deployment, management._pipeline)
        patch.setattr(access, "get_auth_manager", RolesAuthManager)
        yield from make_site(settings, management)


def ask(site: Site, method: str, path: str, body: Any = None, *, role: str | None) -> tuple[int, Any]:
    headers = {} if role is None else {"Authorization": f"Bearer {site.tokens[role]}"}
    answer = site.client.request(method, f"/millrace/api/v1/{path}", json=body, headers=headers)
    return answer.status_code, answer.json() if answer.content else None


def test_every_call_lets_in_who_the_table_says_and_no_one_else(pipelines: Site) -> None:
    found = list(calls(pipelines.app))
    assert {call.name for call in found} == set(CALLS)
    for call in found:
        for role, over_all in OVER_ALL.items():
            ask(pipelines, "PUT", "pipelines/flights", DECLARED, role="admin")
            assert got(partial(ask, pipelines, role=role), call) == expected(
                call, on_it=over_all, on_all=over_all, anywhere=True
            ), (
                role,
                call,
            )
        assert got(partial(ask, pipelines, role="stranger"), call) == "refused"
        assert got(partial(ask, pipelines, role=None), call) == "logged out"


def test_who_makes_one_owns_it_and_who_has_a_role_on_it_may_more_there(pipelines: Site) -> None:
    assert ask(pipelines, "PUT", "pipelines/mine", DECLARED, role="viewer")[0] == 403
    assert ask(pipelines, "PUT", "pipelines/mine", DECLARED, role="op")[0] == 201
    assert ask(pipelines, "GET", "pipelines/mine/roles", role="viewer") == (200, {"op": "owner"})
    assert ask(pipelines, "PUT", "pipelines/mine/resume", role="viewer")[0] == 403
    assert ask(pipelines, "PUT", "pipelines/mine/roles/viewer?role=operator", role="op")[0] == 200
    assert ask(pipelines, "PUT", "pipelines/mine/resume", role="viewer")[0] == 200
    assert ask(pipelines, "PUT", "pipelines/mine/stop", role="viewer")[0] == 200
    assert ask(pipelines, "DELETE", "pipelines/mine", role="viewer")[0] == 403
    assert ask(pipelines, "DELETE", "pipelines/mine", role="op")[0] == 204, "its owner"


def test_what_a_form_of_another_page_could_send_does_nothing(pipelines: Site) -> None:
    for call in calls(pipelines.app):
        if call.method != "GET":
            assert ask(pipelines, "POST", call.path, {}, role="admin")[0] == 405, call
