"""``millrace status``: the health of the deployment and the progress of log, WAL and tables. Starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from millrace.base.errors import LogUnavailable, MillraceError
from millrace.catalog.sqlite_file import read_collections
from millrace.commands.parts.command_line import (
    INSPECT_PANEL,
    AsJson,
    DataFolder,
    iso_time,
    load_settings,
    print_json,
    print_rows,
    root,
    tick_time,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.client.append_client import AppendClient
    from millrace.tables.wal.table import WalTable

_COLUMNS = ("pchannel", "term", "log_end", "wal_position", "wal_time", "flushed_time", "lag_seconds", "parked")
_MOST = 5
"""Abandoned DDL that is shown."""


@root.command(rich_help_panel=INSPECT_PANEL)
def status(data: DataFolder = None, as_json: AsJson = False) -> None:
    """Show the health of the log server and jobs, any problems, and the progress of each PChannel.

    The lag is the age of the oldest log entry that is not yet in the WAL.

    Example: `millrace status`
    """
    settings = load_settings(data)
    found = deployment_status(settings)
    if as_json:
        print_json(found)
        return
    typer.echo(f"Data folder    {settings.data_dir}")
    typer.echo(f"Log server     {_in_words(found['log_server'], 'not running; it starts by itself when it is needed')}")
    typer.echo(f"Streaming job  {_in_words(found['streaming_job'], 'not running; `millrace jobs run --with-flusher`')}")
    typer.echo(f"Collections    {found['collections']:,}")
    typer.echo(f"Health         {found['health']['state']}: {found['health']['words']}")
    for each in found["health"]["findings"]:
        typer.echo(f"  {each['severity']}: {each['subject']}: {each['words']} ({each['where']})")
    for each in found["operations"]:
        typer.echo(f"Operation      {each['job']} {each['state']}: {each['words'] or 'starting'} ({each['run_id']})")
    for each in found["ddl"]:
        typer.echo(
            f"DDL            {each['kind']} of {each['collection']} {each['state']}, {each['acked']} VChannels have it: {each['detail']}"
        )
    print_rows(found["pchannels"], columns=_COLUMNS, as_json=False, empty="No PChannels yet.")


def deployment_status(settings: Settings) -> dict[str, Any]:
    """Return everything that ``status`` shows, as plain data."""
    from millrace.client.append_client import AppendClient

    server: dict[str, Any] = {"running": False}
    client: AppendClient | None = None
    try:
        client = AppendClient.connect(settings.data_dir, start=False, deadline=5.0)
        server = {"running": True, "pid": client.service.ping()["pid"]}
    except LogUnavailable:
        pass  # it does not run, which is what is said
    try:
        return {
            "data": str(settings.data_dir),
            "log_server": server,
            "streaming_job": streaming_job_status(settings),
            "collections": len(read_collections(settings.data_dir)),
            "health": _health(settings),
            "operations": _operations(settings),
            "ddl": _ddl(settings),
            "pchannels": _pchannels(settings, client),
        }
    finally:
        if client is not None:
            client.close()


def _ddl(settings: Settings) -> list[dict[str, Any]]:
    """Broadcasts that wait, and the newest that were abandoned."""
    from millrace.coord.catalog_store import CatalogStore

    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        return []
    with store:
        troubles = store.broadcasts.list_unresolved()
    open_ = [each for each in troubles if each.task.open]
    shown = open_ + [each for each in troubles if not each.task.open][-_MOST:]
    return [
        {
            "collection": each.collection,
            "kind": each.task.kind,
            "state": "waiting" if each.task.open else "abandoned",
            "since": iso_time(each.task.reason_at_ms) if each.task.reason_at_ms else None,
            "acked": f"{len(each.task.ticks)} of {len(each.task.targets)}",
            "detail": each.task.reason or "under way",
        }
        for each in shown
    ]


def streaming_job_status(settings: Settings) -> dict[str, Any]:
    """The streaming node, or the nodes of a cluster together, by their progress files: whether one lives, what was said
    last."""
    from millrace.observe.jobs import read_jobs

    job = read_jobs(settings)[0]
    if job.state == "never started":
        return {"running": False}
    return {
        "running": job.state == "running",
        "pid": job.pid,
        "last_batch": None if job.at is None else iso_time(int(job.at * 1000)),
        "batches": job.batches,
        "rows": job.rows,
    }


def _operations(settings: Settings) -> list[dict[str, Any]]:
    """The operations that run now, or wait for a place, with what they say."""
    from millrace.observe.maintenance import running_operations

    shown = {"job", "run_id", "state", "words", "done", "before", "expected_start"}
    return [each.model_dump(include=shown) for each in running_operations(settings)]


def _health(settings: Settings) -> dict[str, Any]:
    """What is not as it should be, and where to go with it."""
    from millrace.observe.observer import Observer

    observer = Observer(settings)
    try:
        found = observer.overview()
    except MillraceError as error:
        return {"state": "unknown", "words": f"{error.code}: {error}", "findings": []}
    finally:
        observer.close()
    return found.model_dump(include={"state", "words", "findings"})


def _pchannels(settings: Settings, client: AppendClient | None) -> list[dict[str, Any]]:
    from millrace.node.range_loop.parking import read_parked
    from millrace.storage.table import open_table
    from millrace.tables.collections.flush_tables import read_checkpoints
    from millrace.tables.wal.table import WalTable

    wal = open_table(settings.wal_uri)
    table = None if wal is None else WalTable(wal)
    checkpoints = read_checkpoints(open_table(settings.checkpoints_uri))
    parked = {each.pchannel: each for each in read_parked(settings.parked_path)}
    in_wal = set(table.pchannels()) if table is not None else set()
    positions = table.valid_positions(in_wal) if table is not None else {}
    in_log = set(client.service.names()) if client is not None else set()
    pending = _pending(client, table, in_log - (in_wal - set(positions))) if client is not None else {}
    lags = {name: found for name, found in pending.items() if isinstance(found, float)}
    unread = {name: found for name, found in pending.items() if isinstance(found, str)}
    rows = []
    for name in sorted(in_wal | in_log | set(checkpoints)):
        position = positions.get(name)
        state = position.state if position is not None else None
        checkpoint = checkpoints.get(name)
        wal_tick = position.last_tick if position is not None else 0
        row: dict[str, Any] = {
            "pchannel": name,
            "term": state.term if state is not None else 0,
            "log_end": None,
            "log_bytes": None,
            "wal_position": str(state.position) if state is not None else None,
            "wal_tick": wal_tick,
            "wal_time": tick_time(wal_tick),
            "messages": position.totals.messages if position is not None else 0,
            "rejections": position.totals.rejections if position is not None else 0,
            "flushed_tick": checkpoint.time_tick if checkpoint is not None else 0,
            "flushed_time": tick_time(checkpoint.time_tick) if checkpoint is not None else None,
            "lag_seconds": lags.get(name, 0.0) if client is not None and name not in unread else None,
            "parked": parked[name].error().args[0] if name in parked else None,
        }
        if client is not None and name in in_log:
            row |= _logged(client, name)
            row |= _hosted(client, name, row)
        row["parked"] = row["parked"] or unread.get(name)
        rows.append(row)
    return rows


def _logged(client: AppendClient, name: str) -> dict[str, Any]:
    """What the log itself says; without words where it does not say: whoever follows it does."""
    try:
        log = client.service.open(name)
        described = log.describe()
        log.close()
    except MillraceError:
        return {}
    return {"log_end": str(described.end), "log_bytes": described.bytes}


def _hosted(client: AppendClient, name: str, row: dict[str, Any]) -> dict[str, Any]:
    """What the append host knows better: the newest term, and whether it stands still itself."""
    try:
        host = client.describe(name)
    except MillraceError as error:
        return {"parked": row["parked"] or f"append host: {error.code}: {error}"}
    found: dict[str, Any] = {"term": max(row["term"], int(host["term"]))}
    if host["parked"] and row["parked"] is None:
        found["parked"] = f"append host: {host['parked']}"
    return found


def _pending(client: AppendClient, table: WalTable | None, names: set[str]) -> dict[str, float | str]:
    """By PChannel of `names` the age of its oldest entry that the WAL does not have, in seconds; or why it is not
    known."""
    from millrace.tables.read.freshness import lag_seconds

    found: dict[str, float | str] = {}
    for name in sorted(names):
        try:
            log = client.service.open(name)
            found[name] = lag_seconds(table, log, name)
            log.close()
        except MillraceError as error:
            found[name] = f"log: {error.code}: {error}"
    return found


def _in_words(found: dict[str, Any], absent: str) -> str:
    if not found["running"]:
        return absent + (f" (process {found['pid']} is gone)" if "pid" in found else "")
    words = f"running, process {found['pid']}"
    return words + (f", last batch {found['last_batch']}" if found.get("last_batch") else "")
