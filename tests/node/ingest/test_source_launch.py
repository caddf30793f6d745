"""What Spark's planner and its tasks start, where they find the log's server dead, is the server of the settings."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.node.ingest.log_connection import LogConnection
from millrace.rpc.discovery import read_record
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from tests.certificates import certificate
from tests.client.spool.test_remote import free_port
from tests.waiting import until


@pytest.mark.slow
def test_a_server_that_the_planner_starts_has_the_settings_port_tls_and_sizes(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "localhost")
    settings = Settings(
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        log_port=free_port(),
        log_tls_cert=str(cert),
        log_tls_key=str(key),
        log_file_bytes=1 << 20,
        log_streams=7,
    )
    with AppendClient.connect(settings.data_dir, launch=launch_of(settings)) as client:
        client.service.create("p0")
        before = read_record(settings.log_path)
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: not before.alive(), "the server is gone")
    service = LogConnection(settings).service()
    assert isinstance(service, RemoteLogService)
    with service:
        after = read_record(settings.log_path)
        assert after is not None
        assert after.pid != before.pid
        assert (after.address, after.roots, after.tls_name) == (before.address, before.roots, before.tls_name)
        command = psutil.Process(after.pid).cmdline()
        assert f"--set=segment_bytes={1 << 20}" in command
        assert "--streams=7" in command
        assert service.names() == ["p0"]
        service.shutdown()
