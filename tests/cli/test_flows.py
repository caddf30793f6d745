"""`millrace flows`.

A file of declarations as a user writes it, right and wrong; what is refused is said without Java,
and nothing is started for it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner

from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.client.database import connect
from millrace.commands.flows import old_names
from millrace.commands.main import app
from millrace.flows.directory import find_flow
from millrace.flows.range_host.observed import note_flow
from millrace.flows.range_host.offsets import set_offsets
from millrace.flows.range_host.status import PipelineStatus, State, status_path
from millrace.flows.range_host.supervision import read_wanted
from millrace.flows.sinks.collection.poison import letters
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.spark_host.status import progress_name
from millrace.pipelines.declaration import pipeline_of
from millrace.pipelines.deploy.deployment import Deployment as Deployed
from tests.cli.deployment import Deployment

GOOD = """
streams:
  - name: hourly
    source: {collection: users, columns: [name, at], watermark: {column: at, delay: 1 hour}}
    sql: select name, window.start as hour, count(*) as n from users group by name, window(at, '1 hour')
    sink: {collection: by_hour, mode: upsert}
    output_mode: update
  - name: plain
    source: {collection: users, columns: [id, name]}
    sql: select id, name from users
    sink: {collection: strict, mode: upsert, dead_letters: letters}
"""
GROWS = """
  - name: grows
    source: {collection: users, columns: [name, at], watermark: {column: at, delay: 1 hour}}
    sql: select name, count(*) as n from users group by name
    sink: {delta: /lake/grows}
    output_mode: update
  - name: forever
    source: {collection: users, columns: [name]}
    sql: select distinct name from users
    sink: {delta: /lake/forever}
"""
WRONG = """
  - name: wrong
    source: {collection: user, watermark: {column: at, delay: 1 hour}}
    sink: nowhere
