"""The command group `flows`, its arguments, and which flow they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import InvalidArgument, PipelineBusy, StreamNotFound
from millrace.base.extras import require_extras
from millrace.commands.parts.command_line import OPERATE_PANEL, CommandGroup, ReportingGroup, command_group

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.flows.declare.flow import Flow
    from millrace.flows.directory import NamedFlow

app = command_group(
    "flows", OPERATE_PANEL, "Flows, from a source through a transform to a sink: streams on Spark, and pipelines."
)
errors = CommandGroup(help="Dead letters of flows.", cls=ReportingGroup, no_args_is_help=True)
app.add_typer(errors, name="errors")
offsets = CommandGroup(help="Positions of flows.", cls=ReportingGroup, no_args_is_help=True)
app.add_typer(offsets, name="offsets")

Name = Annotated[
    str,
    typer.Argument(
        metavar="FLOW", help="A declared flow, a pipeline that has run here, or the YAML or JSON file of a pipeline."
    ),
]
AnyName = Annotated[
    str | None, typer.Argument(metavar="[FLOW]", help="A flow, or the file of a pipeline. Default: all.")
]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="Name of a declared flow on Spark.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The declaration, YAML or JSON; ${env:NAME} for secrets.")]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A pipeline-config.yaml with the defaults.")
]


def stopped_flow(settings: Settings, flow: NamedFlow, command: str = "offsets") -> Flow:
    """Return the pipeline, which no worker runs. Raises PipelineBusy."""
    from millrace.flows.directory import status_of
    from millrace.flows.range_host.offsets import require_no_members
    from millrace.flows.status import FlowState

    flow.require_own(command)
    if (state := status_of(settings, flow).state) not in (FlowState.NEW, FlowState.STOPPED, FlowState.FAILED):
        raise PipelineBusy(f"{flow.name!r} is {state}: stop it first, since it uses what this changes")
    declared = flow.declaration(settings)
    require_no_members(settings, declared)
    return declared


def found_flow(settings: Settings, name: str, config: Path | None = None) -> NamedFlow:
    from millrace.flows.directory import SUFFIXES, find_flow

    if name.endswith(SUFFIXES):
        require_extras("pipelines")
    return find_flow(settings, name, config=config)


def name_anywhere(settings: Settings, name: str) -> str:
    """Return the name of the flow that `name` names; with a meta store, one may be known to another machine alone."""
    try:
        return found_flow(settings, name).name
    except StreamNotFound:
        if not settings.meta_store:
            raise
        return name


def streams_of(settings: Settings, name: str) -> list[Flow]:
    """Return the streams of the job `name`: one, or those of a group. Empty if no stream has that name or group."""
    from millrace.flows.declare.discovery import declared_flows
    from millrace.flows.directory import SUFFIXES

    if name.endswith(SUFFIXES):
        return []
    known = declared_flows(settings, host="spark")
    return [each for each in known.values() if each.job == name] or [each for each in (known.get(name),) if each]


def stream_named(settings: Settings, name: str, command: str) -> Flow:
    flow = found_flow(settings, name)
    if flow.stream is None:
        raise InvalidArgument(f"{name!r} is a pipeline, and `{command}` is for streams")
    return flow.stream


def pipeline_named(settings: Settings, name: str, config: Path | None, command: str) -> Flow:
    flow = found_flow(settings, name, config)
    if flow.stream is not None:
        raise InvalidArgument(f"{name!r} is a stream, and `{command}` is for pipelines")
    return flow.declaration(settings)
