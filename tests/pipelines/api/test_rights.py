"""What a declaration may take of others, where it may lead, what an account may take together, and that
each change is in the history.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.access.grants import LOCAL_ADMIN, Grant, Role
from millrace.base.errors import LogUnavailable, PipelineBusy, PipelineInvalid
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration, Reach
from millrace.flows.sinks.opensearch.index import index_path
from millrace.pipelines.api.management import Management
from millrace.pipelines.api.routes import CALLS
from millrace.pipelines.declaration import pipeline_of
from millrace.pipelines.deploy.reach import _is_below, require_allowed, require_reachable
from millrace.pipelines.deploy.saga import Saga
from millrace.pipelines.store.records import Phase
from millrace.pipelines.store.tables import PIPELINE
from tests.pipelines.api.test_routes import DECLARED, KAFKA, Service, service

__all__ = ["service"]

LOOKUP = {"kind": "lookup", "collection": "salaries", "key": "a", "into": "b"}
FROM = {"kind": "collection", "collection": "salaries"}
CLUSTER = {"cluster": {"bootstrap": ["127.0.0.1:9"]}}


@pytest.mark.parametrize(
    ("more", "role"),
    [
        ({"steps": [LOOKUP]}, Role.READ),
        ({"source": FROM, "errors": CLUSTER, "sink": {**DECLARED["sink"], "ids": "key"}}, Role.READ),
        ({"sink": {"kind": "collection", "collection": "salaries"}}, Role.PRODUCE),
        ({"errors": {"collection": "salaries"}}, Role.OPERATE),
        ({"errors": {"collection": "salaries", "create": False}}, Role.PRODUCE),
    ],
    ids=["lookup", "source", "sink", "errors", "errors that are there"],
)
def test_a_pipeline_reads_and_writes_no_collection_that_its_writer_may_not(
    service: Service, more: dict[str, Any], role: Role
) -> None:
    mine = Grant(Role.OPERATE, ("pipeline:*",))
    token = service.token("eve", mine)
    status, found = service.ask("PUT", "pipelines/flights", {**DECLARED, **more}, token=token)
    assert (status, found["error"]["code"]) == (403, "PERMISSION_DENIED")
    assert "salaries" in found["error"]["message"]
    assert service.ask("GET", "pipelines")[1]["total"] == 0
    may = service.token("ada", mine, Grant(role, ("collection:salaries",)))
    assert service.ask("PUT", "pipelines/flights", {**DECLARED, **more}, token=may)[0] == 201
    # Who may change it keeps what its owner was allowed, and takes no more.
    service.ask("PUT", "pipelines/flights/roles/eve?role=operator")
    kept = {**DECLARED, **more, "failure_threshold": 3}
    assert service.ask("PUT", "pipelines/flights/declaration?version=1", kept, token=token)[0] == 200
    other = {**kept, "steps": [{**LOOKUP, "collection": "letters"}]}
    assert service.ask("PUT", "pipelines/flights/declaration?version=2", other, token=token)[0] == 403
    sample = {"documents": [{"a": 1}], "declaration": {**DECLARED, "steps": [LOOKUP]}}
    assert service.ask("PUT", "pipelines/flights/dry-run", sample, token=token)[0] == 403


def test_an_account_is_one_s_own_or_an_admin_s_to_give(service: Service) -> None:
    token = service.token("eve", Grant(Role.OPERATE, ("pipeline:*",)))
    assert service.ask("PUT", "pipelines/one", {**DECLARED, "account": "ops"}, token=token)[0] == 403
    assert service.ask("PUT", "pipelines/one", {**DECLARED, "account": "eve"}, token=token)[0] == 201
    assert (
        service.ask("PUT", "pipelines/one/declaration?version=1", {**DECLARED, "account": "x"}, token=token)[0] == 403
    )
    assert service.ask("PUT", "pipelines/one/declaration?version=1", {**DECLARED, "account": "ops"})[0] == 200
    renamed = {**DECLARED, "account": "ops", "name": "n"}
    assert service.ask("PUT", "pipelines/one/declaration?version=2", renamed, token=token)[0] == 200, "it stays so"


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "0.0.0.0", "224.0.0.1"])
def test_no_pipeline_leads_to_addresses_of_the_machine_alone(service: Service, host: str) -> None:
    for path, more in (
        ("sink.hosts.0", {"sink": {**DECLARED["sink"], "hosts": [f"http://{host}:80"]}}),
        ("source.bootstrap.0", {"source": {**KAFKA, "bootstrap": [f"{host}:80"]}}),
        ("errors.cluster.bootstrap.0", {"errors": {"cluster": {"bootstrap": [f"{host}:80"]}}}),
    ):
        status, found = service.ask("PUT", "pipelines/flights", {**DECLARED, **more})
        assert (status, found["error"]["problems"][0]["field"]) == (422, path)
        assert found["error"]["problems"][0]["kind"] == "reach"


def test_reach_hosts_are_the_only_ones() -> None:
    made = pipeline_of({"id": "x", **DECLARED, "source": {**KAFKA, "bootstrap": ["kafka-0.resource.svc:9097"]}})
    allowed = Configuration.parse({"reach": {"hosts": ["*.resource.svc", "127.0.0.0/8"]}}).reach
    require_allowed(made, allowed)
    with pytest.raises(PipelineInvalid, match=r"sink\.hosts\.0"):
        require_allowed(made, Reach(hosts=("*.resource.svc",)))
    with pytest.raises(PipelineInvalid, match=r"source\.bootstrap\.0"):
        require_allowed(made, Reach(hosts=("127.0.0.1",)))
    # 169.254.169.254 as one number: no address by its looks, and one by its name.
    hidden = pipeline_of({"id": "x", **DECLARED, "source": {**KAFKA, "bootstrap": ["2852039166:80"]}})
    require_allowed(hidden, Reach())
    with pytest.raises(PipelineInvalid, match="forbidden address"):
        require_reachable(hidden)


POSTGRES = {"kind": "postgres", "user": "u", "password": "p", "database": "d", "table": "t"}
QUERY = {**POSTGRES, "kind": "query", "engine": "postgres", "column": "v"}
KEYED = {"sink": {**DECLARED["sink"], "ids": "key"}, "errors": CLUSTER}


@pytest.mark.parametrize(
    "source", [POSTGRES, {**POSTGRES, "kind": "mariadb"}, QUERY], ids=["postgres", "mariadb", "query"]
)
def test_a_database_is_reached_as_a_broker_is(service: Service, source: dict[str, Any]) -> None:
    declared = {**DECLARED, **KEYED, "source": {**source, "host": "169.254.169.254"}}
    status, found = service.ask("PUT", "pipelines/flights", declared)
    assert (status, found["error"]["problems"][0]["field"]) == (422, "source.host")
    made = pipeline_of({"id": "x", **declared, "source": {**source, "host": "db.other.svc"}})
    with pytest.raises(PipelineInvalid, match=r"source\.host"):
        require_allowed(made, Reach(hosts=("*.resource.svc", "127.0.0.0/8")))


def test_files_of_the_machine_are_read_from_the_folders_that_the_service_names(
    service: Service, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link.db").symlink_to(tmp_path / "secret.db")

    def reading(file: Path) -> dict[str, Any]:
        source = {"kind": "query", "engine": "sqlite", "database": str(file), "table": "t", "column": "v"}
        return {**DECLARED, **KEYED, "source": source}

    status, found = service.ask("PUT", "pipelines/flights", reading(tmp_path / "secret.db"))
    assert (status, found["error"]["problems"][0]["field"]) == (422, "source.database")
    reach = Reach(folders=(str(tmp_path / "open"), "s3://lake/open"))
    require_allowed(pipeline_of({"id": "x", **reading(tmp_path / "open" / "a.db")}), reach)
    for hidden in (tmp_path / "open" / ".." / "secret.db", tmp_path / "open" / "link.db", tmp_path / "opener.db"):
        with pytest.raises(PipelineInvalid, match=r"reach\.folders"):
            require_allowed(pipeline_of({"id": "x", **reading(hidden)}), reach)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("s3://lake/open/t", True), ("s3://lake/open/../t", False), ("s3://lake/opener/t", False), ("/t", False)],
)
def test_tables_of_an_object_store_are_below_a_folder_too(path: str, allowed: bool) -> None:
    assert _is_below(path, "s3://lake/open") is allowed


@pytest.mark.parametrize("change", [{"host": "evil"}, {"port": 1}, {"tls": "require"}])
def test_a_password_of_a_database_goes_to_no_other_server(service: Service, change: dict[str, Any]) -> None:
    declared = {**DECLARED, **KEYED, "source": {**POSTGRES, "host": "127.0.0.1"}}
    assert service.ask("PUT", "pipelines/flights", declared)[0] == 201
    source = {key: value for key, value in declared["source"].items() if key != "password"}
    status, found = service.ask("PUT", "pipelines/flights/declaration?version=1", {**declared, "source": source})
    assert (status, found["pipeline"]["secrets"]) == (200, ["sink.password", "source.password"])
    changed = {**declared, "source": {**source, **change}}
    found = service.ask("PUT", "pipelines/flights/declaration?version=2", changed)[1]
    assert "source.password" not in found["pipeline"]["secrets"]


def test_a_password_of_a_registry_goes_to_no_other_server(service: Service) -> None:
    registry = {"url": "http://127.0.0.1:8081", "user": "u"}
    source = {**KAFKA, "format": "debezium", "debezium": {"registry": {**registry, "password": "p"}}}
    declared = {**DECLARED, "source": source}
    assert service.ask("PUT", "pipelines/flights", declared)[0] == 201
    for version, url, kept in ((1, "http://127.0.0.1:8081", True), (2, "http://127.0.0.1:8082", False)):
        other = {**source, "debezium": {"registry": {**registry, "url": url}}}
        call = f"pipelines/flights/declaration?version={version}"
        found = service.ask("PUT", call, {**declared, "source": other})[1]
        assert ("source.debezium.registry.password" in found["pipeline"]["secrets"]) is kept


@pytest.mark.parametrize("more", [{"create": True}, {"on_schema_change": "alter"}])
def test_who_only_writes_rows_makes_and_alters_no_collection(service: Service, more: dict[str, Any]) -> None:
    mine = Grant(Role.OPERATE, ("pipeline:*",))
    declared = {
        **DECLARED,
        "sink": {"kind": "collection", "collection": "salaries", **more},
        "errors": CLUSTER,
        "steps": [],
    }
    source = {**POSTGRES, "kind": "mariadb", "host": "127.0.0.1"}
    for role, answer in ((Role.PRODUCE, 403), (Role.OPERATE, 201)):
        token = service.token(f"a{role}", mine, Grant(role, ("collection:salaries",)))
        assert service.ask("PUT", "pipelines/flights", {**declared, "source": source}, token=token)[0] == answer


def test_nobody_declares_code_of_the_service_s_own_process(service: Service) -> None:
    for more in (
        {"sink": {"kind": "function", "function": "os:system"}},
        {"transform": {"function": "os:system"}},
        {"transform": {"sql": "select 1"}},
    ):
        assert service.ask("PUT", "pipelines/flights", {**DECLARED, **more})[0] == 422


def test_an_index_s_name_is_that_name_and_no_pattern() -> None:
    assert index_path("a%2c%2a") == "/a%252c%252a"
    assert index_path("flights-2013.01") == "/flights-2013.01"


@pytest.mark.parametrize("change", [{"ca": "-----BEGIN CERTIFICATE-----"}, {"hosts": ["https://127.0.0.1:9"]}])
def test_a_secret_goes_to_nobody_else_who_says_so(service: Service, change: dict[str, Any]) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    sink = {key: value for key, value in DECLARED["sink"].items() if key != "password"}
    assert service.ask("PUT", "pipelines/flights/declaration?version=1", {**DECLARED, "sink": sink})[0] == 200
    changed = {**DECLARED, "sink": {**sink, **change}}
    assert service.ask("PUT", "pipelines/flights/declaration?version=2", changed)[0] == 422


def test_an_account_takes_what_its_quota_says(service: Service) -> None:
    token = service.token("eve", Grant(Role.OPERATE, ("pipeline:*",)))
    for call in (("GET", "pipelines-quotas"), ("PUT", "pipelines-quotas/eve"), ("GET", "pipelines-audit")):
        assert service.ask(*call, {"pipelines": 9, "cpus": 9, "memory_mib": 9}, token=token)[0] == 403
    assert service.ask("PUT", "pipelines-quotas/eve", {"pipelines": 1, "cpus": 2, "memory_mib": 2048})[0] == 204
    assert service.ask("PUT", "pipelines-quotas/eve", {"pipelines": -1, "cpus": 2, "memory_mib": 2048})[0] == 422
    assert service.ask("PUT", "pipelines/one", DECLARED, token=token)[0] == 201
    status, found = service.ask("PUT", "pipelines/two", DECLARED, token=token)
    assert (status, found["error"]["code"]) == (409, "QUOTA_EXCEEDED")
    more = {**DECLARED, "resources": {"memory_mib": 4096}}
    status, found = service.ask("PUT", "pipelines/one/declaration?version=1", more, token=token)
    assert (status, "memory_mib" in found["error"]["message"]) == (409, True)
    rows = {each["account"]: each for each in service.ask("GET", "pipelines-quotas")[1]}
    assert rows["eve"]["used"] == {"pipelines": 1, "cpus": 1.0, "memory_mib": 1024}
    assert rows["eve"]["quota"]["pipelines"] == 1
    assert rows["*"]["quota"]["pipelines"] == 200
    assert service.ask("DELETE", "pipelines-quotas/eve")[0] == 204
    assert service.ask("PUT", "pipelines/two", DECLARED, token=token)[0] == 201


LOOKS = {"validate_pipeline", "dry_run", "redrive_flow"}
"""Calls by PUT that change nothing of a pipeline."""


@pytest.mark.slow
def test_every_call_that_changes_something_is_in_the_history(service: Service) -> None:
    bodies: dict[str, Any] = {
        "create_pipeline": DECLARED,
        "update_pipeline": {**DECLARED, "name": "n"},
        "clone_pipeline": {"sink": DECLARED["sink"]},
        "change_offsets": {"in-0": 5},
        "redrive": {},
        "set_quota": {"pipelines": 9, "cpus": 9, "memory_mib": 99999},
    }
    order = ["create_pipeline", "resume_pipeline", "pause_pipeline", "restart_pipeline", "stop_pipeline"]
    order += [
        "resume_flow",
        "pause_flow",
        "stop_flow",
        "reset_flow_errors",
        "update_pipeline",
        "change_offsets",
        "reset_offsets",
        "clone_pipeline",
        "redrive",
        "cancel_redrive",
    ]
    order += ["set_pipeline_role", "remove_pipeline_role", "set_quota", "drop_quota", "delete_pipeline"]
    routes = {
        route.name: (method, route.path)  # type: ignore[attr-defined]
        for route in service.app.routes
        for method in getattr(route, "methods", ())
        if getattr(route, "name", "") in CALLS and method not in ("GET", "HEAD")
    }
    assert set(order) == set(routes) - LOOKS
    token = service.token("ada", Grant(Role.ADMIN))
    seen = 0
    for name in order:
        method, path = routes[name]
        path = path.removeprefix("/api/v1/").format(pipeline="flights", to="copy", principal="bob", account="ops")
        path += {"update_pipeline": "?version=1", "set_pipeline_role": "?role=viewer"}.get(name, "")
        service.client.request(
            method, f"/api/v1/{path}", json=bodies.get(name), headers={"Authorization": f"Bearer {token}"}
        )
        told = service.ask("GET", "pipelines-audit?limit=200")[1]
        assert len(told) > seen, name
        assert told[0]["who"] == "ada", name
        seen = len(told)
    assert {each["what"] for each in told} >= {"create", "created", "clone", "delete", "deleted", "role", "set quota"}
    assert service.ask("GET", "pipelines/flights")[0] == 404
    assert "flights" in {each["pipeline"] for each in told}, "who deleted it is known"


def test_one_that_cannot_be_looked_after_keeps_nobody_from_the_others(service: Service) -> None:
    for name in ("a-stuck", "b-well", "c-odd"):
        service.ask("PUT", f"pipelines/{name}", DECLARED)
        service.ask("PUT", f"pipelines/{name}/resume")
    management = service.management
    record = management._store.get("a-stuck")
    saga = Saga.from_json(record.saga).deleting("ada").to_json()
    with management._store._writing() as db:
        gone = {"phase": Phase.DELETING, "created_at": 0.0, "saga": json.dumps(saga)}
        db.execute(PIPELINE.update().where(PIPELINE.c.id == "a-stuck").values(**gone))

    class Away(type(service.world)):  # type: ignore[misc]
        def plan(self, step: str, record: Any) -> tuple[str, ...]:
            raise LogUnavailable("Kafka is away")

        def undo(self, step: str, record: Any, things: tuple[str, ...]) -> tuple[str, ...]:
            raise LogUnavailable("Kafka is away")

    management._world = Away(service.deployment, management._pipeline)
    service.deployment.runs.clear()
    start = service.deployment.start
    service.deployment.start = lambda name: start(name) if name != "a-stuck" else 1 / 0  # type: ignore[method-assign]
    management.tend()
    assert set(service.deployment.runs) == {"b-well", "c-odd"}


def test_what_is_being_deleted_is_not_started_again(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    store = service.management._store
    stale = store.get("flights")
    service.ask("PUT", "pipelines/flights/resume")
    with pytest.raises(Exception, match="changed meanwhile"):
        store.move(stale, phase=Phase.DELETING, saga=Saga.from_json(stale.saga).deleting("ada").to_json())
    service.ask("PUT", "pipelines/flights/stop")
    stale = store.get("flights")
    store.move(stale, phase=Phase.DELETING, saga=Saga.from_json(stale.saga).deleting("ada").to_json())
    with pytest.raises(PipelineBusy):
        store.want("flights", "RUNNING", who="x", what="resume")
    assert service.ask("PUT", "pipelines/flights/resume")[0] == 409
    assert not service.deployment.running("flights")


def test_a_worker_that_was_given_up_waits_for_somebody(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    service.ask("PUT", "pipelines/flights/resume")
    service.deployment.runs.clear()
    service.deployment.gave_up = lambda name: True  # type: ignore[method-assign]
    service.management.tend()
    assert not service.deployment.running("flights")
    service.ask("PUT", "pipelines/flights/restart")
    assert service.deployment.running("flights")
    service.deployment.gave_up = lambda name: False  # type: ignore[method-assign]
    service.deployment.runs.clear()
    service.management.tend()
    assert service.ask("GET", "pipelines/flights/history")[1][0]["who"] == "service"


def test_a_namesake_begins_anew(service: Service, settings: Settings) -> None:
    management: Management = service.management
    for _ in range(2):
        service.ask("PUT", "pipelines/flights", DECLARED)
        assert management.offsets("flights") == {}
        management.change_offsets(LOCAL_ADMIN, "flights", {"in-0": 5})
        assert management.offsets("flights") == {"in-0": 5}
        assert service.ask("DELETE", "pipelines/flights")[0] == 204
