"""Settings that name a database for the first time.

The pipelines of the data folder go along, once, and nobody goes by the file any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings, MetaUnavailable, PipelineExists
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.pipelines.store.records import PipelineRole, Quota
from millrace.pipelines.store.store import PipelineStore, open_pipelines
from tests.pipelines.store.conftest import declared, in_mariadb

OPEN = """
from millrace.base.settings import Settings
from millrace.pipelines.store.store import open_pipelines
open_pipelines(Settings.load()).close()
"""


@pytest.fixture(params=["sqlite", pytest.param("mariadb", marks=pytest.mark.slow)])
def named(request: pytest.FixtureRequest, settings: Settings, tmp_path: Path) -> tuple[Settings, dict[str, str]]:
    """The same deployment with a database named, and its login."""
    if request.param == "mariadb":
        return in_mariadb(settings)
    return replace(settings, meta_store=f"sqlite:///{tmp_path / 'meta.db'}"), {}


@pytest.fixture
def old(settings: Settings) -> Iterator[PipelineStore]:
    """The data folder's own, with two pipelines."""
    with open_pipelines(settings) as store:
        for name in ("flights", "weather"):
            store.create(declared(name), secrets={"sink.password": f"{name}'s"}, who="ada", saga={"at": 0})
        store.set_role("flights", "bob", PipelineRole.VIEWER, who="ada")
        store.set_quota(Quota("ops", 3, 4.0, 512), who="ada")
        yield store


def everything(store: PipelineStore) -> object:
    return (
        store.all(),
        [store.secrets(each) for each in ("flights", "weather")],
        store.roles("flights"),
        store.quotas(),
        [(each.pipeline, each.at, each.who, each.what, each.detail) for each in store.events(None)],
    )


def test_all_of_it_goes_along_once_and_who_has_the_old_settings_is_refused(
    old: PipelineStore, settings: Settings, named: tuple[Settings, dict[str, str]]
) -> None:
    before = everything(old)
    with ExitStack() as stack:
        new = stack.enter_context(open_pipelines(named[0], env=named[1]))
        assert everything(new) == before
        new.move(new.get("weather"), phase=new.get("weather").phase, saga={"at": 1})
        assert stack.enter_context(open_pipelines(named[0], env=named[1])).get("weather").saga == {"at": 1}
    with pytest.raises(MetaUnavailable):  # a process that had it open
        old.create(declared("late"), secrets={}, who="ada", saga={})
    with pytest.raises(InvalidSettings, match="MILLRACE_META_STORE"):
        open_pipelines(settings)


def test_a_namesake_in_the_database_is_refused_and_nothing_has_moved(
    old: PipelineStore, settings: Settings, named: tuple[Settings, dict[str, str]], tmp_path: Path
) -> None:
    another = replace(named[0], data_dir=tmp_path / "another")
    with open_pipelines(another, env=named[1]) as store:
        store.create(declared("weather"), secrets={}, who="eve", saga={})
        theirs = store.all()
    before = everything(old)
    with pytest.raises(PipelineExists, match="weather"):
        open_pipelines(named[0], env=named[1])
    assert everything(old) == before
    with open_pipelines(another, env=named[1]) as store:
        assert store.all() == theirs


def test_a_process_that_is_killed_between_the_two_places_leaves_each_pipeline_once(
    old: PipelineStore, settings: Settings, named: tuple[Settings, dict[str, str]]
) -> None:
    before = everything(old)
    environment = os.environ | named[0].environment() | named[1] | {VARIABLE: "pipelines.taken"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", OPEN], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    with open_pipelines(named[0], env=named[1]) as store:
        assert everything(store) == before
    with pytest.raises(InvalidSettings):
        open_pipelines(settings)
