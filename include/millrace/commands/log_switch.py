"""``millrace log switch``: let the log go on in another backend (millrace.coord.switch_log; docs/switching.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.deadline import Deadline
from millrace.commands.log import app
from millrace.commands.parts.command_line import (
    JsonContext,
    print_rows,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.coord.switch_log import LogSwitch
    from millrace.node.append.host import AppendHost


@app.command()
def switch(
    context: JsonContext,
    to: Annotated[
        str, typer.Option("--to", metavar="URL", help="kafka://…, pulsar://…, rocksmq:///folder or rocksmq.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check whether the switch is possible.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Switch without a server; nothing of the deployment may run.")
    ] = False,
) -> None:
    """Continue the log in another backend while everything runs. Run the command again if it was interrupted.

    Example: `millrace log switch --to kafka://broker:9092/millrace --dry-run`
    """
    from millrace.coord.store_factory import exclude_append_nodes

    settings = context.settings
    with exclude_append_nodes(settings) as check, (_offline if offline else _online)(settings) as switching:
        passed = replace(switching, check=check).run(to, dry_run=dry_run)
    rows = [
        {
            "pchannel": each.pchannel,
            "old_end": str(each.old_end),
            "new_begin": None if each.new_begin is None else str(each.new_begin),
            "seconds": round(each.seconds, 3),
        }
        for each in passed
    ]
    empty = f"The log is at {to} already, or has no PChannel yet."
    print_rows(rows, columns=("pchannel", "old_end", "new_begin", "seconds"), as_json=context.as_json, empty=empty)


class _Hosted:
    """An append host in this process, for the switch."""

    def __init__(self, host: AppendHost, deadline: float) -> None:
        self._host = host
        self._deadline = deadline

    def append_one(self, pchannel: str, entry: bytes) -> int:
        return self._host.append(pchannel, entry, deadline=self._deadline).result().time_tick

    def describe(self, pchannel: str) -> dict[str, Any]:
        return self._host.describe(pchannel)


@contextmanager
def _online(settings: Settings) -> Iterator[LogSwitch]:
    """Yield a switch that uses the log's server, which is started if none runs."""
    from millrace.client.database import connect
    from millrace.coord.switch_log import LogSwitch
    from millrace.log.generations.shared_list import shared_list

    class Host:
        """The server's append host."""

        def append_one(self, pchannel: str, entry: bytes) -> int:
            return db.connection.append(pchannel, [entry], deadline=settings.append_deadline).result().time_tick

        def describe(self, pchannel: str) -> dict[str, Any]:
            return db.connection.describe(pchannel)

    with connect(settings=settings) as db:
        yield LogSwitch(settings.log_path, settings.log, db.log, Host(), db.catalog, shared=shared_list(settings))


@contextmanager
def _offline(settings: Settings) -> Iterator[LogSwitch]:
    """Yield a switch that works in this process alone. Raises LogBusy if the log's server runs."""
    from millrace.base.file_lock import exclusive_lock
    from millrace.coord.append_port import SingleEntryAppender
    from millrace.coord.catalog.shared import open_shared_catalog
    from millrace.coord.coordinator import Coordinator
    from millrace.coord.switch_log import LogSwitch
    from millrace.log.generations.service import open_deployment_log
    from millrace.log.generations.shared_list import shared_list
    from millrace.node.append.host import AppendHost
    from millrace.node.append.server import committed_state_loader
    from millrace.rpc.discovery import LOCK_FILE
    from millrace.rpc.launch import launch_of

    launch = launch_of(settings)
    settings.log_path.mkdir(parents=True, exist_ok=True)
    with (
        exclusive_lock(settings.log_path / LOCK_FILE, deadline=Deadline.after(1.0)),
        open_deployment_log(
            settings.log_path, launch.backend, settings=dict(launch.settings), shared=shared_list(settings)
        ) as log,
        AppendHost(log, committed_state_loader(settings.wal_uri, log)) as host,
        Coordinator(
            settings,
            log=log,
            append=SingleEntryAppender(host, settings.append_deadline),
            shared=open_shared_catalog(settings),
        ) as coordinator,
    ):
        hosted = _Hosted(host, settings.append_deadline)
        yield LogSwitch(settings.log_path, launch.backend, log, hosted, coordinator, shared=shared_list(settings))
