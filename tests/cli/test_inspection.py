"""status, log, wal, verify, segments, checkpoints: what is there, how far it is, and whether it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import ChannelParked, UnsupportedVersion
from millrace.base.file_lock import ProcessRegistration
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.commands.parts.command_line import find_collection
from millrace.log.generations.service import open_deployment_log
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import LogId
from millrace.node.range_loop.parking import Parked, park
from millrace.rpc.launch import launch_of
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.read import freshness
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import CHAIN_VERSION
from tests.cli.deployment import Deployment
from tests.node.log_samples import poison


@pytest.fixture(scope="module")
def users(shared: Deployment) -> Deployment:
    """The module's deployment with some rows in ``users``, all of them flushed."""
    shared.create_users("--vchannels", "2")
    shared.produce(*({"id": number, "name": "n"} for number in range(100)))
    shared.as_json("produce", "users", "-", "--delete", stdin='{"id": 1}\n')
    shared.catch_up()
    return shared


def _progress(settings: Settings, **facts: object) -> None:
    path = settings.progress_path("streaming-node")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts), encoding="utf-8")


def test_status_tells_how_far_each_pchannel_is(users: Deployment) -> None:
    found = users.as_json("status")
    assert found["log_server"]["running"]
    assert [each["pchannel"] for each in found["pchannels"]] == ["dml_0", "dml_1"]
    for each in found["pchannels"]:
        assert (each["lag_seconds"], each["parked"], each["term"]) == (0.0, None, 1)
        assert each["flushed_tick"] == each["wal_tick"] > 0
    home = find_collection(users.settings, "users").vchannels[0].partition("_1v")[0]
    users.produce(*({"id": number} for number in range(200, 220)))
    lags = {each["pchannel"]: each["lag_seconds"] for each in users.as_json("status")["pchannels"]}
    assert lags[home] > 0
    assert home in users.ok("status")
    users.catch_up()
    assert {each["lag_seconds"] for each in users.as_json("status")["pchannels"]} == {0.0}


def test_ticks_without_news_are_no_lag(users: Deployment) -> None:
    with AppendClient.connect(users.settings.data_dir, start=False) as client:
        client.tick("dml_0")
        tick = client.tick("dml_0")
        wal = WalTable.open(Path(users.settings.wal_uri))
        log = client.service.open("dml_0")
        assert wal.last_tick("dml_0") < tick
        assert not freshness.lacks_rows(wal, log, "dml_0", up_to=tick)
        assert not freshness.lacks_rows(wal, log, "dml_0")


def test_the_streaming_job_runs_only_if_the_very_process_lives_that_wrote_its_progress(users: Deployment) -> None:
    process, _reporter = psutil.Process(), ProcessRegistration(users.settings.run_path)
    _progress(users.settings, pid=os.getpid(), at=process.create_time() + 5, batches=3, rows=7)
    job = users.as_json("status")["streaming_job"]
    assert (job["running"], job["pid"], job["batches"], job["rows"]) == (True, os.getpid(), 3, 7)
    # Written before this process began: another process had its id.
    _progress(users.settings, pid=os.getpid(), at=process.create_time() - 5)
    assert not users.as_json("status")["streaming_job"]["running"]
    assert "is gone" in users.ok("status")
    users.settings.progress_path("streaming-node").write_text("{", encoding="utf-8")
    assert users.as_json("status")["streaming_job"] == {"running": False}
    users.settings.progress_path("streaming-node").unlink()


def test_a_parked_pchannel_is_told_and_goes_on_when_it_is_unparked(users: Deployment) -> None:
    folder = users.settings.parked_path
    park(folder, Parked("dml_1", "MALFORMED", "no such thing", LogId(0, 7), "2026-11-21T10:00:00+00:00"))
    words = {each["pchannel"]: each["parked"] for each in users.as_json("status")["pchannels"]}
    assert words["dml_0"] is None
    assert "0:7" in words["dml_1"]
    assert "no such thing" in words["dml_1"]
    assert "streaming node and the append host" in users.ok("unpark", "dml_1")
    assert {each["parked"] for each in users.as_json("status")["pchannels"]} == {None}
    users.fails("CHANNEL_NOT_FOUND", "unpark", "dml_1")
    users.produce({"id": 300})


