"""``millrace status``: the health of the deployment and the progress of log, WAL and tables. Starts nothing.

It prints what :class:`millrace.observe.observer.Observer` reports, as the pages and the API do.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import typer

from millrace.commands.parts.command_line import (
    INSPECT_PANEL,
    JsonContext,
    iso_time,
    print_json,
    print_rows,
    root,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millrace.base.settings import Settings
    from millrace.observe.broadcasts import BroadcastRow
    from millrace.observe.models import JobView, PChannelView

_COLUMNS = ("pchannel", "term", "log_end", "wal_position", "wal_time", "flushed_time", "lag_seconds", "parked")
_MAX_PCHANNELS: Final = 20
"""PChannels that are shown: those that are parked or lag most."""
_MAX_ABANDONED: Final = 5
"""Abandoned DDL broadcasts that are shown, the newest."""


@root.command(rich_help_panel=INSPECT_PANEL)
def status(context: JsonContext) -> None:
    """Show the health of the log server and jobs, any problems, and the progress of each PChannel.

    The lag is the age of the oldest log entry that is not yet in the WAL.

    Example: `millrace status`
    """
    settings = context.settings
    found = deployment_status(settings)
    if context.as_json:
        print_json(found)
        return
    typer.echo(f"Data folder    {settings.data_dir}")
    typer.echo(f"Log server     {_process(found['log_server'], 'not running; it starts when it is needed')}")
    typer.echo(f"Streaming job  {_process(found['streaming_job'], 'not running; `millrace jobs run --with-flusher`')}")
    typer.echo(f"Collections    {found['collections']:,}")
    typer.echo(f"Health         {found['health']['state']}: {found['health']['words']}")
    for each in found["health"]["findings"]:
        typer.echo(f"  {each['severity']}: {each['subject']}: {each['words']} ({each['where']})")
    for each in found["operations"]:
        typer.echo(f"Operation      {each['job']} {each['state']}: {each['words'] or 'starting'} ({each['run_id']})")
    for each in found["ddl"]:
        typer.echo(
            f"Broadcast      {each['kind']} of {each['collection']} {each['state']}, "
            f"{each['acked']} VChannels have it: {each['detail']}"
        )
    shown = worst_pchannels(found["pchannels"])
    print_rows(shown, columns=_COLUMNS, as_json=False, empty="No PChannels yet.")
    if len(shown) < len(found["pchannels"]):
        typer.echo(
            f"{len(shown)} of {len(found['pchannels']):,} PChannels: parked ones, then those that lag most. All: --json"
        )


def worst_pchannels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the PChannels that ``status`` shows, by name: all if they are few, otherwise those that need attention."""
    if len(rows) <= _MAX_PCHANNELS:
        return list(rows)
    order = sorted(rows, key=lambda each: (each["parked"] is None, -(each["lag_seconds"] or 0.0)))
    return sorted(order[:_MAX_PCHANNELS], key=lambda each: (len(each["pchannel"]), each["pchannel"]))


def deployment_status(settings: Settings) -> dict[str, Any]:
    """Return everything that ``status`` shows, as plain data."""
    from millrace.observe.broadcasts import unresolved_broadcasts
    from millrace.observe.maintenance import running_operations
    from millrace.observe.observer import Observer

    with closing(Observer(settings)) as observer:
        overview = observer.overview()
    operation_fields = {"job", "run_id", "state", "words", "done", "before", "expected_start"}
    return {
        "data": str(settings.data_dir),
        "log_server": {"running": True, "pid": overview.log_server_pid} if overview.log_server else {"running": False},
        "streaming_job": _streaming_job(overview.jobs[0]),
        "collections": overview.totals.collections,
        "health": overview.model_dump(include={"state", "words", "findings"}),
        "operations": [each.model_dump(include=operation_fields) for each in running_operations(settings)],
        "ddl": _ddl(unresolved_broadcasts(settings)),
        "pchannels": [_pchannel(each) for each in overview.pchannels],
    }


def _streaming_job(job: JobView) -> dict[str, Any]:
    if job.state == "never started":
        return {"running": False}
    return {
        "running": job.state == "running",
        "pid": job.pid,
        "last_batch": None if job.at is None else iso_time(int(job.at * 1000)),
        "batches": job.batches,
        "rows": job.rows,
    }


def _ddl(unresolved: Sequence[BroadcastRow]) -> list[dict[str, Any]]:
    waiting = [each for each in unresolved if each.open]
    abandoned = [each for each in unresolved if not each.open][-_MAX_ABANDONED:]
    return [
        {
            "collection": each.collection,
            "kind": each.kind,
            "state": "waiting" if each.open else "abandoned",
            "since": iso_time(round(each.words_at * 1000)) if each.words_at else None,
            "acked": f"{sum(tick is not None for tick in each.targets.values())} of {len(each.targets)}",
            "detail": each.words or "under way",
        }
        for each in [*waiting, *abandoned]
    ]


def _pchannel(view: PChannelView) -> dict[str, Any]:
    return {
        "pchannel": view.name,
        "term": view.term,
        "log_end": view.log_end,
        "log_bytes": view.log_bytes,
        "wal_position": view.wal_position,
        "wal_tick": int(view.time_tick),
        "wal_time": _time(view.time),
        "messages": view.messages,
        "rejections": view.rejections,
        "flushed_tick": int(view.flushed_tick),
        "flushed_time": _time(view.flushed_time),
        "lag_seconds": view.lag_seconds,
        "parked": view.parked,
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else iso_time(round(seconds * 1000))


def _process(found: dict[str, Any], absent: str) -> str:
    """Describe a process in words."""
    if not found["running"]:
        return absent + (f" (process {found['pid']} is gone)" if "pid" in found else "")
    words = f"running, process {found['pid']}"
    return words + (f", last batch {found['last_batch']}" if found.get("last_batch") else "")
