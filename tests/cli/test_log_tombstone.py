"""An operator replaces the entry that parks a PChannel, by the commands alone, and the PChannel goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import millrace
from millrace.base.errors import ChannelParked
from millrace.base.failpoint import VARIABLE
from millrace.client.append_client import AppendClient
from millrace.commands.parts.command_line import find_collection
from millrace.log.generations.service import open_deployment_log
from millrace.message.ids import LogId
from millrace.message.tombstones import entry_sha256
from millrace.rpc.discovery import read_record
from tests.cli.deployment import Deployment
from tests.node.log_samples import poison

REASON = "a producer of the next release; INC-1"


def poisoned(deployment: Deployment) -> tuple[str, LogId]:
    """A PChannel of the collection ``users`` with rows, then an entry that no host here can judge; and that entry."""
    deployment.create_users("--vchannels", "1")
    deployment.produce({"id": 1, "name": "n"})
    home = find_collection(deployment.settings, "users").vchannels[0].partition("_1v")[0]
    deployment.catch_up()
    deployment.ok("log", "stop")
    with open_deployment_log(deployment.settings.log_path) as service, closing(service.open(home)) as log:
        return home, log.append([poison()])[0]  # the log's server would refuse it


def test_an_entry_that_parks_its_pchannel_is_replaced_and_the_pchannel_goes_on(deployment: Deployment) -> None:
    home, entry = poisoned(deployment)
    AppendClient.connect(deployment.settings.data_dir).close()
    with pytest.raises(ChannelParked, match=f"millrace log tombstone {home} {entry}"):
        deployment.catch_up()

    shown = deployment.ok("log", "tombstone", home, str(entry))
    assert entry_sha256(poison()) in shown
    assert "UNSUPPORTED_VERSION" in shown
    assert "Nothing was changed" in shown
    facts = deployment.as_json("log", "tombstone", home, str(entry))
    assert (facts["bytes"], facts["entry"]) == (len(poison()), str(entry))
    deployment.fails("INVALID_ARGUMENT", "log", "tombstone", home, str(entry), "--yes", "--reason", REASON)
    wrong = ("--checksum", "0" * 64, "--reason", REASON, "--yes")
    assert entry_sha256(poison()) in deployment.fails("TOMBSTONE_REFUSED", "log", "tombstone", home, str(entry), *wrong)
    deployment.fails("CHANNEL_NOT_FOUND", "log", "tombstone", "dml_77", str(entry))

    yes = ("--checksum", facts["checksum"], "--reason", REASON, "--yes")
    placed = deployment.ok("log", "tombstone", home, str(entry), *yes)
    assert f"millrace unpark {home}" in placed
    assert deployment.as_json("log", "tombstone", home, str(entry), *yes)["reason"] == REASON, "again: the same"
    deployment.ok("unpark", home)
    deployment.produce({"id": 2, "name": "m"})
    deployment.catch_up()
    assert {row["id"] for row in deployment.lines("read", "users", "--format", "jsonl")} == {1, 2}
    (rejected,) = deployment.as_json("wal", "rejections", "--pchannel", home)
    assert (rejected["reason"], rejected["id"]) == ("MALFORMED", f"{entry}:0:0")
    assert REASON in rejected["detail"]
    assert "Everything holds" in deployment.ok("verify")
    (raw,) = deployment.lines("log", "read", home, "--from", str(entry), "--limit", "1")
    assert raw["type"] == "UNDEFINED"


START = """
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.rpc.launch import launch_of
settings = Settings.load()
AppendClient.connect(settings.data_dir, launch=launch_of(settings)).close()
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", ["tombstone.proposed", "tombstone.fenced", "tombstone.placed"])
def test_a_server_that_dies_in_between_leaves_it_to_the_next(deployment: Deployment, place: str) -> None:
    home, entry = poisoned(deployment)
    paths = [str(Path(millrace.__file__).parent.parent)]
    environment = {**os.environ, **deployment.settings.environment(), "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(  # it starts a server, which is to die there
        [sys.executable, "-c", START],
        env=environment | {VARIABLE: place},
        timeout=100,
        check=True,
    )
    doomed = read_record(deployment.settings.log_path)
    assert doomed is not None
    yes = ("--checksum", entry_sha256(poison()), "--reason", REASON, "--yes")
    deployment.ok("log", "tombstone", home, str(entry), *yes)  # it starts the next one, and asks again
    after = read_record(deployment.settings.log_path)
    assert after is not None
    assert after.pid != doomed.pid
    with AppendClient.connect(deployment.settings.data_dir) as client, closing(client.service.open(home)) as log:
        assert REASON.encode() in log.read(entry, end=entry.following()).batch["value"][0].as_py()
    deployment.produce({"id": 2, "name": "m"})
    deployment.catch_up()
    assert {row["id"] for row in deployment.lines("read", "users", "--format", "jsonl")} == {1, 2}
    assert "Everything holds" in deployment.ok("verify")
