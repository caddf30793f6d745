"""versitygw: an S3 on this host, whose keys are its own."""

from __future__ import annotations

import stat
from pathlib import Path

import psutil
import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers import programs
from millrace.brokers.versitygw import KEYS_FILE, VersityGateway, install_versitygw
from millrace.storage.store import store_at, tagged
from tests.storage.test_objects import write_object

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first test of a machine builds it


def test_objects_survive_its_kill_and_nobody_gets_in_without_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VersityGateway(tmp_path / "s3", settings=Settings.load()).start() as server:
        for name, value in server.client_environment.items():
            monkeypatch.setenv(name, value)
        secret = server.client_environment["AWS_SECRET_ACCESS_KEY"]
        assert not any(secret in part for part in psutil.Process(server.pid).cmdline())
        for name in (KEYS_FILE, "secret"):
            assert stat.S_IMODE((tmp_path / "s3" / name).stat().st_mode) == 0o600
        store = store_at(f"{server.url}/t")
        write_object(store, "a/x", b"12")
        assert store.put_if_absent("a/y", b"1")
        assert not store.put_if_absent("a/y", b"2")
        first = tagged(store).put_new("a/z", b"1")
        assert first is not None
        assert tagged(store).replace_tagged("a/z", b"2", first) is not None
        assert tagged(store).replace_tagged("a/z", b"3", first) is None
        server.kill()
        server.start()
        assert (store.read("a/x"), store.read("a/y")) == (b"12", b"1")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        for call in (lambda at: at.read("a"), lambda at: at.list("")):
            with pytest.raises(InvalidSettings, match="check the credentials"):
                call(store_at(f"{server.url}/u"))


def test_without_go_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    with pytest.raises(InvalidSettings, match="apt-get install golang"):
        install_versitygw(Settings(cache_dir=tmp_path))
