"""A store of pipelines on each database that there is; `again` opens it once more, as another process does."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pymysql
import pytest

from millrace.base.settings import Settings
from millrace.pipelines.store.store import PipelineStore, open_pipelines
from tests import running_brokers

Again = Callable[[], PipelineStore]


def in_mariadb(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """Settings that name a database of their own, and the login that the environment has for it."""
    server, name = running_brokers.mariadb(), f"pipelines_{uuid.uuid4().hex}"
    username, password = server.credentials
    with pymysql.connect(host="127.0.0.1", port=server.port["client"], user=username, password=password) as db:
        db.cursor().execute(f"create database {name} character set utf8mb4")
    login = {"MILLRACE_META_USERNAME": username, "MILLRACE_META_PASSWORD": password}
    return replace(settings, meta_store=f"mariadb://{server.address}/{name}"), login


@pytest.fixture(params=["sqlite", pytest.param("mariadb", marks=pytest.mark.slow)])
def again(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Again]:
    env: dict[str, str] = {}
    if request.param == "mariadb":
        settings, env = in_mariadb(settings)
    opened: list[PipelineStore] = []

    def open_once_more() -> PipelineStore:
        opened.append(open_pipelines(settings, env=env))
        return opened[-1]

    yield open_once_more
    for store in opened:
        store.close()


@pytest.fixture
def store(again: Again) -> PipelineStore:
    return again()


def declared(pipeline: str, /, **more: Any) -> dict[str, Any]:
    """A declaration, as far as the store looks at it."""
    return {"id": pipeline, "version": 1, "source": {"kind": "kafka"}, **more}
