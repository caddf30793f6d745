"""What people decide about a flow lies in the meta store, so that each machine has it, and a lost one takes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from millrace.base.errors import MetaAmbiguous, TablesMoved
from millrace.base.settings import Settings
from millrace.base.settings.place import TablesPlace
from millrace.coord.machine.tables_place import change_place
from millrace.flows.range_host.crashes import RangeWatch, suspects_of
from millrace.flows.range_host.documents import SKIP, DocumentCopies, change_document, forget_documents
from millrace.flows.range_host.status import commands_path, flow_folder
from millrace.flows.range_host.supervision import Wanted, read_wanted, want
from millrace.meta.sql import SqlStore
from millrace.meta.store import Mutation, RevisionEquals

FLOW = "flights"


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "here", meta_store=f"sqlite:///{tmp_path}/meta.db")


@pytest.fixture
def there(here: Settings, tmp_path: Path) -> Settings:
    return replace(here, data_dir=tmp_path / "there")


def refresh(settings: Settings) -> None:
    with DocumentCopies(settings, FLOW) as copies:
        copies.refresh()


def test_a_pause_reaches_each_machine_and_outlives_the_one_on_which_it_was_asked_for(
    here: Settings, there: Settings
) -> None:
    want(here, FLOW, paused=True)
    with DocumentCopies(there, FLOW) as copies:
        copies.refresh()
        assert read_wanted(there, FLOW).paused
        shutil.rmtree(here.data_dir)
        want(there, FLOW, paused=False, restart="all")
        refresh(here)
        assert read_wanted(here, FLOW) == Wanted(False, "all", 1, 1)
        want(here, FLOW, restart="failed")
        copies.refresh()
    assert read_wanted(there, FLOW) == Wanted(False, "failed", 2, 1)


def test_a_machine_on_which_nothing_else_runs_hears_that_the_tables_moved(here: Settings, there: Settings) -> None:
    change_place(here, lambda place: TablesPlace("s3://box/new", ("",)))
    there.check_place()
    refresh(there)
    with pytest.raises(TablesMoved):
        there.check_place()


def test_where_a_worker_ended_is_known_to_the_next_machine_until_a_lane_has_passed_it(
    here: Settings, there: Settings
) -> None:
    lane = "flights~%/1-0"
    with RangeWatch(here, FLOW, lane) as watch:
        watch.enter(40, 48, 8)
        watch._map[24:32] = b"\1" + bytes(7)  # a process that is none
    with RangeWatch(here, FLOW, lane) as watch:
        found = watch.suspect
    assert found is not None
    assert (found.start, found.end) == (40, 48)
    shutil.rmtree(here.data_dir)
    refresh(there)
    assert suspects_of(there, FLOW) == {lane: found}
    with RangeWatch(there, FLOW, lane) as watch:
        assert watch.suspect == found
        watch.passed(48)
    refresh(here)
    assert suspects_of(there, FLOW) == suspects_of(here, FLOW) == {}


def test_the_files_of_an_earlier_build_are_taken_over_once(here: Settings, there: Settings) -> None:
    old = replace(here, meta_store="")
    want(old, FLOW, paused=True)
    assert json.loads(commands_path(old, FLOW).read_bytes())["paused"]
    refresh(here)
    refresh(there)
    assert read_wanted(there, FLOW).paused
    forget_documents(there, FLOW)
    shutil.rmtree(flow_folder(there, FLOW))
    refresh(here)
    assert not read_wanted(here, FLOW).paused, "the flow was removed: what this machine has is a copy"
    refresh(there)
    assert not read_wanted(there, FLOW).paused


@pytest.mark.parametrize("done", [True, False])
@examples(deadline=None, max_examples=4)
@given(lost=st.lists(st.booleans(), min_size=1, max_size=8))
def test_no_change_is_lost_or_done_twice_when_answers_are_lost(
    done: bool, lost: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    settings = Settings(data_dir=folder / "here", meta_store=f"sqlite:///{folder}/meta.db")
    losses, commit = list(lost), SqlStore.commit

    def unsure(store: SqlStore, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        if losses and losses.pop():
            if done:
                commit(store, then, when=when)
            raise MetaAmbiguous("the answer was lost")
        return commit(store, then, when=when)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqlStore, "commit", unsure)
        for number in range(3):
            change_document(
                settings, FLOW, SKIP, lambda body, n=number: json.dumps([*json.loads(body or b"[]"), n]).encode()
            )
    refresh(settings)
    assert json.loads((flow_folder(settings, FLOW) / SKIP).read_bytes()) == [0, 1, 2]
