"""A broker as a process: found where it was, started over its data, and gone with whoever started it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.server import RECORD_FILE, TEMPORARY, is_listening

DEADLINE = 60.0


@pytest.mark.slow
def test_a_broker_that_was_killed_starts_again_at_the_same_address_over_its_data(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path / "kafka", settings=Settings()).start() as broker:
        address, pid = broker.address, broker.pid
        temporary = tmp_path / "kafka" / TEMPORARY
        assert f"-Djava.io.tmpdir={temporary}" in psutil.Process(pid).cmdline()
        library = temporary / "libzstd-jni.so"
        library.write_bytes(b"what a killed server leaves")
        broker.kill()
        assert not psutil.pid_exists(pid)
        assert not is_listening(broker.port["client"])
        broker.start()
        assert (broker.address, broker.running()) == (address, True)
        assert json.loads((tmp_path / "kafka" / RECORD_FILE).read_text())["pid"] == broker.pid != pid
        assert not library.exists(), "nothing adds up"
    assert not is_listening(broker.port["client"])


@pytest.mark.slow
def test_in_the_foreground_it_says_its_url_and_dies_even_when_its_starter_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millrace.brokers", "kafka", "--data", str(tmp_path), "--sasl"]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        url = starter.stdout.readline().strip()
        server = psutil.Process(json.loads((tmp_path / RECORD_FILE).read_text())["pid"])
        assert url.startswith("kafka://127.0.0.1:")
        # Whoever has no password gets no answer; the password is its owner's alone.
        plain = AdminClient({"bootstrap.servers": url.split("/")[2], "log_level": 0})
        with pytest.raises(KafkaException):
            plain.list_topics(timeout=2)
        assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "server.properties").stat().st_mode) == 0o600
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait(timeout=DEADLINE)
    until = time.monotonic() + DEADLINE
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        os.sched_yield()
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_a_storage_that_cannot_be_made_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="storage cannot be formatted"):
        KafkaBroker(tmp_path, settings=Settings(), properties={"process.roles": "nothing"}).start()
