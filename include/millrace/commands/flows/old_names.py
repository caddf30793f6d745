"""``millrace streams`` and ``millrace pipelines``: the commands of `millrace flows` by their names of earlier builds.

They are hidden, and go with the next release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from millrace.base.extras import require_extras
from millrace.commands.flows import letters, overview, positions, running, service
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    JsonContext,
    command_group,
    iso_time,
    print_facts,
    print_rows,
)

streams = command_group("streams", OPERATE_PANEL, "Old name of `millrace flows`.", hidden=True)
pipelines = command_group(
    "pipelines", OPERATE_PANEL, "Old name of `millrace flows` and `millrace flows service`.", hidden=True
)
_COLUMNS: Final = ("name", "source", "sink", "guarantee", "job", "state", "rows", "lag_seconds")
_MEASURED: Final = (
    "name", "state", "rows_per_second", "lag_seconds", "watermark", "rows", "out", "late", "rejected", "state_rows",
)  # fmt: skip


@streams.callback()
def _of_streams() -> None:
    typer.echo("`millrace streams` is now `millrace flows`; the old name goes with the next release.", err=True)


@pipelines.callback()
def _of_pipelines() -> None:
    typer.echo(
        "`millrace pipelines` is now `millrace flows`, and `millrace flows service` for a pipeline service; the old"
        " name goes with the next release.",
        err=True,
    )
    require_extras("pipelines")


@streams.command("list")
def list_streams(context: JsonContext) -> None:
    """List the declared streams: `millrace flows list`, with the fields of earlier builds.

    Example: `millrace streams list`
    """
    from millrace.flows.spark_host.status import StreamStatus, flow_statuses

    rows = [StreamStatus.of(each).to_json() for each in flow_statuses(context.settings)]
    print_rows(rows, columns=_COLUMNS, as_json=context.as_json, empty="No streams are declared.")


@streams.command("status")
def show_status(context: JsonContext, name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None) -> None:
    """Show the status of declared streams: `millrace flows status`, with the fields of earlier builds.

    Example: `millrace streams status`
    """
    from millrace.flows.declare.discovery import declared_flow
    from millrace.flows.spark_host.status import StreamStatus, flow_statuses, status

    if name is None:
        rows = [StreamStatus.of(each).to_json() for each in flow_statuses(context.settings)]
        print_rows(rows, columns=_MEASURED, as_json=context.as_json, empty="No streams are declared.")
        return
    facts = status(context.settings, declared_flow(context.settings, name, host="spark")).to_json()
    moment = {"at": None if facts["at"] is None else iso_time(round(facts["at"] * 1e3))}
    print_facts(facts if context.as_json else facts | moment, as_json=context.as_json)


_STREAMS: dict[str, Callable[..., None]] = {
    "validate": overview.check,
    "explain": overview.explain,
    "run": running.run,
    "batch": running.batch,
    "start": running.start,
    "stop": running.stop,
    "pause": running.pause,
    "resume": running.resume,
    "replay": positions.replay,
    "upgrade": positions.upgrade,
    "letters": letters.create_letters,
    "redrive": letters.redrive_errors,
}
for _name, _command in _STREAMS.items():
    streams.command(_name)(_command)
_PIPELINES: dict[str, Callable[..., None]] = {
    "run": running.run,
    "check": overview.check,
    "kinds": overview.kinds,
    "show": overview.show,
    "redrive": letters.redrive_errors,
}
for _name, _command in _PIPELINES.items():
    pipelines.command(_name)(_command)
for _each in service.app.registered_commands:
    assert _each.callback is not None
    pipelines.command(_each.name)(_each.callback)