def test_the_log_is_described_and_read_as_it_was_appended(users: Deployment) -> None:
    described = {each["pchannel"]: each for each in users.as_json("log", "describe")}
    assert described.keys() == {"dml_0", "dml_1"}
    assert all(each["bytes"] > 0 and each["last_append"] for each in described.values())
    messages = users.lines("log", "read", "dml_0", "--rows")
    assert messages[0]["type"] == "TERM_OPENING"
    assert messages[0]["payload"]["chain_version"] == CHAIN_VERSION
    inserts = [each for each in messages if each["type"] == "INSERT"]
    assert inserts[0]["payload"][0]["name"] == "n"
    assert "CREATE_SEGMENT" not in {each["type"] for each in messages}
    place = messages[1]["id"].rpartition(":")[0]
    assert users.lines("log", "read", "dml_0", "--from", place, "--limit", "1", "--rows") == [messages[1]]
    assert users.lines("log", "read", "dml_0", "--from", "latest") == []
    users.fails("CHANNEL_NOT_FOUND", "log", "read", "dml_9")
    users.fails("CHANNEL_NOT_FOUND", "log", "describe", "dml_9")
    users.fails("INVALID_ARGUMENT", "log", "read", "dml_0", "--from", "7")


def test_what_holds_is_told_as_such(users: Deployment) -> None:
    users.catch_up()
    assert all(each["holds"] for each in users.as_json("log", "verify"))
    wal = users.as_json("wal", "verify")
    assert all(each["holds"] and each["committed"] == each["stored"] for each in wal)
    assert users.as_json("wal", "describe")["pchannels"][0]["digest"] == wal[0]["committed"]
    found = users.as_json("verify")
    assert found["holds"]
    assert all(each["replayed"] == each["committed"] for each in found["pchannels"])
    [counted] = found["collections"]
    assert counted["state"] == "whole"
    assert counted["inserted"] == counted["visible"] + counted["deleted"] + counted["rolled_back"]
    assert counted["deleted"] == 1
    assert "Everything holds." in users.ok("verify")


def test_a_table_that_the_flusher_has_not_caught_up_on_is_behind_which_is_no_fault(users: Deployment) -> None:
    users.produce({"id": 400})
    users.catch_up(flush=False)
    [counted] = users.as_json("verify")["collections"]
    assert (counted["state"], counted["holds"]) == ("behind", True)
    users.catch_up()


def test_segments_and_checkpoints_are_listed(users: Deployment) -> None:
    growing = users.as_json("segments", "users", "--state", "growing")
    assert {each["collection"] for each in growing} == {"users"}
    assert {each["partition"] for each in growing} == {"_default"}
    assert users.as_json("segments", "--state", "dropped") == []
    assert [each["pchannel"] for each in users.as_json("checkpoints")] == ["dml_0", "dml_1"]
    assert "dml_0" in users.ok("checkpoints")


def test_a_field_that_no_row_has_yet_is_no_difference(users: Deployment) -> None:
    users.ok("collections", "create", "plain", "--field", "id:int64", "--key", "id")
    users.as_json("produce", "plain", "-", stdin='{"id": 1}')
    users.ok("collections", "add-field", "plain", "mail:string?")
    users.catch_up()
    assert {each["collection"]: each["state"] for each in users.as_json("verify")["collections"]}["plain"] == "whole"


@pytest.mark.slow
def test_rows_that_are_gone_from_a_table_or_the_wal_end_a_check_with_3(deployment: Deployment) -> None:
    deployment.create_users()
    deployment.produce({"id": 1})
    deployment.catch_up()
    collection = find_collection(deployment.settings, "users")
    DeltaTable(str(Path(rows_uri(deployment.settings, collection.id)))).delete("id = 1")
    result = deployment.run("verify", "--json")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert all(each["holds"] for each in found["pchannels"])
    assert found["collections"][0]["state"] == "differs"

    DeltaTable(str(Path(deployment.settings.wal_uri))).delete("kind = 'message' and type = 'INSERT'")
    result = deployment.run("wal", "verify", "--json")
    assert result.exit_code == 3
    [dml_0] = [each for each in json.loads(result.stdout) if each["pchannel"] == "dml_0"]
    assert not dml_0["holds"]
    assert "not those that were committed" in dml_0["detail"]
    assert deployment.run("verify").exit_code == 3


