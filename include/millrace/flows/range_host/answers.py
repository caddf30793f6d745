"""A running worker's answers to commands of other machines (millrace.flows.requests)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from millrace.base.errors import DeadlineExceeded, FlowNotRunning
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.observed import flow_status, read_flow
from millrace.flows.range_host.status import PipelineStatus
from millrace.flows.range_host.supervision import merged, read_worker_status
from millrace.flows.requests import Handler, ask
from millrace.flows.sources.capture.feeder import note_snapshot
from millrace.flows.sources.capture.ticks import answer_ticks, spool_folder
from millrace.flows.status import FlowStatus

STATUS_SECONDS: Final = 4.0
"""Deadline of a status of another machine, whose workers read requests once a second."""
_AT_ONCE: Final = 8


def handlers_of(settings: Settings, flow: Flow, worker: int) -> Mapping[str, Handler]:
    """Return the handlers of a worker of `flow`, by request."""

    def status(_: Mapping[str, Any]) -> Any:
        said = read_worker_status(settings, flow.name, worker)
        return {"said": said.model_dump(mode="json"), "noted": read_flow(settings, flow.name)}

    def ticks(arguments: Mapping[str, Any]) -> Any:
        return answer_ticks(settings, flow.consumer_group, arguments)

    def snapshot(_: Mapping[str, Any]) -> Any:
        note_snapshot(spool_folder(settings, flow.consumer_group))
        return True

    return {"status": status, "ticks": ticks, "snapshot": snapshot}


def asked_status(settings: Settings, flow: str) -> tuple[FlowStatus, PipelineStatus]:
    """Return the status of a flow that runs on other machines, in the form for all hosts and with its tasks.

    Raises FlowNotRunning, DeadlineExceeded, MetaUnavailable.
    """
    answers = ask(settings, flow, "status", {}, seconds=STATUS_SECONDS).values()
    statuses = [PipelineStatus.model_validate(each["said"]) for each in answers]
    # The process is on another machine: its number here is that of an unrelated one.
    status = merged(statuses).model_copy(update={"pid": 0})
    noted = next(iter(answers))["noted"]
    return flow_status(settings, flow, status, noted=noted).model_copy(update={"workers": len(statuses)}), status


def asked_statuses(settings: Settings, flows: list[str]) -> dict[str, FlowStatus]:
    """Return the status of each of `flows` that answers. Raises MetaUnavailable."""

    def one(flow: str) -> FlowStatus | None:
        with suppress(FlowNotRunning, DeadlineExceeded):
            return asked_status(settings, flow)[0]
        return None

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="status") as pool:
        found = dict(zip(flows, pool.map(one, flows), strict=True))
    return {flow: each for flow, each in found.items() if each is not None}
