"""The service killed before and behind the effect of each step of making and deleting a pipeline.

The next one brings it to its end, and what was there before stays.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.flows.range_host.status import declaration_path
from millrace.pipelines.deploy.saga import STEPS
from millrace.pipelines.store.records import Phase
from millrace.pipelines.store.store import open_pipelines

MAKING = [f"saga.{what}.{step}{behind}" for step in STEPS for what in ("plan", "make") for behind in ("", ".done")]
UNMAKING = [f"saga.undo.{step}{behind}" for step in STEPS for behind in ("", ".done")]
ALWAYS = {"saga.make.topics.done", "saga.undo.index_base"}
"""Those that every run of the tests takes; the others are the slow tests'."""


class Service:
    """Its calls, each in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.crash.saga_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def do(self, data: Path, what: str, *, failpoint: str = "") -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(data), what, failpoint]) + "\n")
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def _points(points: list[str]) -> list[object]:
    return [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.slow) for each in points]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    things = tmp_path / "things"
    things.mkdir()
    (things / "before").touch()
    (tmp_path / "data").mkdir(mode=0o700)
    return tmp_path / "data"


def _things(data: Path) -> set[str]:
    return {path.name for path in (data.parent / "things").iterdir()}


@pytest.mark.parametrize("point", _points(MAKING))
def test_a_pipeline_that_was_being_made_is_there_in_the_end(service: Service, data: Path, point: str) -> None:
    assert service.do(data, "create", failpoint=point) == -signal.SIGKILL
    assert service.do(data, "tend") == 0
    assert _things(data) == {"before", "in", "index", "flights.errors"}
    with open_pipelines(Settings(data_dir=data), env={}) as store:
        assert store.get("flights").phase is Phase.READY
        assert [each.what for each in store.events("flights")] == ["created", "create"]
    assert declaration_path(Settings(data_dir=data), "flights").exists()
    assert service.do(data, "delete") == 0
    assert _things(data) == {"before"}


@pytest.mark.slow
@pytest.mark.parametrize("point", _points(UNMAKING))
def test_a_pipeline_that_was_being_deleted_is_gone_in_the_end(service: Service, data: Path, point: str) -> None:
    assert service.do(data, "create") == 0
    assert service.do(data, "delete", failpoint=point) == -signal.SIGKILL
    assert service.do(data, "tend") == 0
    assert _things(data) == {"before"}
    with open_pipelines(Settings(data_dir=data), env={}) as store:
        assert store.all() == []
        assert [each.what for each in store.events("flights")] == ["deleted", "delete", "created", "create"]
    assert not declaration_path(Settings(data_dir=data), "flights").parent.exists()
    assert service.do(data, "create") == 0, "its id is free"
