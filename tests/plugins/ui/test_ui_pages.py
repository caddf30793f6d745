"""The pages and the API over a real deployment: what they show, what they escape, how they page, what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path
from millrace.client.consume.positions import FilePositions
from millrace.coord.catalog.store import CatalogStore
from millrace.message.ids import compose_tick
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.meta.store import MetaStore
from millrace.operations.quality.data_docs import docs_uri
from millrace.runtime.launch import history as launch_history
from millrace.runtime.launch.folder import RunFolder
from tests.coord.catalog.filled import fill_catalog
from tests.observe.observe_world import HOSTILE, World
from tests.plugins.ui.conftest import Site
from tests.waiting import until

PAGES = (
    "",
    "collections",
    "consumers",
    "transactions",
    "rejections",
    "checkpoints",
    "maintenance",
    "flows",
    "streams",
    "pipelines",
    "quality",
    "cluster",
    "actions",
    "docs",
)
VIEWS = ("schema", "rows", "segments", "files")


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_served_over_a_deployment_and_over_nothing(site: Site, empty_site: Site, path: str) -> None:
    for each in (site, empty_site):
        page = each.page(path)
        assert page.count("<main") == 1
        assert "Undefined" not in page


def test_nothing_yet_is_said_in_words(empty_site: Site) -> None:
    assert empty_site.json("overview")["state"] == "empty"
    assert "No PChannels yet" in empty_site.page("")
    assert "No collections yet" in empty_site.page("collections")
    assert "No rejections" in empty_site.page("rejections")
    assert "None open" in empty_site.page("transactions")
    assert "No checkpoints yet" in empty_site.page("checkpoints")
    assert "No tables yet" in empty_site.page("maintenance")
    assert "No consumer groups yet" in empty_site.page("consumers")
    assert "No results yet" in empty_site.page("quality")
    assert empty_site.json("rejections") | {"reasons": []} == {
        "version": None, "next": None, "complete": True, "items": [], "reasons": []
    }  # fmt: skip
    assert empty_site.fault("api/v1/collections/users") == (404, "COLLECTION_NOT_FOUND")


def test_the_cluster_page_has_nodes_channels_and_moves_with_their_causes(
    site: Site, empty_site: Site, cluster_store: MetaStore
) -> None:
    assert "No cluster" in empty_site.page("cluster")
    page = site.page("cluster")
    for words in ("n1@7", "c1", "drain", "n0", "lost", "create_collection"):
        assert words in page, words
    moves = site.json("moves")
    assert [(each["source"], each["to"], each["cause"], each["ended"] - each["began"]) for each in moves] == [
        ("n0", "n1", "drain", 2.5),
        ("", "n0", "place", 1.0),
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_a_collection_is_shown_from_every_side(site: Site, view: str) -> None:
    page = site.page("collections/users", view=view)
    assert {"schema": "primary key", "rows": "_time_tick", "segments": "growing", "files": ".parquet"}[view] in page


def test_a_collection_is_shown_by_its_id_as_by_its_name(site: Site) -> None:
    """The page's head says when it was made, and differs."""
    by_name, by_id = (site.page(f"collections/{each}", view="schema").partition("<main")[2] for each in ("users", "1"))
    assert by_name == by_id


def test_what_producers_write_is_never_markup(site: Site, world: World) -> None:
    rejected = next(each for each in site.json("rejections")["items"] if each["type"] == "CREATE_PARTITION")
    message = site.json(f"messages/{rejected['pchannel']}/{rejected['id']}")
    assert message["payload"] == {"name": HOSTILE}
    shown = site.page(f"messages/{rejected['pchannel']}/{rejected['id']}")
    rows = site.page("collections/users", view="rows", at=str(_settled(site)))
    assert "&lt;script&gt;" in shown
    assert "&lt;script&gt;" in rows
    echoes = [site.page("rejections", pchannel=HOSTILE, vchannel=HOSTILE), site.page("maintenance", job=HOSTILE)]
    echoes.append(site.page("collections/users", view="rows", at=HOSTILE))
    echoes.append(site.get(f"collections/{HOSTILE.replace('/', '')}", html=True).text)
    for page in (shown, rows, *echoes):
        assert "<script>alert" not in page
        assert "<img" not in page


def _settled(site: Site) -> int:
    return int(site.json("collections/users/sample")["tick"])