def test_a_flipped_bit_in_the_log_ends_its_check_with_3(deployment: Deployment) -> None:
    deployment.create_users()
    deployment.produce(*({"id": number, "name": "needle" * 50} for number in range(50)))
    [path] = [each for each in _segment_files(deployment.settings) if b"needle" in each.read_bytes()]
    with path.open("r+b") as file:
        place = file.read().index(b"needle")
        file.seek(place)
        file.write(b"N")
    result = deployment.run("log", "verify", "dml_0", "--json")
    assert result.exit_code == 3
    [found] = json.loads(result.stdout)
    assert not found["holds"]


def _segment_files(settings: Settings) -> list[Path]:
    return [each for each in settings.log_path.rglob("*") if each.is_file() and "dml_0" in str(each)]


@pytest.mark.slow
def test_the_log_server_stops_and_starts_again_when_it_is_needed(deployment: Deployment) -> None:
    deployment.create_users()
    pid = deployment.as_json("status")["log_server"]["pid"]
    assert str(pid) in deployment.ok("log", "stop")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    found = deployment.as_json("status")
    assert not found["log_server"]["running"]
    assert "No log server runs" in deployment.ok("log", "stop")
    assert deployment.produce({"id": 1})["accepted"] == 1


def test_a_log_server_that_cannot_start_says_so_in_words(users: Deployment) -> None:
    assert "stop it first (millrace log stop)" in users.fails("LOG_BUSY", "log", "serve")
    command = [sys.executable, "-m", "millrace.log.server.main", "--foreground", "--extension", "nowhere:x"]
    found = subprocess.run(
        [*command, "--data", str(users.settings.log_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr.splitlines()) == (
        1,
        ["INVALID_SETTINGS: 'nowhere:x' is not an extension: use module:function (No module named 'nowhere')"],
    )


def test_the_log_is_truncated_up_to_what_the_tables_hold(users: Deployment) -> None:
    users.produce(*({"id": 1_000_000 + number} for number in range(10)))
    users.catch_up()
    planned = {row["pchannel"]: row for row in users.as_json("log", "truncate", "--dry-run")}
    done = {row["pchannel"]: row for row in users.as_json("log", "truncate")}
    assert {name: row["position"] for name, row in planned.items()} == {
        name: row["position"] for name, row in done.items()
    }
    for row in users.as_json("log", "describe"):
        assert row["begin"] == done[row["pchannel"]]["position"]
    assert users.run("verify").exit_code == 0


def test_commands_that_look_start_no_server_and_say_what_they_cannot_show(deployment: Deployment) -> None:
    record = deployment.settings.log_path / "server.json"
    nothing = deployment.settings.data_dir
    for command in (["status"], ["collections", "list"], ["segments"], ["checkpoints"]):
        deployment.ok(*command)
    deployment.fails("LOG_UNAVAILABLE", "scan", "dml_0", "--follow")
    assert not nothing.exists(), "nor do they make anything"
    deployment.create_users()
    deployment.produce(*({"id": number} for number in range(5)))
    deployment.catch_up()
    deployment.produce({"id": 5})  # in the log, and not in the tables
    home = find_collection(deployment.settings, "users").vchannels[0]
    assert sum(each["rows"] for each in deployment.lines("scan", home, "--types", "INSERT")) == 6
    deployment.ok("log", "stop")
    assert not record.exists()
    shown = deployment.run("scan", home, "--types", "INSERT")
    assert shown.exit_code == 1
    assert sum(json.loads(line)["rows"] for line in shown.stdout.splitlines()) == 5, "what the table has"
    assert "LOG_UNAVAILABLE: no log server runs: the scan ends with the WAL table" in shown.stderr
    assert deployment.lines("scan", home, "--limit", "1"), "all that was asked for"
    deployment.fails("LOG_UNAVAILABLE", "scan", home, "--follow")
    deployment.fails("LOG_UNAVAILABLE", "scan", home, "--from", "latest")
    assert "dml_0" in deployment.fails("CHANNEL_NOT_FOUND", "scan", "dml_77")
    read = deployment.run("read", "users", "--format", "jsonl")
    assert read.exit_code == 0
    assert len(read.stdout.splitlines()) == 5
    assert "no log server runs" in read.stderr
    for command in (["status"], ["collections", "list"], ["collections", "describe", "users"], ["segments"]):
        deployment.ok(*command)
    assert not record.exists(), "nobody started it"


@pytest.mark.slow
def test_the_log_is_checked_and_read_without_a_server_and_left_as_it_is(deployment: Deployment) -> None:
    assert deployment.as_json("log", "describe") == deployment.as_json("log", "verify") == []
    assert not deployment.settings.log_path.exists(), "a look makes nothing"
    deployment.create_users()
    deployment.produce(*({"id": number} for number in range(5)))
    deployment.catch_up()
    deployment.produce({"id": 5})
    commands = (
        ["verify"], ["log", "describe"], ["log", "verify"], ["log", "truncate", "--dry-run"],
        ["log", "read", "dml_0", "--rows"],
    )  # fmt: skip

    def looks() -> list[str]:
        return [deployment.ok(*command) for command in commands]

    # A time tick follows the last rows once; then nothing moves any more.
    assert poll_until(lambda: looks() == looks(), Deadline.after(60), interval=0.1)
    with_server = looks()
    deployment.ok("log", "stop")
    before = _contents(deployment.settings.log_path)
    assert looks() == with_server
    assert _contents(deployment.settings.log_path) == before
    deployment.fails("LOG_UNAVAILABLE", "log", "read", "dml_0", "--follow")
    assert "dml_0" in deployment.fails("CHANNEL_NOT_FOUND", "log", "read", "dml_77")
    assert not (deployment.settings.log_path / "server.json").exists(), "nobody started it"
    assert deployment.produce({"id": 6})["accepted"] == 1


def test_a_check_without_a_server_tells_what_an_append_host_would_not_get_beyond(deployment: Deployment) -> None:
    deployment.create_users()
    deployment.produce({"id": 1})
    deployment.catch_up()
    deployment.ok("log", "stop")
    with RocksMQ(deployment.settings.log_path) as log:
        log.open("dml_0").append([poison()])
    result = deployment.run("verify", "--json")
    assert result.exit_code == 3
    [found] = [each for each in json.loads(result.stdout)["pchannels"] if not each["holds"]]
    assert found["pchannel"] == "dml_0"
    assert "CHANNEL_PARKED" in found["detail"]
    assert "UNSUPPORTED_VERSION" in found["detail"]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_looking_commands_show_what_they_can_of_a_parked_pchannel_and_say_what_they_cannot(
    deployment: Deployment,
) -> None:
    deployment.create_users("--vchannels", "1")
    deployment.produce({"id": 1, "name": "n"})
    home = find_collection(deployment.settings, "users").vchannels[0].partition("_1v")[0]
    deployment.catch_up()
    before = deployment.lines("scan", home)
    assert before
    with AppendClient.connect(deployment.settings.data_dir, start=False) as client:
        client.service.shutdown()
    # The log's server would refuse it.
    with open_deployment_log(deployment.settings.log_path) as service, closing(service.open(home)) as log:
        log.append([poison()])
    with AppendClient.connect(deployment.settings.data_dir, launch=launch_of(deployment.settings)) as client:
        with pytest.raises(ChannelParked):
            deployment.catch_up()
        with pytest.raises(UnsupportedVersion):
            client.tick(home)

    rows = {each["pchannel"]: each for each in deployment.as_json("status")["pchannels"]}
    assert "UNSUPPORTED_VERSION" in rows[home]["parked"]
    assert rows[home]["log_end"]
    assert all(each["parked"] is None for name, each in rows.items() if name != home)

    scanned = deployment.run("scan", home)
    assert scanned.exit_code == 1
    assert [json.loads(line) for line in scanned.stdout.splitlines()] == before
    assert scanned.stderr.strip().splitlines()[-1].startswith("CHANNEL_PARKED: ")
    assert [json.loads(line) for line in deployment.run("scan", home, "--limit", "1").stdout.splitlines()] == before[:1]

    found = deployment.run("verify", "--json")
    assert found.exit_code == 3
    verified = json.loads(found.stdout)
    channels = {each["pchannel"]: each for each in verified["pchannels"]}
    assert not verified["holds"]
    assert channels[home]["detail"].startswith("CHANNEL_PARKED: ")
    assert [each["holds"] for name, each in channels.items() if name != home] == [True] * (len(channels) - 1)
    assert [each["holds"] for each in verified["collections"]] == [True]
    assert "Everything holds" not in deployment.run("verify").stdout