"""


@pytest.fixture
def declared(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    deployment.create_users()
    hour = ("--field", "name:string?", "--field", "hour:timestamp", "--field", "n:int64", "--key", "hour")
    deployment.ok("collections", "create", "by_hour", *hour)
    deployment.ok("collections", "create", "strict", "--field", "id:int64", "--field", "name:string?", "--key", "id")
    assert "Created letters for dead letters" in deployment.ok("flows", "errors", "create", "letters")
    deployment.file("s.yaml", GOOD)
    monkeypatch.setenv("MILLRACE_STREAM_DECLARATIONS", str(deployment.settings.data_dir.parent / "s.yaml"))
    return deployment


def test_one_declares_by_a_file_and_hears_what_is_wrong_before_anything_runs(declared: Deployment) -> None:
    found = declared.as_json("flows", "check")
    assert [(each["flow"], each["level"]) for each in found] == [("hourly", "ok"), ("plain", "ok")]
    declared.file("s.yaml", GOOD + GROWS)
    found = {each["flow"]: (each["level"], each["words"]) for each in declared.as_json("flows", "check")}
    assert found["grows"] == (
        "warning",
        "the state of GROUP BY and DISTINCT is never removed: no expression in it uses 'at'",
    )
    assert found["forever"] == ("warning", "without a watermark, the state of GROUP BY and DISTINCT is never removed")
    declared.file("s.yaml", GOOD + WRONG)
    result = declared.run("flows", "check")
    assert result.exit_code == 1
    assert "INVALID_STREAM: cannot run: wrong" in result.stderr
    assert "there is no collection 'user'" in result.stdout
    for command in ("run", "start"):
        said = declared.fails("INVALID_STREAM", "flows", command, "wrong")
        assert (
            "source.collection: there is no collection 'user'; sink.collection: there is no collection 'nowhere'"
            in said
        )
    declared.fails("STREAM_NOT_FOUND", "flows", "check", "other")
    declared.file("s.yaml", "streams: [{name: x, source: users, sink: {collection: strict, delta: /x}}]")
    assert "stream 0 (x): sink: " in declared.fails("INVALID_STREAM", "flows", "list")


def test_explain_of_what_cannot_run_needs_no_java_and_says_so_behind_all_that_it_found(declared: Deployment) -> None:
    declared.file("s.yaml", GOOD + WRONG)
    result = declared.run("flows", "explain", "wrong")
    assert result.exit_code == 1
    assert "error: source.collection: there is no collection 'user'" in result.stdout
    assert "INVALID_STREAM: the stream 'wrong' cannot run" in result.stderr


def test_where_nothing_is_declared_the_demos_is_looked_at(deployment: Deployment) -> None:
    deployment.create_users()
    result = deployment.run("flows", "check")
    assert (result.exit_code, "flights_hourly" in result.stdout) == (1, True)


@pytest.mark.slow
def test_paused_changed_and_replayed_it_says_what_is_to_be_done(declared: Deployment) -> None:
    declared.ok("flows", "pause", "plain")
    for command in ("run", "start"):
        said = declared.fails("INVALID_STREAM", "flows", command, "plain")
        assert "is paused: `millrace flows resume plain`" in said
    told = {"pid": os.getpid(), "at": 1_800_000_000.25, "rows": 3}
    path = declared.settings.progress_path(progress_name("hourly"))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, told)
    assert "2027-01-15T08:00:00.250Z" in declared.ok("flows", "status", "hourly")
    assert declared.as_json("flows", "status", "hourly")["at"] == told["at"]
    path.unlink()
    states = {each["name"]: each["state"] for each in declared.as_json("flows", "list")}
    assert (states["plain"], states["hourly"]) == ("paused", "new")
    declared.ok("flows", "resume", "plain")
    assert declared.as_json("flows", "upgrade", "plain", "--keep-state")["incarnation"] == 1
    Incarnations(declared.settings, "plain").hand()  # a micro-batch has been given to the sink
    declared.file("s.yaml", GOOD.replace("select id, name", "select id, upper(name) as name"))
    for command in ("run", "start"):
        said = declared.fails("INVALID_STREAM", "flows", command, "plain")
        assert "`millrace flows upgrade plain --keep-state`" in said
    assert declared.as_json("flows", "upgrade", "plain", "--fresh-state")["incarnation"] == 2
    assert declared.as_json("flows", "replay", "plain", "--after", "0")["incarnation"] == 3
    declared.fails("INVALID_ARGUMENT", "flows", "replay", "plain")
    declared.fails("INVALID_ARGUMENT", "flows", "replay", "plain", "--after", "some day")
    assert "declare errors.collection" in declared.fails("INVALID_STREAM", "flows", "errors", "redrive", "hourly")


PIPELINE = """
id: late-flights
description: Late ones.
source: {kind: kafka, bootstrap: ['127.0.0.1:9'], topics: [flights]}
sink: {kind: opensearch, hosts: ['http://127.0.0.1:9'], index_base: late}
"""


@pytest.fixture
def ran(declared: Deployment) -> Deployment:
    """A pipeline that has run here, and reached offset 7 of its one partition."""
    file = declared.file("late.yaml", PIPELINE)
    settings = declared.settings
    pipeline = find_flow(settings, str(file)).declaration(settings)
    note_flow(settings, pipeline, file=Path(file))
    set_offsets(settings, "late-flights", {"flights-0": 7})
    return declared


def test_a_pipeline_that_has_run_is_known_by_its_name(ran: Deployment) -> None:
    found = {each["name"]: each for each in ran.as_json("flows", "list")}
    assert {name: each["host"] for name, each in found.items()} == {
        "flights_hourly": "spark", "hourly": "spark", "late-flights": "range", "plain": "spark"
    }  # fmt: skip
    assert (found["late-flights"]["source"], found["late-flights"]["state"]) == ("kafka:flights", "new")
    told = ran.as_json("flows", "status", "late-flights")
    assert (told["sink"], told["words"], told["tasks"]) == ("opensearch:late", "Late ones.", [])
    checked = ran.as_json("flows", "check", "late-flights")
    assert checked["guarantee"].startswith("effectively once")
    assert (checked["error topic"], "dead letters" in checked) == ("late-flights.errors", False)
    into = ran.file("into.yaml", PIPELINE + "errors: {collection: letters}\n")
    checked = ran.as_json("flows", "check", str(into))
    assert ("error topic" in checked, checked["dead letters"]) == (False, "letters")
    assert ran.as_json("flows", "explain", "late-flights")["declaration"]["name"] == "late-flights"
    known = "known flows: flights_hourly, hourly, late-flights, plain"
    assert known in ran.fails("STREAM_NOT_FOUND", "flows", "status", "absent")
    note_flow(ran.settings, pipeline_of(yaml.safe_load(PIPELINE) | {"id": "hourly"}))
    said = ran.fails("INVALID_ARGUMENT", "flows", "status", "hourly")
    assert "a stream and a pipeline are named 'hourly'" in said


def test_positions_of_a_stopped_pipeline_are_shown_and_set(ran: Deployment) -> None:
    assert ran.as_json("flows", "offsets", "show", "late-flights") == [{"lane": "flights-0", "position": 7}]
    found = ran.as_json("flows", "offsets", "set", "late-flights", "flights-0=3", "flights-1=9")
    assert found == [{"lane": "flights-0", "position": 3}, {"lane": "flights-1", "position": 9}]
    assert ran.as_json("flows", "offsets", "show", "late-flights") == found
    assert "is not a task" in ran.fails("INVALID_ARGUMENT", "flows", "offsets", "set", "late-flights", "planes-0=3")
    assert "LANE=POSITION" in ran.fails("INVALID_ARGUMENT", "flows", "offsets", "set", "late-flights")
    assert "is not a position" in ran.fails("INVALID_ARGUMENT", "flows", "offsets", "set", "late-flights", "flights-0")
    registered = ProcessRegistration(ran.settings.run_path)
    said = PipelineStatus(pipeline="late-flights", state=State.RUNNING, pid=os.getpid(), at=time.time())
    status_path(ran.settings, "late-flights").write_text(said.model_dump_json())
    busy = ran.fails("PIPELINE_BUSY", "flows", "offsets", "set", "late-flights", "flights-0=3")
    assert "is running: stop it first" in busy
    assert f"process {os.getpid()} runs" in ran.fails("PIPELINE_BUSY", "flows", "stop", "late-flights")
    assert f"process {os.getpid()} runs" in ran.fails("PIPELINE_BUSY", "flows", "start", "late-flights")
    del registered


def test_a_pipeline_is_paused_and_resumed_here_unless_the_service_manages_it(ran: Deployment) -> None:
    ran.ok("flows", "pause", "late-flights")
    assert read_wanted(ran.settings, "late-flights").paused
    ran.ok("flows", "resume", "late-flights")
    assert not read_wanted(ran.settings, "late-flights").paused
    assert "not running" in ran.ok("flows", "stop", "late-flights")
    Deployed(ran.settings).write(pipeline_of(yaml.safe_load(PIPELINE)))
    for command in ("pause", "resume", "stop", "start"):
        said = ran.fails("PIPELINE_BUSY", "flows", command, "late-flights")
        told = "resume" if command == "start" else command
        assert f"`millrace flows service {told} late-flights`" in said
    said = ran.fails("PIPELINE_BUSY", "flows", "offsets", "set", "late-flights", "flights-0=1")
    assert "`millrace flows service offsets late-flights`" in said


def test_what_only_one_host_does_is_refused_for_the_other(ran: Deployment) -> None:
    assert "is a pipeline" in ran.fails("INVALID_ARGUMENT", "flows", "upgrade", "late-flights", "--keep-state")
    assert "is a pipeline" in ran.fails("INVALID_ARGUMENT", "flows", "batch", "late-flights")
    assert "is a stream" in ran.fails("INVALID_ARGUMENT", "flows", "show", "plain", "samples.jsonl")
    assert "no step" in ran.fails("INVALID_ARGUMENT", "flows", "errors", "list", "plain", "--kind", "CAST")
    assert "no snapshots" in ran.fails("INVALID_ARGUMENT", "flows", "replay", "late-flights", "--snapshot", "now")


def test_dead_letters_of_a_stream_are_listed_newest_first(declared: Deployment) -> None:
    row = pa.table({"id": [None], "name": ["x"]})
    with connect(settings=declared.settings) as db:
        for batch, reason in ((3, "id is null"), (4, "id is too large")):
            db.collection("letters").insert(letters("plain", batch, [(0, row, reason)]))
        db.collection("letters").insert(letters("other", 9, [(0, row, "of another stream")]))
    found = declared.as_json("flows", "errors", "list", "plain")
    assert [(each["flow"], each["position"], each["stage"], each["reason"]) for each in found] == [
        ("plain", 4, "TASK_PUT", "id is too large"), ("plain", 3, "TASK_PUT", "id is null")
    ]  # fmt: skip
    assert json.loads(found[0]["payload"]) == {"id": None, "name": "x"}
    assert [each["position"] for each in declared.as_json("flows", "errors", "list", "plain", "--limit", "1")] == [4]
    assert len(declared.as_json("flows", "errors", "list", "plain", "--reason", "NULL")) == 1
    assert declared.as_json("flows", "errors", "list", "hourly") == []
    counted = declared.as_json("flows", "errors", "redrive", "plain", "--dry-run")
    assert (counted["selected"], counted["written"]) == (2, 0)


@pytest.mark.parametrize("old", [("streams", "list"), ("streams", "validate"), ("pipelines", "kinds")], ids=" ".join)
def test_names_of_earlier_builds_work_and_say_the_new_ones(declared: Deployment, old: tuple[str, str]) -> None:
    result = declared.run(*old)
    assert result.exit_code == 0
    assert f"`millrace {old[0]}` is now `millrace flows`" in result.stderr
    assert f"│ {old[0]} " not in CliRunner().invoke(app, ["--help"]).stdout
    names = {each.name or each.callback.__name__.replace("_", "-") for each in old_names.pipelines.registered_commands}
    assert {"run", "check", "kinds", "show", "redrive", "serve", "create", "list", "redrive-errors"} <= names
    if old == ("streams", "list"):
        assert {each["name"]: each["job"] for each in declared.as_json(*old)}["plain"] == "plain"
