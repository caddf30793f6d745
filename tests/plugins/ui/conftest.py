"""The web application as Airflow mounts it, over a real deployment, behind Airflow's own (simple) auth manager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import MetaStore
from millrace.observe.observer import Observer
from tests.airflow_home import database
from tests.coord.cluster_rig import write_cluster
from tests.observe.observe_world import World, close_world, make_world

URL = "/millrace"


@dataclass
class Site:
    """The application under /millrace, and tokens by role."""

    client: Any
    tokens: dict[str | None, str] = field(default_factory=dict)
    app: Any = None

    def get(self, path: str, *, role: str | None = "viewer", html: bool = False, **query: Any) -> Any:
        """A GET as a person with `role` (None: nobody)."""
        headers = {"Accept": "text/html"} if html else {}
        if role is not None:
            headers["Authorization"] = f"Bearer {self.tokens[role]}"
        return self.client.get(f"{URL}/{path}", headers=headers, params=query)

    def json(self, path: str, **query: Any) -> Any:
        """The JSON of a GET that has to succeed."""
        answer = self.get(f"api/v1/{path}", **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def page(self, path: str, **query: Any) -> str:
        """The HTML of a page that has to succeed."""
        answer = self.get(path, html=True, **query)
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def fault(self, path: str, **query: Any) -> tuple[int, str]:
        """Status and code of a GET that has to fail."""
        answer = self.get(path, **query)
        assert answer.status_code >= 400, answer.text
        assert "Traceback" not in answer.text
        return answer.status_code, answer.json()["error"]["code"]


ROLES = ("viewer", "user", "op", "admin", "stranger")
"""Airflow's, and "stranger", who has a login and no role, as in an auth manager that gives somebody no permission."""


def make_site(settings: Settings, management: Any = None) -> Iterator[Site]:
    from airflow.api_fastapi.app import init_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from millrace_airflow.ui.app import create_app

    observer = Observer(settings)
    root = FastAPI()
    manager = init_auth_manager(root)
    app = create_app(observer, management)
    root.mount(URL, app)
    tokens = {
        role: manager.generate_jwt(SimpleAuthManagerUser(username=role, role=None if role == "stranger" else role))
        for role in ROLES
    }
    with TestClient(root, raise_server_exceptions=False) as client:
        yield Site(client, dict(tokens), app)
    observer.close()


@pytest.fixture(scope="session")
def airflow_database() -> None:
    """The metadata database: tokens may be revoked there."""
    database()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One deployment for all tests; they only read."""
    world = make_world(Settings(data_dir=tmp_path_factory.mktemp("ui") / "data"))
    yield world
    close_world(world)


@pytest.fixture(scope="session")
def site(airflow_database: None, world: World) -> Iterator[Site]:
    """The application over :func:`world`."""
    yield from make_site(world.settings)


@pytest.fixture(scope="session")
def empty_site(airflow_database: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The application over a data folder that does not exist yet."""
    yield from make_site(Settings(data_dir=tmp_path_factory.mktemp("ui-empty") / "data"))


@pytest.fixture
def own_site(airflow_database: None, tmp_path: Path) -> Iterator[Site]:
    """The application over the data folder `data` of the test's own, which does not exist yet."""
    yield from make_site(Settings(data_dir=tmp_path / "data"))


@pytest.fixture(scope="session")
def cluster_store(world: World) -> Iterator[MetaStore]:
    """The meta store of a cluster over :func:`world`, with a node, a PChannel that it owns, and a lost one."""
    with open_cluster_store(world.settings, SystemClock()) as store:
        write_cluster(store)
        yield store