def test_rejections_are_paged_newest_first_without_gap_or_double(site: Site) -> None:
    every = site.json("rejections")["items"]
    assert len(every) == 6
    assert {each["reason"] for each in every} == {"COLLECTION_NOT_FOUND", "MALFORMED"}
    seen, before = [], ""
    for _ in range(10):
        page = site.json("rejections", limit=2, before=before)
        seen += page["items"]
        before = page["next"]
        if before is None:
            break
    assert [each["id"] for each in seen] == [each["id"] for each in every]
    assert [each["id"] for each in site.json("rejections", reason="MALFORMED")["items"]] == [
        each["id"] for each in every if each["reason"] == "MALFORMED"
    ]
    older = re.search(r'href="([^"]*before=[^"]+)"', site.page("rejections"))
    assert older is None
    assert site.json("rejections", since="2001-01-01", until="2001-01-02")["items"] == []
    assert len(site.json("rejections", since="2001-01-01")["items"]) == 6


def test_transactions_are_open_committed_or_rolled_back(site: Site) -> None:
    found = site.json("transactions")
    assert [each["txn_id"] for each in found["open"]] == ["77"]
    assert sorted(each["state"] for each in found["items"]) == ["committed", "rolled back"]
    assert [each["state"] for each in site.json("transactions", state="committed")["items"]] == ["committed"]
    end = found["items"][0]
    assert site.json(f"messages/{end['pchannel']}/{end['end_id']}")["txn_id"] == end["txn_id"]
    assert site.json("transactions", txn="1")["items"] == []


def test_segments_and_files_are_paged(site: Site) -> None:
    found = site.json("collections/users/segments")
    pages = [site.json("collections/users/segments", offset=at, limit=1)["items"] for at in range(found["total"] + 1)]
    assert [each["segment_id"] for page in pages for each in page] == [each["segment_id"] for each in found["items"]]
    assert pages[-1] == []
    files = site.json("collections/users/files", order="rows")
    assert [each["rows"] for each in files["items"]] == sorted((each["rows"] for each in files["items"]), reverse=True)
    assert sum(each["rows"] for each in files["items"]) == site.json("collections/users")["rows"]


