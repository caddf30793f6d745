"""The application as a coordinator serves it.

Tokens and roles, the cluster's routes, the watch, its description, its port.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from millrace.access.grants import Grant, Role
from millrace.access.token_file import TokenFile
from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path
from millrace.coord.assignment_source import MetaStoreAssignmentSource
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.control import read_control_state
from millrace.coord.session import INGEST
from millrace.coord.store_factory import open_cluster_store
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.meta.store import MetaStore, Put
from millrace.observe.cluster import ClusterReader
from millrace.observe.observer import Observer
from millrace.rpc.assignments import Assignment, AssignmentUpdate
from millrace.service import assignment_watch as watching
from millrace.service.application import build_app, core_routes
from millrace.service.assignment_watch import AssignmentWatch, sse_event
from millrace.service.authentication import token_authenticator
from millrace.service.server import serving
from tests.coord.catalog_rig import add_collection, finish
from tests.coord.cluster_rig import write_cluster

OWN = "the-machines-own"
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


@pytest.fixture
def store(settings: Settings) -> Iterator[MetaStore]:
    with open_cluster_store(settings, SystemClock()) as store:
        write_cluster(store)
        yield store


@pytest.fixture
def app(settings: Settings) -> Iterator[Any]:
    observer = Observer(settings)
    with ClusterReader(settings, SystemClock()) as look:
        yield build_app(core_routes(observer, look), token_authenticator([OWN], TokenFile(settings.data_dir)))
    observer.close()


@pytest.fixture
def client(app: Any) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def ask(client: TestClient, path: str, token: str = OWN, method: str = "GET") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = client.request(method, path if path[0] == "/" else f"/api/v1/{path}", headers=headers)
    return answer.status_code, answer.json()


def test_every_route_asks_for_a_token_and_for_its_role(app: Any, client: TestClient, settings: Settings) -> None:
    tokens = TokenFile(settings.data_dir)
    produces, _ = tokens.add("p", [Grant(Role.PRODUCE)])
    of_one, _ = tokens.add("one", [Grant(Role.READ, ("users",))])
    for route in app.routes:
        path = route.path.format(name="n1", pchannel="dml_0", message_id="0:1:0:0")
        for method in route.methods:
            assert ask(client, path, "", method)[0] == 401, path
            assert ask(client, path, "nonsense", method)[1]["error"]["code"] == "UNAUTHORIZED", path
            if route.name in ("assignments", "watch_assignments", "openapi"):
                continue
            for token in (produces, of_one):
                status, found = ask(client, path, token, method)
                assert (status, found["error"]["code"]) == (403, "PERMISSION_DENIED"), path
    tokens.revoke("p")
    assert ask(client, "assignments", produces)[0] == 401


def test_a_reader_reads_and_an_operator_drains_and_freezes(
    client: TestClient, settings: Settings, store: MetaStore
) -> None:
    tokens = TokenFile(settings.data_dir)
    reads, _ = tokens.add("r", [Grant(Role.READ)])
    operates, _ = tokens.add("o", [Grant(Role.OPERATE)])
    assert [(each["name"], each["state"]) for each in ask(client, "nodes", reads)[1]] == [("n1", "up")]
    assert ask(client, "balance", reads)[1] == {
        "leader": "c1", "service": "http://127.0.0.1:1", "frozen": False, "draining": []
    }  # fmt: skip
    for path in ("nodes/n1/drain", "balance/freeze"):
        assert ask(client, path, reads, "PUT")[0] == ask(client, path, reads, "DELETE")[0] == 403
        assert ask(client, path, operates, "POST")[0] == 405
    assert ask(client, "nodes/n1/drain", operates, "PUT")[1]["draining"] == ["n1"]
    assert ask(client, "balance/freeze", operates, "PUT")[1]["frozen"] is True
    assert read_control_state(store).drains == {"n1"}
    assert ask(client, "nodes/n1/drain", operates, "DELETE")[1]["draining"] == []
    assert ask(client, "balance/freeze", operates, "DELETE")[1]["frozen"] is False
    assert ask(client, "nodes/n9/drain", operates, "PUT") == (
        404,
        {
            "error": {
                "code": "NODE_NOT_FOUND",
                "message": "no node 'n9' in this cluster: there are n1",
                "retriable": False,
            }
        },
    )


def test_channels_have_their_moves(client: TestClient, store: MetaStore) -> None:
    first, second = ask(client, "channels")[1]
    assert (first["node"], first["cause"], first["state"], first["term"]) == ("n1", "drain", "assigned", 2)
    assert [(each["source"], each["to"], each["cause"]) for each in first["moves"]] == [
        ("n0", "n1", "drain"),
        ("", "n0", "place"),
    ]
    assert (second["state"], second["not_let_go"], second["moves"]) == ("unavailable", ["n1@7"], [])
    assert ask(client, "moves?limit=1")[1] == first["moves"][:1]
    assert ask(client, "moves?limit=0")[1]["error"]["code"] == "INVALID_ARGUMENT"


def test_broadcasts_are_told_with_who_has_them_without_a_cluster_too(client: TestClient, settings: Settings) -> None:
    assert ask(client, "broadcasts")[1] == []
    with CatalogStore(catalog_path(settings.data_dir)) as catalog:
        finish(catalog, add_collection(catalog, "users", SCHEMA))
        waits = add_collection(catalog, "orders", SCHEMA, vchannels=2)
        catalog.broadcasts.acknowledge(waits.id, {"dml_0_2v1": 7})
        catalog.broadcasts.note_reason(waits.id, "LOG_UNAVAILABLE: dml_0 is away")
    second, first = ask(client, "broadcasts")[1]
    assert [(each["collection"], each["state"]) for each in (first, second)] == [
        ("users", "done"),
        ("orders", "pending"),
    ]
    assert second["targets"] == {"dml_0_2v0": None, "dml_0_2v1": "7"}
    assert second["words"] == "LOG_UNAVAILABLE: dml_0 is away"
    assert second["keys"] == ["cluster: (shared)", "collection:2"]
    assert ask(client, "broadcasts?limit=1")[1] == [second]


def test_without_a_cluster_its_routes_say_how_to_start_one_and_make_none(
    client: TestClient, settings: Settings
) -> None:
    for path in ("nodes", "channels", "assignments", "assignments/watch"):
        status, found = ask(client, path)
        assert (status, found["error"]["code"]) == (409, "INVALID_SETTINGS")
        assert "millrace coord" in found["error"]["message"]
    assert ask(client, "overview")[1]["state"] == "empty"
    assert not settings.data_dir.exists()


def test_the_description_names_every_route(app: Any, client: TestClient) -> None:
    found = ask(client, "/openapi.json")[1]["paths"]
    assert {route.path for route in app.routes} - {"/openapi.json"} == set(found)
    assert "text/event-stream" in found["/api/v1/assignments/watch"]["get"]["responses"]["200"]["content"]


# -- the watch ---------------------------------------------------------------------------------------------------------


def move(store: MetaStore, pchannel: str, to: str) -> None:
    found = store.get(ChannelRecord(pchannel, INGEST).key)
    record = ChannelRecord(pchannel, INGEST) if found is None else ChannelRecord.decode(found.value, found.modified)
    store.commit([Put(record.key, record.begin_assignment(to, f"grpc://{to}", "drain").complete_assignment().encode())])


def addresses(update: AssignmentUpdate) -> dict[str, str]:
    return {each.pchannel: each.address for each in update.assignments}


def test_a_follower_hears_everything_and_then_what_changes(store: MetaStore) -> None:
    async def follow() -> None:
        watch = AssignmentWatch(lambda: MetaStoreAssignmentSource(store))
        first = await watch.first(None)
        assert first.whole
        assert addresses(first) == {"dml_0": "grpc://127.0.0.1:1", "dml_1": ""}
        one, two = watch.follow(first), watch.follow(first)
        assert [await anext(one), await anext(two)] == [first, first]
        move(store, "dml_1", "n1")
        second = await anext(one)
        assert (second.whole, addresses(second)) == (False, {"dml_1": "grpc://n1"})
        move(store, "dml_0", "n2")
        third = await anext(one)
        assert addresses(third) == {"dml_0": "grpc://n2"}
        assert addresses(await anext(two)) == {"dml_1": "grpc://n1"}, "one that is slower misses nothing"
        assert addresses(await anext(two)) == {"dml_0": "grpc://n2"}
        late = await watch.first(second.version)
        assert (late.whole, addresses(late)) == (False, {"dml_0": "grpc://n2"}), "resumed from a version"
        store.compact(third.version)
        assert (await watch.first(first.version)).whole, "what was compacted away comes as everything"
        assert (await watch.first(10**9)).whole, "another store's version too"
        await one.aclose()
        await two.aclose()

    asyncio.run(asyncio.wait_for(follow(), 30))


def test_a_follower_that_came_between_misses_nothing_and_a_quiet_one_hears_the_version(
    store: MetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "KEEPALIVE_SECONDS", 0.3)

    async def follow() -> None:
        watch = AssignmentWatch(lambda: MetaStoreAssignmentSource(store))
        early = await watch.first(None)
        move(store, "dml_1", "n1")
        now = watch.follow(await watch.first(None))
        await anext(now)  # it looks from behind that move on
        behind = watch.follow(early)
        assert await anext(behind) == early
        assert addresses(await anext(behind)) == {"dml_1": "grpc://n1"}
        quiet = await anext(now)
        store.commit([Put("elsewhere", b"")])
        while quiet.version < store.list("").revision:
            quiet = await anext(now)
            assert quiet.assignments == ()
        await now.aclose()
        await behind.aclose()

    asyncio.run(asyncio.wait_for(follow(), 30))


def test_an_event_has_its_version_as_its_id() -> None:
    text = sse_event(AssignmentUpdate(7, False, (Assignment("dml_0", "ingest", 2, "n1@3", "grpc://h:1"),)))
    assert text.startswith("event: assignments\nid: 7\ndata: {")
    assert text.endswith("}\n\n")


def test_it_serves_at_a_port_of_its_own_and_its_watch_can_be_followed_and_resumed(
    app: Any, settings: Settings, store: MetaStore
) -> None:
    with serving(app, settings) as address:

        def open_watch(**headers: str) -> Any:
            asked = {"Authorization": f"Bearer {OWN}", **headers}
            return urllib.request.urlopen(
                urllib.request.Request(f"{address}/api/v1/assignments/watch", headers=asked), timeout=30
            )

        def event(stream: Any) -> tuple[int, dict[str, Any]]:
            lines = [stream.readline().decode().rstrip("\n") for _ in range(4)]
            assert (lines[0], lines[3]) == ("event: assignments", "")
            return int(lines[1].removeprefix("id: ")), json.loads(lines[2].removeprefix("data: "))

        with open_watch() as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            version, first = event(stream)
            assert first["whole"]
            move(store, "dml_1", "n1")
            newer, second = event(stream)
            assert (newer > version, second["assignments"][0]["address"]) == (True, "grpc://n1")
        move(store, "dml_0", "n2")
        with open_watch(**{"Last-Event-ID": str(newer)}) as stream:
            _, third = event(stream)
            assert [each["address"] for each in third["assignments"]] == ["grpc://n2"]
        taken = replace(settings, service_port=int(address.rpartition(":")[2]))
        with pytest.raises(InvalidSettings, match="cannot listen"), serving(app, taken):
            raise AssertionError("two at one port")
