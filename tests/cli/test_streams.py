"""`millrace streams`.

A file of declarations as a user writes it, right and wrong; what is refused is said without Java,
and nothing is started for it.
"""

from __future__ import annotations

import os

import pytest

from millrace.base.files import replace_json
from millrace.flows.spark_host.incarnations import Kept
from millrace.flows.spark_host.status import progress_name
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
    assert "Created letters for dead letters" in deployment.ok("streams", "letters", "letters")
    deployment.file("s.yaml", GOOD)
    monkeypatch.setenv("MILLRACE_STREAM_DECLARATIONS", str(deployment.settings.data_dir.parent / "s.yaml"))
    return deployment


def test_one_declares_by_a_file_and_hears_what_is_wrong_before_anything_runs(declared: Deployment) -> None:
    found = declared.as_json("streams", "validate")
    assert [(each["stream"], each["level"]) for each in found] == [("hourly", "ok"), ("plain", "ok")]
    declared.file("s.yaml", GOOD + GROWS)
    found = {each["stream"]: (each["level"], each["words"]) for each in declared.as_json("streams", "validate")}
    assert found["grows"] == (
        "warning",
        "what is grouped or made distinct is kept for good: nothing in it is made of 'at'",
    )
    assert found["forever"] == ("warning", "without one what is grouped or made distinct is kept for good")
    declared.file("s.yaml", GOOD + WRONG)
    result = declared.run("streams", "validate")
    assert result.exit_code == 1
    assert "INVALID_STREAM: cannot run: wrong" in result.stderr
    assert "there is no collection 'user'" in result.stdout
    for command in ("run", "start"):
        said = declared.fails("INVALID_STREAM", "streams", command, "wrong")
        assert (
            "source.collection: there is no collection 'user'; sink.collection: there is no collection 'nowhere'"
            in said
        )
    declared.fails("STREAM_NOT_FOUND", "streams", "validate", "other")
    declared.file("s.yaml", "streams: [{name: x, source: users, sink: {collection: strict, delta: /x}}]")
    assert "stream 0 (x): sink: " in declared.fails("INVALID_STREAM", "streams", "list")


def test_explain_of_what_cannot_run_needs_no_java_and_says_so_behind_all_that_it_found(declared: Deployment) -> None:
    declared.file("s.yaml", GOOD + WRONG)
    result = declared.run("streams", "explain", "wrong")
    assert result.exit_code == 1
    assert "error: source.collection: there is no collection 'user'" in result.stdout
    assert "INVALID_STREAM: the stream 'wrong' cannot run" in result.stderr


def test_where_nothing_is_declared_the_demos_is_looked_at(deployment: Deployment) -> None:
    deployment.create_users()
    result = deployment.run("streams", "validate")
    assert (result.exit_code, "flights_hourly" in result.stdout) == (1, True)


@pytest.mark.slow
def test_paused_changed_and_replayed_it_says_what_is_to_be_done(declared: Deployment) -> None:
    declared.ok("streams", "pause", "plain")
    for command in ("run", "start"):
        said = declared.fails("INVALID_STREAM", "streams", command, "plain")
        assert "is paused: `millrace streams resume plain`" in said
    told = {"pid": os.getpid(), "at": 1_800_000_000.25, "rows": 3}
    path = declared.settings.progress_path(progress_name("hourly"))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, told)
    assert "2027-01-15T08:00:00.250Z" in declared.ok("streams", "status", "hourly")
    assert declared.as_json("streams", "status", "hourly")["at"] == told["at"]
    path.unlink()
    states = {each["name"]: each["state"] for each in declared.as_json("streams", "list")}
    assert (states["plain"], states["hourly"]) == ("paused", "new")
    declared.ok("streams", "resume", "plain")
    assert declared.as_json("streams", "upgrade", "plain", "--keep-state")["incarnation"] == 1
    Kept(declared.settings, "plain").hand()  # a micro-batch has been given to the sink
    declared.file("s.yaml", GOOD.replace("select id, name", "select id, upper(name) as name"))
    for command in ("run", "start"):
        said = declared.fails("INVALID_STREAM", "streams", command, "plain")
        assert "`millrace streams upgrade plain --keep-state`" in said
    assert declared.as_json("streams", "upgrade", "plain", "--fresh-state")["incarnation"] == 2
    assert declared.as_json("streams", "replay", "plain", "--after", "0")["incarnation"] == 3
    declared.fails("INVALID_ARGUMENT", "streams", "replay", "plain")
    declared.fails("INVALID_ARGUMENT", "streams", "replay", "plain", "--after", "some day")
    assert "declare sink.dead_letters" in declared.fails("INVALID_STREAM", "streams", "redrive", "hourly")
