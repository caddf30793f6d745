"""Settings that name another log than the deployment's.

No log begins anew beside the one that has the acknowledged rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.log.generations.generation_file import FILE
from millrace.node.ingest.log_connection import LogConnection


@pytest.mark.slow
def test_a_server_that_settings_of_another_log_start_is_refused(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    elsewhere = replace(settings, log="kafka://127.0.0.1:1/millrace")
    with connect(settings.data_dir, create=True, settings=settings) as db:
        db.create_collection("users", {"id": "int64"}, key="id").insert([{"id": 1}])
        with connect(elsewhere.data_dir, settings=elsewhere) as other:  # the server that runs has the deployment's log
            other["users"].insert([{"id": 2}])
        db.connection.service.shutdown()
    with pytest.raises(InvalidSettings, match=r"names kafka://127.0.0.1:1/millrace, .* MILLRACE_LOG=rocksmq"):
        connect(settings=elsewhere)
    with pytest.raises(InvalidSettings, match="MILLRACE_LOG=rocksmq"):  # who reads the log into the tables
        LogConnection(elsewhere).service()
    with connect(settings.data_dir, create=True, settings=settings) as db:
        until = db["users"].insert([{"id": 3}]).last_tick
        found = [row["id"] for change in db["users"].scan(until=until) for row in change.rows.to_pylist()]
        assert found == [1, 2, 3]
        db.connection.service.shutdown()


@pytest.mark.slow
def test_a_log_that_an_older_version_made_is_kept_to_from_the_servers_next_start_on(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    with connect(settings.data_dir, create=True, settings=settings) as db:
        db.create_collection("users", {"id": "int64"}, key="id")
        db.connection.service.shutdown()
    (settings.log_path / FILE).unlink()
    with connect(settings.data_dir, create=True, settings=settings) as db:
        db.connection.service.shutdown()
    assert (settings.log_path / FILE).exists()
