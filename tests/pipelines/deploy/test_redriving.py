"""A redrive as a run of its own.

Begun once, seen from anywhere, tried again where its brokers are silent, ended by who asked; by real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidArgument, PipelineBusy
from millrace.base.settings import Settings
from millrace.flows.errors.selection import EVERYTHING, Selection
from millrace.flows.errors.topic import headers_of
from millrace.flows.records import Failure, Record
from millrace.pipelines.declaration import pipeline_of
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.redriving import FIRST_PAUSE, MAX_TRIES, Redrives, RedriveState, run_id
from millrace.runtime.launch.launcher import Launcher

SILENT = {
    "id": "flights",
    "source": {"kind": "kafka", "bootstrap": ["127.0.0.1:9"], "topics": ["in"], "socket_timeout_ms": 10},
    "sink": {"kind": "delta", "table": "flights", "tombstones": "ignore"},
}


def _ended(redrives: Redrives, state: RedriveState) -> Any:
    assert poll_until(lambda: redrives.status("flights").state is state, Deadline.after(60), interval=0.1), (
        redrives.status("flights")
    )
    return redrives.status("flights")


@pytest.mark.slow
def test_one_whose_brokers_are_silent_goes_on_later_and_can_be_cancelled(settings: Settings) -> None:
    settings.data_dir.mkdir(mode=0o700)
    Deployment(settings).write(pipeline_of(SILENT))
    now = [0.0]
    redrives = Redrives(settings, clock=lambda: now[0])
    assert redrives.status("flights").state is RedriveState.NONE
    assert redrives.cancel("flights").state is RedriveState.NONE
    chosen = Selection(kind="CAST").to_json()
    begun = redrives.start("flights", who="ada", selection=chosen, again=False, dry_run=False)
    with pytest.raises(PipelineBusy, match="asked for by ada"):
        redrives.start("flights", who="bob", selection=chosen, again=True, dry_run=False)
    told = _ended(redrives, RedriveState.WAITING)
    assert (told.id, told.asked_by, told.code, told.tries) == (begun.id, "ada", "LOG_UNAVAILABLE", 1)
    assert told.retry_at == pytest.approx(told.ended_at + FIRST_PAUSE)
    redrives.tend("flights")
    assert redrives.status("flights").tries == 1, "not yet"
    now[0] = told.retry_at
    redrives.tend("flights")
    assert poll_until(lambda: redrives.status("flights").tries == 2, Deadline.after(60), interval=0.1)
    assert _ended(redrives, RedriveState.WAITING).selection == chosen
    assert redrives.cancel("flights").state is RedriveState.CANCELLED
    redrives.tend("flights")
    assert redrives.status("flights").state is RedriveState.CANCELLED


@pytest.mark.slow
def test_one_that_comes_to_nothing_again_and_again_has_failed(settings: Settings) -> None:
    settings.data_dir.mkdir(mode=0o700)
    Deployment(settings).write(pipeline_of(SILENT))
    redrives = Redrives(settings, clock=lambda: 1e12)
    asked = {"id": "1", "who": "ada", "at": 0.0, "selection": {}, "again": False, "dry_run": False}
    redrives._start("flights", {**asked, "tries": MAX_TRIES, "behind": None})
    told = _ended(redrives, RedriveState.FAILED)
    assert (told.tries, told.retry_at) == (MAX_TRIES + 1, None)
    redrives.tend("flights")
    assert Launcher(settings).poll(run_id("flights")).attempt == 1


def _failed(offset: int, *, step: str = "number", kind: str = "CAST", reason: str = "12a is no int") -> Record:
    origin = Record("in", 0, offset, b"k", b"{}", 0)
    told = headers_of(Failure(origin, "TRANSFORMATION", step, kind, reason), flow="flights", task="in-0")
    return Record("flights.errors", 0, offset + 10, b"k", b"{}", 0, list(told.items()))


@pytest.mark.parametrize(
    ("chosen", "bounds", "taken"),
    [
        (EVERYTHING, (0, 1 << 62), True),
        (Selection(step="number", kind="CAST", reason="NO INT"), (0, 1 << 62), True),
        (Selection(step="other"), (0, 1 << 62), False),
        (Selection(kind="NO_JSON"), (0, 1 << 62), False),
        (Selection(reason="timestamp"), (0, 1 << 62), False),
        (Selection(first="0-12", last="0-17"), (12, 18), True),
        (Selection(first="1-12"), None, None),
        (Selection(ids=("0-17", "1-3", "0-90")), (17, 91), True),
        (Selection(ids=("0-16", "0-18")), (16, 19), False),
        (Selection(ids=("1-17",)), None, None),
        (Selection(first="0-20", ids=("0-17",)), None, None),
    ],
)
def test_a_selection_is_by_reason_by_range_and_by_place(
    chosen: Selection, bounds: tuple[int, int] | None, taken: bool | None
) -> None:
    assert chosen.bounds(0) == bounds
    if taken is not None:
        assert chosen.takes(_failed(7)) is taken
    assert Selection.from_json(chosen.to_json()) == chosen
    assert chosen.whole is (chosen is EVERYTHING)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Selection(first="0"),
        lambda: Selection(ids=("0-17", "x")),
        lambda: Selection(first="0-1", last="1-2"),
        lambda: Selection(ids=("0-1",) * 1001),
        lambda: Selection(last="\u0660-1"),
    ],
)
def test_what_is_no_place_or_no_range_is_said(made: Callable[[], Selection]) -> None:
    with pytest.raises(InvalidArgument):
        made()
