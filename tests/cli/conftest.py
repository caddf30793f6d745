"""One log server for all tests of a module, where they may share it, or one of a test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.rpc.remote_log import RemoteLogService
from tests.cli.deployment import Deployment


def _stop(settings: Settings) -> None:
    try:
        with RemoteLogService.connect(settings.log_path, start=False) as service:
            service.shutdown()
    except LogUnavailable:
        pass  # the test stopped it, or none was ever needed


@pytest.fixture(autouse=True)
def no_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that would replace its process fails: it would replace the test process.

    A test that expects it patches `os` itself.
    """

    def refused(*arguments: Any) -> None:
        raise AssertionError(f"the command would replace the test process by {arguments[1]}")

    for name in ("execv", "execve"):
        monkeypatch.setattr(os, name, refused)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """An empty data folder; the server starts with the first command that needs it and is stopped behind the test."""
    settings = Settings(data_dir=tmp_path / "data")
    yield Deployment(settings)
    _stop(settings)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One running deployment for the tests of a module, each with collections of its own."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("shared") / "data")
    AppendClient.connect(settings.data_dir).close()
    yield Deployment(settings)
    _stop(settings)
