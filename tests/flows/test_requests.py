"""Commands ask the workers of a flow, on whichever machine they run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import CaptureLost, DeadlineExceeded, FlowNotRunning, InvalidArgument
from millrace.base.settings import Settings
from millrace.flows import requests
from millrace.flows.hold import process_store
from millrace.flows.range_host.answers import asked_status, asked_statuses, handlers_of
from millrace.flows.range_host.observed import note_flow
from millrace.flows.range_host.status import PipelineStatus, State, TaskStatus, status_path
from millrace.flows.requests import ANSWERS, REQUESTS, Handler, Requests, ask, running_flows
from millrace.flows.sources.capture import ticks as ticks_module
from millrace.flows.sources.capture.feeder import SNAPSHOT, ask_for_snapshot
from millrace.flows.sources.capture.shared_spool import shared_spool
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.flows.sources.capture.ticks import recorded_ticks, spool_folder, tick_of
from millrace.flows.sources.division import LeasedMember, instance_name
from millrace.flows.status import FlowState
from millrace.pipelines.declaration import pipeline_of
from tests.flows.sources.capture.test_spool import line

GROUP = "millrace-shop"


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path / "here",
        tables=str(tmp_path / "tables"),
        meta_store=f"sqlite:///{tmp_path}/meta.db",
        session_seconds=2.0,
    )


@pytest.fixture
def there(here: Settings, tmp_path: Path) -> Settings:
    """Another machine, whose data folder is empty."""
    return replace(here, data_dir=tmp_path / "there")


@contextmanager
def working(settings: Settings, handlers: dict[str, Handler] | Any, flow: str = "shop") -> Iterator[None]:
    """A worker that has the lease of the flow, and answers."""
    name, ended = instance_name(settings, 0), threading.Event()
    member = LeasedMember.of_flow(settings, flow, name, alone=True)
    member.follow([])
    member.wait_joined(10.0)
    side = Requests(settings, flow, name, handlers)

    def work() -> None:
        while not ended.wait(0.02):
            member.poll()
            side.answer()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        member.close()


def test_a_worker_of_another_machine_answers_and_nothing_of_it_stays(here: Settings, there: Settings) -> None:
    with working(there, {"double": lambda given: 2 * given["number"]}):
        assert running_flows(here) == {"shop": (instance_name(there, 0),)}
        assert list(ask(here, "shop", "double", {"number": 21}).values()) == [42]
        assert list(ask(here, "shop", "double", {"number": 4}).values()) == [8]
    store = process_store(here.meta_store)
    assert not store.list(REQUESTS).entries
    assert not store.list(ANSWERS).entries
    assert running_flows(here) == {}


def test_what_fails_at_the_worker_fails_with_the_same_error_here(here: Settings, there: Settings) -> None:
    def lost(_: Any) -> Any:
        raise CaptureLost("the slot is gone")

    with working(there, {"lost": lost, "odd": lambda _: {}["a"], "long": lambda _: "x" * requests.MAX_ANSWER}):
        with pytest.raises(CaptureLost, match="the slot is gone"):
            ask(here, "shop", "lost", {})
        with pytest.raises(InvalidArgument, match="cannot answer 'unknown'"):
            ask(here, "shop", "unknown", {})
        with pytest.raises(InvalidArgument, match=r"could not be answered \(KeyError\)"):
            ask(here, "shop", "odd", {})
        with pytest.raises(InvalidArgument, match="larger than 256 KiB"):
            ask(here, "shop", "long", {})


def test_a_flow_that_nobody_runs_or_that_is_silent_is_a_typed_error_within_the_deadline(
    here: Settings, there: Settings
) -> None:
    with pytest.raises(FlowNotRunning, match="no machine runs 'shop': start it"):
        ask(here, "shop", "status", {})
    with pytest.raises(FlowNotRunning, match="no meta store"):
        ask(replace(here, meta_store=""), "shop", "status", {})
    silent = threading.Event()
    with working(there, {"status": lambda _: silent.wait(60)}):
        begun = time.monotonic()
        try:
            with pytest.raises(DeadlineExceeded, match="has the lease of 'shop' and did not answer within 0 s"):
                ask(here, "shop", "status", {}, seconds=0.3)
            assert time.monotonic() - begun < 30
        finally:
            silent.set()
    assert not process_store(here.meta_store).list(ANSWERS).entries, "an answer that comes too late is not stored"


def test_a_worker_answers_a_bounded_number_of_requests_in_one_look(here: Settings) -> None:
    store = process_store(here.meta_store)
    from millrace.meta.store import Put

    lease, answered = store.grant(60.0), list[int]()
    for number in range(requests.AT_ONCE + 5):
        body = json.dumps({"what": "note", "arguments": {"number": number}}).encode()
        store.commit([Put(f"{REQUESTS}shop/{number:032}", body, lease)])
    side = Requests(here, "shop", "w", {"note": lambda given: answered.append(given["number"])})
    side.answer()
    assert len(answered) == requests.AT_ONCE
    side.answer()
    side.answer()
    assert answered == list(range(requests.AT_ONCE + 5)), "each once"
    store.revoke(lease)
    side.answer()
    assert not side._answered, "it remembers none that is gone"


# --- what workers answer ---------------------------------------------------------------------------------------------


def spool(settings: Settings, *, write: bool = True) -> Spool:
    return Spool(spool_folder(settings, GROUP), write=write, shared=shared_spool(settings, GROUP) if write else None)


def shop() -> Any:
    source = {"kind": "mariadb", "host": "db", "user": "u", "password": "secret", "database": "d", "tables": ["t"]}
    return pipeline_of(
        {
            "id": "shop",
            "source": source,
            "sink": {"kind": "collection", "collection": "c"},
            "errors": {"collection": "e"},
        }
    )


def test_ticks_and_snapshots_of_a_capture_are_had_on_any_machine(
    here: Settings, there: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks_module, "PAGE", 3)
    with pytest.raises(InvalidArgument, match="'shop' has captured no database"):
        recorded_ticks(here, "shop")
    with pytest.raises(InvalidArgument, match="nothing was captured"):
        ask_for_snapshot(here, "shop", GROUP)
    feeding = spool(there)
    feeding.begin_epoch()
    feeding.append([line(0)], [Mark(1, "0-1-1", 7)], partition={}, offset={}, complete=True)
    for tick in range(10):
        feeding.record(100 + tick, Mark(tick, f"0-1-{tick}", 7))
    with working(there, handlers_of(there, shop(), 0)):
        assert [each.tick for each in recorded_ticks(here, "shop")] == list(range(100, 110))
        assert [each.tick for each in recorded_ticks(here, "shop", limit=4)] == [106, 107, 108, 109]
        assert tick_of(here, "shop", "0-1-7").tick == 107
        ask_for_snapshot(here, "shop", GROUP)
    assert feeding.fact(SNAPSHOT)
    feeding.note(**{SNAPSHOT: False})
    feeding.close()
    assert not spool_folder(here, GROUP).exists()
    # Nobody runs it: what the machines share has the ticks, and takes the note for the next worker.
    assert [each.tick for each in recorded_ticks(here, "shop", limit=2)] == [108, 109]
    ask_for_snapshot(here, "shop", GROUP)
    again = spool(there)
    assert again.fact(SNAPSHOT)
    again.close()


def test_the_status_of_a_flow_of_another_machine_is_that_of_its_worker(here: Settings, there: Settings) -> None:
    flow = shop()
    note_flow(there, flow)
    task = TaskStatus(task="t-0", state=State.RUNNING, position=7, end=9, lag=2, records_in=7)
    said = PipelineStatus(pipeline="shop", state=State.RUNNING, at=time.time(), pid=1, tasks=(task,))
    path = status_path(there, "shop", 0)
    path.write_text(said.model_dump_json(), encoding="utf-8")
    with working(there, handlers_of(there, flow, 0)):
        status, told = asked_status(here, "shop")
        assert asked_statuses(here, ["shop", "none"]) == {"shop": status}
    assert (status.state, status.rows_in, status.lag_records, status.workers) == (FlowState.RUNNING, 7, 2, 1)
    assert status.source.startswith("mariadb:")
    assert told.tasks == (task,)
    assert "secret" not in status.model_dump_json() + told.model_dump_json()
