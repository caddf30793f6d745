"""The calls on any flow, on either host and under any manager: list, show, resume, pause and stop.

A flow is a resource ``pipeline:NAME``. The service's own calls control a pipeline of the service.
millrace.flows.control controls a stream or a pipeline of a file; a stream runs the code of its transform, so its caller
needs the role operate on the whole deployment.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from pydantic import BaseModel, Field

from millrace.access.grants import Caller, Role
from millrace.base.errors import InvalidArgument, PipelineBusy, PipelineNotFound, StreamNotFound
from millrace.base.settings import Settings
from millrace.flows.control import pause_stream, pause_workers, start_flow, stop_flow
from millrace.flows.declare.checks import check, require_runnable
from millrace.flows.declare.flow import Flow, letters_place
from millrace.flows.directory import SUFFIXES, NamedFlow, find_flow, flow_statuses, status_of
from millrace.flows.errors.letter import Letter, of_topic, stream_letters
from millrace.flows.errors.selection import Selection
from millrace.flows.range_host import observed
from millrace.flows.range_host.positions import positions_of, reset_windows
from millrace.flows.range_host.status import TaskStatus
from millrace.flows.spark_host import status as streams
from millrace.flows.spark_host.error_window import reset_window, window_of
from millrace.flows.spark_host.incarnations import Incarnations, position
from millrace.flows.status import FlowStatus, processes_of
from millrace.pipelines.api.rights import sees
from millrace.pipelines.store.records import Record
from millrace.pipelines.store.store import PipelineStore

Move = Literal["resume", "pause", "stop"]


class FlowView(FlowStatus):
    """A flow with its declaration, positions and tasks."""

    promise: str = Field(default="", description="its guarantee and how it is met; empty: its declaration is unknown")
    declaration: dict[str, Any] = Field(
        default_factory=dict, description="in the form of flows, without secrets and defaults; empty: unknown"
    )
    positions: dict[str, int] = Field(
        default_factory=dict, description="the next position of each lane: an offset, or a time tick"
    )
    tasks: tuple[TaskStatus, ...] = Field(default=(), description="the lanes of a flow on the range loop, with lag")


class FlowErrors(BaseModel):
    """Dead letters of a flow, newest first."""

    place: str = Field(description="the collection or topic with the letters; empty: the flow has none")
    letters: list[Letter]


class FlowRedriven(BaseModel):
    """The result of a redrive."""

    looked_at: int
    selected: int
    written: int
    failed_again: int
    queued: int = Field(description="records of its source, which it reads again in its next run")


class AnyFlow:
    """The calls on any flow."""

    _settings: Settings

    @property
    @abstractmethod
    def _store(self) -> PipelineStore: ...

    @abstractmethod
    def _pipeline(self, record: Record) -> Flow: ...

    @abstractmethod
    def seen_by(self, caller: Caller) -> list[Record]: ...

    @abstractmethod
    def managed_status(self, record: Record) -> FlowStatus: ...

    @abstractmethod
    def move_managed(self, caller: Caller, pipeline: str, move: Move) -> None: ...

    def flows(self, caller: Caller) -> list[FlowStatus]:
        """Return the flows that the caller may see, by name. Raises InvalidStream if a declaration cannot be read."""
        managed = {each.id: self.managed_status(each) for each in self.seen_by(caller)}
        others = flow_statuses(self._settings, without=managed.keys())
        found = [*managed.values(), *(each for each in others if sees(caller, each.name))]
        return sorted(found, key=lambda each: (each.name, each.host))

    def show_flow(self, caller: Caller, name: str) -> FlowView:
        """Return one flow. Raises PipelineNotFound, InvalidArgument if two have that name."""
        settings = self._settings
        record = self._managed(caller, name)
        flow = self._named(name) if record is None else NamedFlow(name, managed=True)
        status = status_of(settings, flow) if record is None else self.managed_status(record)
        if flow.stream is not None:
            incarnations = Incarnations(settings, name)
            return FlowView(
                **status.model_dump(),
                promise=flow.stream.promise,
                declaration=flow.stream.to_json(),
                positions=position(incarnations.checkpoint(incarnations.state)) or {},
            )
        declared = _declared(settings, flow) if record is None else self._pipeline(record)
        return FlowView(
            **status.model_dump(),
            promise="" if declared is None else declared.promise,
            declaration={} if declared is None else declared.to_json(),
            positions={task: each.position for task, each in positions_of(settings, name).items()},
            tasks=observed.observed(settings, name).tasks,
        )

    def move_flow(self, caller: Caller, name: str, move: Move) -> FlowView:
        """Resume, pause or stop a flow, and return it.

        Raises PermissionDenied, PipelineNotFound, PipelineBusy, and InvalidStream for a stream that cannot run.
        """
        if self._managed(caller, name) is not None:
            self.move_managed(caller, name, move)
            return self.show_flow(caller, name)
        flow = self._named(name)
        caller.principal.require_role((Role.OPERATE,), (), f"{move} {name}")
        if flow.stream is not None:
            self._move_stream(name, flow, move)
        else:
            self._move_own(name, flow, move)
        self._store.note(name, who=caller.principal.name, what=move)
        return self.show_flow(caller, name)

    def flow_errors(self, caller: Caller, name: str, selection: Selection, *, limit: int = 50) -> FlowErrors:
        """Return dead letters of a flow, with rows and records of its source.

        Raises PermissionDenied, PipelineNotFound, CollectionNotFound, LogUnavailable, ChannelNotFound.
        """
        from millrace.flows.errors.listing import error_page

        record = self._managed(caller, name)
        flow = NamedFlow(name, managed=True) if record is not None else self._named(name)
        if flow.stream is not None:
            caller.principal.require_role((Role.READ,), (), f"the dead letters of {name}")
            found = stream_letters(self._settings, flow.stream, selection, limit=limit)
            return FlowErrors(place=letters_place(flow.stream), letters=found)
        declared = self._pipeline(record) if record is not None else flow.declaration(self._settings)
        page = error_page(self._settings, declared, selection, limit=limit)
        return FlowErrors(place=page.topic, letters=of_topic(name, page.errors))

    def redrive_flow(self, caller: Caller, name: str, selection: Selection, *, dry_run: bool = False) -> FlowRedriven:
        """Send dead letters of a stopped stream again.

        Raises PermissionDenied, PipelineNotFound, StreamBusy while it runs, InvalidArgument for a flow of the range
        loop, and the errors of the sink.
        """
        from millrace.flows.spark_host.redrive import redrive

        flow = NamedFlow(name, managed=True) if self._managed(caller, name) is not None else self._named(name)
        if flow.stream is None:
            how = f"PUT /pipelines/{name}/redrive" if flow.managed else f"`millrace flows errors redrive {name}`"
            raise InvalidArgument(f"{name!r} runs in the range loop: use {how}")
        caller.principal.require_role((Role.OPERATE,), (), f"redrive {name}")
        found = redrive(self._settings, flow.stream, selection, dry_run=dry_run)
        self._store.note(
            name, who=caller.principal.name, what="redrive", selection=selection.to_json(), dry_run=dry_run
        )
        return FlowRedriven(**{each: getattr(found, each) for each in FlowRedriven.model_fields})

    def reset_flow_errors(self, caller: Caller, name: str) -> FlowView:
        """Reset the count of a flow's failed records (`errors.limit`).

        Raises PermissionDenied, PipelineNotFound.
        """
        managed = self._managed(caller, name) is not None
        flow = NamedFlow(name, managed=True) if managed else self._named(name)
        if not managed:
            caller.principal.require_role((Role.OPERATE,), (), f"reset the count of errors of {name}")
        if flow.stream is not None:
            reset_window(self._settings, flow.stream)
        else:
            reset_windows(self._settings, name)
        self._store.note(name, who=caller.principal.name, what="reset errors")
        return self.show_flow(caller, name)

    def _move_stream(self, name: str, flow: NamedFlow, move: Move) -> None:
        assert flow.stream is not None
        settings, job = self._settings, flow.stream.job
        if move == "stop":
            stop_flow(settings, streams.run_id(job))
            return
        pause_stream(settings, name, job, paused=move == "pause")
        if move == "resume":
            require_runnable(flow.stream, check(settings, flow.stream))
            Incarnations(settings, name).startable(flow.stream)
            window_of(settings, flow.stream).require_within()
            start_flow(settings, flow)

    def _move_own(self, name: str, flow: NamedFlow, move: Move) -> None:
        settings, run = self._settings, observed.run_id(name)
        said = observed.observed(settings, name)
        if said.pid and not processes_of(settings, run).active:
            raise PipelineBusy(f"process {said.pid} runs {name!r} in the foreground: end it there, by Ctrl-C")
        if move == "stop":
            stop_flow(settings, run)
            return
        pause_workers(settings, name, paused=move == "pause")
        if move == "resume":
            start_flow(settings, flow)

    def _named(self, name: str) -> NamedFlow:
        """Return a flow that the service does not manage. A name is never read as a file. Raises PipelineNotFound."""
        try:
            if not name.endswith(SUFFIXES):
                return find_flow(self._settings, name)
        except StreamNotFound:  # its message lists all flows
            pass
        raise PipelineNotFound(f"no flow {name[:100]!r}")

    def _managed(self, caller: Caller, name: str) -> Record | None:
        return next((each for each in self.seen_by(caller) if each.id == name), None)


def _declared(settings: Settings, flow: NamedFlow) -> Flow | None:
    try:
        return flow.declaration(settings, connections=False)
    except PipelineNotFound:
        return None