@pytest.mark.parametrize(
    ("path", "query", "status", "code"),
    [
        ("api/v1/history", {"window": "7y"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/collections/nope", {}, 404, "COLLECTION_NOT_FOUND"),
        ("api/v1/collections/..%2F..%2Fetc%2Fpasswd", {}, 404, None),
        ("api/v1/collections/users/segments", {"state": "odd"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/collections/users/segments", {"limit": 100000}, 422, "INVALID_ARGUMENT"),
        ("api/v1/collections/users/segments", {"offset": -1}, 422, "INVALID_ARGUMENT"),
        ("api/v1/collections/users/files", {"order": "x"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/collections/users/sample", {"at": "soon"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/collections/users/sample", {"at": str(1 << 64)}, 422, "INVALID_ARGUMENT"),
        ("api/v1/collections/users/sample", {"at": "1"}, 404, "COLLECTION_NOT_FOUND"),
        ("api/v1/rejections", {"reason": "WHIM"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"before": "1~2"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"before": f"{1 << 63}~dml_0~0~0~0~0"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"collection": "1e9"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"producer": "9" * 30}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"producer": "--1"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"since": "yesterday"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"since": "9" * 40}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"pchannel": "x" * 1000}, 422, "INVALID_ARGUMENT"),
        ("api/v1/rejections", {"limit": 0}, 422, "INVALID_ARGUMENT"),
        ("api/v1/transactions", {"state": "eaten"}, 422, "INVALID_ARGUMENT"),
        ("api/v1/messages/dml_0/17", {}, 422, "INVALID_ARGUMENT"),
        ("api/v1/messages/dml_0/0:9:9:9", {}, 404, "CHANNEL_NOT_FOUND"),
        (f"api/v1/messages/dml_0/0:{1 << 64}:0:0", {}, 422, "INVALID_ARGUMENT"),
        ("api/v1/maintenance", {"limit": 10**9}, 422, "INVALID_ARGUMENT"),
        ("static/..%2Fapp.py", {}, 404, None),
        ("static/app.py", {}, 404, "NOT_FOUND"),
        ("collections/users", {"view": "source"}, 404, "NOT_FOUND"),
    ],
)
def test_what_can_not_be_right_is_a_typed_answer(
    site: Site, path: str, query: dict[str, str], status: int, code: str | None
) -> None:
    found = site.fault(path, **query)
    assert found == (status, code or found[1])


@pytest.mark.slow
def test_a_wrong_search_is_a_page_with_the_reason(site: Site) -> None:
    answer = site.get("rejections", html=True, since="yesterday")
    assert answer.status_code == 422
    assert "a moment such as" in answer.text
    assert "TICK_NOT_REACHED" in site.page("collections/users", view="rows", at="2099-01-01T00:00")


def test_the_api_describes_itself_and_keeps_64_bits(site: Site) -> None:
    schema = site.get("openapi.json").json()
    assert {"/api/v1/overview", "/api/v1/rejections", "/metrics"} <= schema["paths"].keys()
    for path, methods in schema["paths"].items():
        asked = path in ("/api/v1/nodes/{name}/drain", "/api/v1/balance/freeze")
        if not path.startswith(("/api/v1/pipelines", "/api/v1/flows/")):  # held by the matrix of roles and calls
            assert list(methods) == (["put", "delete"] if asked else ["get"]), path
        assert all(each["description"] for each in methods.values()), path
    tick = site.json("overview")["pchannels"][0]["time_tick"]
    assert isinstance(tick, str)
    assert int(tick) > 1 << 53


def test_the_views_of_the_navigation_lead_to_pages() -> None:
    from millrace_airflow.links import JOB_LOGS_PATH
    from millrace_airflow.plugin import MillracePlugin
    from millrace_airflow.ui import EXTERNAL_VIEWS, URL_PREFIX

    (view,) = EXTERNAL_VIEWS
    assert (view["destination"], view["url_route"]) == ("nav", "millrace")
    assert view["href"].startswith(URL_PREFIX)
    assert [each["url_prefix"] for each in MillracePlugin.fastapi_apps] == [URL_PREFIX, JOB_LOGS_PATH]


def test_data_docs_are_files_of_their_folder_without_scripts(site: Site, world: World) -> None:
    folder = Path(docs_uri(world.settings))
    assert site.fault("data-docs/index.html") == (404, "NOT_FOUND")
    (folder / "validations").mkdir(parents=True)
    foreign = '<link rel="stylesheet" href="https://elsewhere.example/a.css"><img src="//elsewhere.example/b.png">'
    clicked = '<button class="all" onclick="showAll(1)" id=\'b\'>All</button>'
    advert = "<footer>\n<p>Stay current with our newsletter <a>Subscribe</a></p></footer>"
    (folder / "index.html").write_text(
        f"<html><head></head>{HOSTILE}{foreign}<p>rows</p>{clicked}<footer>ours</footer>{advert}</html>"
    )
    (folder / "secret.json").write_text("{}")
    (folder.parent / "outside.html").write_text("outside")
    (folder / "link.html").symlink_to(folder.parent / "outside.html")
    answer = site.get("data-docs/index.html")
    assert answer.status_code == 200
    assert "<p>rows</p>" in answer.text
    assert "elsewhere" not in answer.text
    assert "<script" not in answer.text
    assert """<button class="all" id='b'>All</button>""" in answer.text
    assert "newsletter" not in answer.text
    assert "<footer>ours</footer>" in answer.text
    assert 'href="/millrace/static/data_docs.css"></head>' in answer.text
    assert site.client.get("/millrace/static/data_docs.css").status_code == 200
    assert "script-src" not in answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    for path in ("secret.json", "link.html", "validations", "..%2Foutside.html", "%2Fetc%2Fpasswd", "a%00b.html"):
        assert site.fault(f"data-docs/{path}") == (404, "NOT_FOUND"), path
    until(lambda: 'href="/millrace/data-docs/index.html"' in site.page("quality"), "the page looks now and then")


def test_a_report_is_told_in_words_and_units_and_found_by_its_run(site: Site, world: World) -> None:
    launch_history.append_history(
        launch_history.history_path(world.settings, launch_history.OPERATIONS),
        {
            "run_id": "manual__2026/1", "job": "compaction", "attempt": 1, "state": "finished",
            "started_at": 100.0, "ended_at": 110.0, "params": {"dry_run": False}, "error": None,
            "report": {"freed_bytes": 5 << 20, "base_tick": 470654881634713600,
                "tables": [{"name": HOSTILE, "files": 3}], "seconds": 61.0},
        },
    )  # fmt: skip
    page = site.page("maintenance", run="manual__2026/1")
    assert "freed bytes" in page
    assert "5.0 MiB" in page
    assert "1 min 1 s" in page
    assert "470654881634713600 (2026-11-23" in page
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert "Nothing is known of this run" in site.page("maintenance", run="another")


def test_a_run_that_failed_leads_from_the_banner_and_from_its_row_to_its_log(own_site: Site, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    folder = RunFolder(settings, "quality-1")
    folder.path.mkdir(parents=True)
    folder.log.write_text("first line\n<b>no space left</b>\n")
    launch_history.append_history(
        launch_history.history_path(settings, launch_history.OPERATIONS),
        {
            "run_id": "quality-1", "job": "quality", "attempt": 1, "state": "failed", "started_at": 1.0,
            "ended_at": 2.0,
            "params": {}, "report": None, "error": {"code": "X", "message": "no", "retriable": False},
        },
    )  # fmt: skip
    link = 'href="/millrace/maintenance?run=quality-1"'
    assert link in own_site.page("maintenance").partition("<main")[0], "in the banner"
    assert link in own_site.page("maintenance").partition("<main")[2], "in its row"
    assert link in own_site.page("").partition("<main")[2], "beside the finding"
    page = own_site.page("maintenance", run="quality-1")
    assert "&lt;b&gt;no space left&lt;/b&gt;" in page
    assert 'href="/millrace-jobs/quality-1/log"' in page
    assert "no space left" not in own_site.page("maintenance", run="../quality-1")


def test_a_group_is_shown_with_its_positions_though_no_server_runs(own_site: Site, tmp_path: Path) -> None:
    positions = FilePositions(tmp_path / "data" / "coord")
    positions.move(HOSTILE, {"dml_0_7v0": compose_tick(1_764_200_000_000)})
    positions.close()
    page = own_site.page("consumers")
    assert HOSTILE not in page
    assert "dml_0_7v0" in page
    assert "unknown" in page
    (found,) = own_site.json("consumer-groups")
    assert (found["group"], found["state"], found["members"], found["lag_messages"]) == (HOSTILE, "unknown", [], 0)


def test_each_tick_of_the_api_has_its_moment_beside_it(site: Site) -> None:
    for path in ("collections", "collections/users", "collections/users/files"):
        found = site.json(path)
        rows = found if isinstance(found, list) else found.get("items", [found])
        for row in rows:
            for name in [name for name in row if name.endswith("_tick") and name != "time_tick"]:
                moment = row[name.replace("_tick", "_time")]
                assert moment == (int(row[name]) >> 18) / 1000 if int(row[name]) else moment is None, (path, name)


def test_the_reference_says_where_the_server_is_and_lets_one_try(site: Site) -> None:
    assert site.get("openapi.json").json()["servers"][0]["url"] == "/millrace"
    page = site.page("docs")
    assert 'data-route="/millrace/api/v1/collections/{name}"' in page
    assert 'name="name" data-place="path"' in page
    assert site.client.get("/millrace/static/try.js").status_code == 200


def test_streams_are_a_graph_between_their_tables(site: Site, world: World) -> None:
    found = site.json("streams")
    [shipped] = found["streams"]
    assert (shipped["name"], shipped["state"], shipped["source"], shipped["sink"]) == (
        "flights_hourly", "new", "collection:flights", "collection:flights_by_hour"
    )  # fmt: skip
    assert found["levels"] == {"collection:flights": 0, "stream:flights_hourly": 1, "collection:flights_by_hour": 2}
    page = site.page("flows")
    assert page.count('<path class="line"') == 2
    assert page.count('class="flow new"') == 1
    assert page.count('class="place"') == 2
    assert 'href="/dags/stream_flights_hourly"' in page
    assert 'id="stream-flights_hourly"' in page


def test_many_collections_have_pages_and_a_search(own_site: Site, tmp_path: Path) -> None:
    file = catalog_path(tmp_path / "data")
    with CatalogStore(file):
        fill_catalog(file, 120, CollectionSchema((FieldSpec("id", "int64", False),), "id"), pchannels=2)
    page = own_site.page("collections")
    assert "50 of 120" in page
    assert "filled_000050" in page
    assert "filled_000051" not in page
    assert 'href="?offset=50">Next →' in page
    assert "120 of 120" in own_site.page("collections", offset=100)
    found = own_site.page("collections", search="_00007")
    assert "filled_000079" in found
    assert "filled_000080" not in found
    assert 'value="_00007"' in found
    assert "No such collection" in own_site.page("collections", search=HOSTILE)
    answer = own_site.get("api/v1/collections", limit=100)
    assert [len(answer.json()), answer.headers["X-Total-Count"]] == [100, "120"]
    link, _, rel = answer.headers["Link"].partition("; ")
    assert (link.partition("?")[0], rel) == ("</millrace/api/v1/collections", 'rel="next"')
    assert {"offset=100", "limit=100"} == set(link.strip("<>").partition("?")[2].split("&"))
    assert "Link" not in own_site.get("api/v1/collections", limit=100, offset=100).headers
