"""Passwords of Airflow's connections: sealed for the worker where they are known, and refused in words elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import InvalidSettings, InvalidStream
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.connections import password_in_environment
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.file import flow_of_file
from millrace.flows.declare.keys import Keys
from millrace.flows.directory import declared_file, find_flow, status_of

PASSWORD = "p@ss/w:rd ü"
FLOW = """
flows:
- name: shop
  schedule: "@hourly"
  source: {kind: mariadb, host: 127.0.0.1, user: capture, password: "${connection:shop_db}", database: shop, table: a}
  sink: {kind: collection, collection: rows}
  errors: {collection: letters}
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("AIRFLOW_CONN_SHOP_DB", raising=False)
    (tmp_path / "flows.yaml").write_text(FLOW, encoding="utf-8")
    return Settings(data_dir=tmp_path / "data", flow_declarations=str(tmp_path / "flows.yaml"))


@pytest.mark.parametrize(
    "value",
    [
        "mariadb://capture:p%40ss%2Fw%3Ard%20%C3%BC@db.internal:3306/shop",
        json.dumps({"conn_type": "mysql", "login": "capture", "password": PASSWORD}),
    ],
)
def test_the_environment_has_a_connection_in_airflow_s_forms(value: str) -> None:
    assert password_in_environment("shop_db", env={"AIRFLOW_CONN_SHOP_DB": value}) == PASSWORD


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "only a run that Airflow starts knows .* set the variable AIRFLOW_CONN_SHOP_DB"),
        ("mariadb://capture@db/shop", "AIRFLOW_CONN_SHOP_DB has no password"),
        ('{"password": hidden}', "neither a connection's URI nor JSON"),
        ('{"password": 17}', "has no password"),
        ("mariadb://capture:hidden@[db/shop", "neither a connection's URI nor JSON"),
    ],
)
def test_a_connection_that_cannot_be_had_is_told_without_its_value(value: str, words: str) -> None:
    with pytest.raises(InvalidSettings, match=words) as error:
        password_in_environment("shop_db", env={"AIRFLOW_CONN_SHOP_DB": value})
    assert "hidden" not in str(error.value)


def test_a_declared_flow_is_listed_anywhere_and_started_where_its_connection_is_known(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DAG processor reads all declarations, and no worker's secrets."""
    assert declared_flows(settings, shipped=False).keys() == {"shop"}
    flow = find_flow(settings, "shop")
    assert status_of(settings, flow).name == "shop"
    for use in (flow.declaration, flow.worker_file):
        with pytest.raises(InvalidSettings, match="only a run that Airflow starts"):
            use(settings)
    assert not declared_file(settings, "shop").exists()

    asked: list[str] = []

    def password_of(connection: str) -> str:
        asked.append(connection)
        return PASSWORD

    file = flow.worker_file(settings, password_of=password_of)
    assert asked == ["shop_db"]
    assert PASSWORD not in file.read_text(encoding="utf-8"), "it is sealed"
    found: Any = flow_of_file(file, Configuration(), keys=Keys(settings.data_dir)).source
    assert found.password.get_secret_value() == PASSWORD
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", "mysql://capture:other@db/shop")
    again: Any = flow.declaration(settings).source
    assert again.password.get_secret_value() == "other"


def test_a_file_s_connection_is_that_of_the_environment(settings: Settings, tmp_path: Path) -> None:
    written = {"id": "shop", "sink": {"kind": "collection", "collection": "rows"}, "errors": {"collection": "letters"}}
    source = {"kind": "mariadb", "host": "db", "user": "me", "database": "shop", "table": "a"}
    file = tmp_path / "shop.json"
    file.write_text(json.dumps({**written, "source": {**source, "password": "${connection:shop_db}"}}))
    with pytest.raises(InvalidSettings, match="AIRFLOW_CONN_SHOP_DB"):
        flow_of_file(file, Configuration(), env={})
    found: Any = flow_of_file(file, Configuration(), env={"AIRFLOW_CONN_SHOP_DB": "mysql://me:word@db/shop"}).source
    assert found.password.get_secret_value() == "word"
    file.write_text(json.dumps({**written, "source": {**source, "password": "${connection:shop db}"}}))
    with pytest.raises(InvalidSettings, match="letters, digits"):
        flow_of_file(file, Configuration(), env={})


def test_a_flow_on_spark_refuses_a_connection(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "flows.yaml").write_text(
        """
flows:
- name: clicks
  source: {kind: kafka, bootstrap: ["127.0.0.1:9092"], topics: [a], format: json,
    security: {protocol: SASL_SSL, mechanism: PLAIN, username: me, password: "${connection:kafka}"}}
  transform: {sql: select * from a}
  sink: {kind: collection, collection: rows}
"""
    )
    with pytest.raises(InvalidStream, match=r"clicks.*cannot resolve \$\{connection:…\}: use \$\{env:NAME\}"):
        declared_flows(settings, shipped=False)
