"""``millrace log``: inspect the ingress log and manage its server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.errors import ChannelNotFound, InvalidArgument, LogBusy, LogUnavailable, MillraceError
from millrace.commands.parts.command_line import (
    EXIT_VERIFICATION_FAILED,
    INSPECT_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    exec_python,
    iso_time,
    print_json,
    print_rows,
)
from millrace.message.ids import LogId

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.client.append_client import AppendClient
    from millrace.log.protocol import LogService

app = command_group("log", INSPECT_PANEL, "Inspect and verify the ingress log, and stop its server.")

READ_BYTES = 4 << 20
_FOLLOW_SECONDS = 1.0
_FOUND_SECONDS = 5.0
"""Time in which a running server writes its record again."""

Channel = Annotated[str | None, typer.Argument(metavar="[PCHANNEL]", help="A PChannel. Without it: all.")]


@app.command()
def describe(context: JsonContext, pchannel: Channel = None) -> None:
    """Show the begin, the end and the size of each PChannel's log.

    Example: `millrace log describe`
    """
    rows = []
    with open_log_read_only(context.settings) as (service, _):
        for name in _names(service, pchannel):
            log = service.open(name)
            found = log.describe()
            newest = max(found.begin, LogId(found.end.ledger, max(0, found.end.entry - 1)))
            last = log.read(newest, max_bytes=1).batch
            log.close()
            rows.append(
                {
                    "pchannel": name,
                    "begin": str(found.begin),
                    "end": str(found.end),
                    "bytes": found.bytes,
                    "last_append": iso_time(last["physical_ms"][0].as_py()) if last.num_rows else None,
                }
            )
    columns = ("pchannel", "begin", "end", "bytes", "last_append")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="No PChannels yet.")


@app.command()
def pchannels(
    context: JsonContext,
    count: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Have at least so many PChannels: add those that are missing.")
    ] = None,
) -> None:
    """List the PChannels with their terms and VChannels, or add some while the system runs.

    New collections go to the PChannels with the fewest VChannels. Existing collections stay where they are.

    Example: `millrace log pchannels --count 16`
    """
    from millrace.client.database import connect
    from millrace.coord.catalog.store import CatalogStore

    settings = context.settings
    if count is not None:
        with connect(settings=settings) as db:
            db.catalog.ensure_pchannels(count)
    store = CatalogStore.open_read_only(settings.data_dir)
    rows: list[dict[str, Any]] = []
    if store is not None:
        with store:
            counts = store.vchannel_counts()
            rows = [
                {"pchannel": each.name, "term": each.term, "opened": each.opened, "vchannels": counts[each.name]}
                for each in sorted(store.pchannels(), key=lambda each: (len(each.name), each.name))
            ]
    columns = ("pchannel", "term", "opened", "vchannels")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="No PChannels yet.")


@app.command()
def verify(context: JsonContext, pchannel: Channel = None) -> None:
    """Verify every checksum of the log. The exit code is 3 if one is wrong.

    Example: `millrace log verify dml_0`
    """
    rows: list[dict[str, Any]] = []
    with open_log_read_only(context.settings) as (service, _):
        for name in _names(service, pchannel):
            log: Any = service.open(name)
            try:
                report = log.verify()
                rows.append(
                    {
                        "pchannel": name,
                        "holds": report.first_bad is None,
                        "entries": report.entries,
                        "records": report.records,
                        "bytes": report.bytes,
                        "first_bad": None if report.first_bad is None else str(report.first_bad),
                        "detail": report.detail,
                    }
                )
            except MillraceError as error:
                if error.retriable:
                    raise
                rows.append({"pchannel": name, "holds": False, "detail": f"{error.code}: {error}"})
            log.close()
    columns = ("pchannel", "holds", "entries", "records", "bytes", "first_bad", "detail")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="No PChannels yet.")
    if not all(row["holds"] for row in rows):
        raise typer.Exit(EXIT_VERIFICATION_FAILED)


@app.command()
def truncate(
    context: JsonContext,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how far the log could be truncated.")] = False,
) -> None:
    """Truncate the log up to the checkpoints of the WAL and the flusher.

    Example: `millrace log truncate --dry-run`
    """
    from millrace.node.retention.truncation import truncate_log
    from millrace.operations.quality.gate import require_unblocked
    from millrace.tables.wal.table import WalTable

    settings = context.settings
    if not dry_run:
        require_unblocked(settings, what="truncation of the log")
    rows: list[dict[str, Any]] = []
    if WalTable.exists(settings.wal_uri):
        with ExitStack() as stack:
            if dry_run:
                service, _ = stack.enter_context(open_log_read_only(settings))
            else:
                service = stack.enter_context(_client(settings)).service
            rows = [
                {
                    "pchannel": found.pchannel,
                    "begin": str(found.begin),
                    "position": str(found.position if found.advances else found.begin),
                    "freed_bytes": found.freed_bytes,
                }
                for found in truncate_log(settings, service, dry_run=dry_run)
            ]
    columns = ("pchannel", "begin", "position", "freed_bytes")
    print_rows(
        rows, columns=columns, as_json=context.as_json, empty="Nothing was flushed yet: the log keeps everything."
    )


@app.command()
def serve(context: CommandContext) -> None:
    """Run the log server in the foreground, until a signal. Otherwise the first command that needs it starts it.

    Fails with LOG_BUSY if the server runs already.

    Example: `MILLRACE_LOG_HOST=10.0.0.5 MILLRACE_LOG_PORT=7700 millrace log serve`
    """
    from millrace.rpc.discovery import running_server
    from millrace.rpc.launch import launch_of

    settings = context.settings
    if (found := running_server(settings.log_path)) is not None:
        raise LogBusy(
            f"the log server of {settings.data_dir} runs already at {found.address} as process {found.pid}: stop it"
            " first (millrace log stop)"
        )
    arguments = ["--foreground", "--data", str(settings.log_path), *launch_of(settings).arguments()]
    exec_python(["-m", "millrace.log.server.main", *arguments], settings)


@app.command()
def stop(context: CommandContext) -> None:
    """Stop the log server with its append host. The next command that needs the server starts it again.

    Example: `millrace log stop`
    """
    from millrace.rpc.discovery import await_record
    from millrace.rpc.remote_log import RemoteLogService

    settings = context.settings
    if await_record(settings.log_path, seconds=_FOUND_SECONDS) is None:
        typer.echo(f"No log server runs for {settings.data_dir}.")
        return
    with RemoteLogService.connect(settings.log_path, start=False, deadline=5.0) as service:
        pid = service.ping()["pid"]
        service.shutdown(timeout=settings.stop_deadline)
    typer.echo(f"Stopped the log server (process {pid}).")


@app.command()
def clock(
    context: JsonContext,
    accept: Annotated[bool, typer.Option("--accept", help="Accept the wall clock, however far it jumped.")] = False,
) -> None:
    """Show the clock of the embedded log: wall clock, stamps, and whether a jump ahead is held. Starts no server.

    Example: `millrace log clock --accept`
    """
    from millrace.rpc.remote_log import RemoteLogService

    settings = context.settings
    rows: list[dict[str, Any]] = []
    try:
        with RemoteLogService.connect(settings.log_path, start=False, deadline=5.0) as service:
            found = service.clock(accept=accept)
    except LogUnavailable as error:
        if accept or "no log server runs" not in str(error):
            raise
    else:
        held = found.held_since_ms
        rows.append(
            {
                "wall_clock": iso_time(found.wall_ms),
                "stamps": iso_time(found.stamp_ms),
                "ahead_seconds": found.ahead_seconds,
                "held": held is not None,
                "held_since": None if held is None else iso_time(held),
                "leap_seconds": found.leap_seconds,
            }
        )
    columns = ("wall_clock", "stamps", "ahead_seconds", "held", "held_since", "leap_seconds")
    empty = f"No log server runs for {settings.data_dir}: nothing is stamped now."
    print_rows(rows, columns=columns, as_json=context.as_json, empty=empty)


@app.command()
def read(
    context: CommandContext,
    pchannel: Annotated[str, typer.Argument(metavar="PCHANNEL", help="The PChannel, such as dml_0.")],
    start: Annotated[
        str, typer.Option("--from", metavar="earliest|latest|POSITION", help="Where to begin, such as 0:17.")
    ] = "earliest",
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new messages until Ctrl-C.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Include payloads: rows, keys and bodies.")] = False,
    principal: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only messages of this principal, such as the name of a token.")
    ] = None,
) -> None:
    """Print the messages of a log as they were appended, before the chain, as JSON lines.

    Example: `millrace log read dml_0 --from 0:17 --limit 3`
    """
    from millrace.commands.parts.message_json import log_json, payload_decoder

    settings = context.settings
    payload = payload_decoder(settings) if rows else None
    shown = 0
    with open_log_read_only(settings) as (service, client):
        if follow and client is None:
            raise LogUnavailable(f"no log server runs for {settings.data_dir}, so nothing comes that could be followed")
        log = service.open(_names(service, pchannel)[0])
        found = log.describe()
        position = {"earliest": found.begin, "latest": found.end}.get(start) or _position(start)
        while follow or position < found.end:
            entries = log.read(
                position,
                end=None if follow else found.end,
                max_bytes=READ_BYTES,
                timeout=_FOLLOW_SECONDS if follow else 0,
            )
            position = entries.next
            if not follow and entries.batch.num_rows == 0:
                return
            for message in log_json(entries.batch, payload):
                if principal is not None and message.get("principal") != principal:
                    continue
                print_json(message)
                shown += 1
                if shown == limit:
                    return


@contextmanager
def open_log_read_only(settings: Settings) -> Iterator[tuple[LogService, AppendClient | None]]:
    """Yield the deployment's log for reading, and the server's client if a server runs. Starts nothing.

    Without a server, the log's own files or its brokers are read. Raises LogBusy, and LogUnavailable if a server is
    just starting: run the command again.
    """
    from millrace.client.append_client import AppendClient
    from millrace.log.generations.service import open_deployment_log
    from millrace.rpc.discovery import running_server
    from millrace.rpc.launch import launch_of

    client: AppendClient | None = None
    try:
        client = AppendClient.connect(settings.data_dir, start=False, deadline=settings.start_deadline)
    except LogUnavailable:
        if running_server(settings.log_path) is not None:
            raise
    if client is not None:
        with client:
            yield client.service, client
        return
    launch = launch_of(settings)
    with open_deployment_log(
        settings.log_path, launch.backend, settings=dict(launch.settings), read_only=True
    ) as service:
        yield service, None


def _client(settings: Settings) -> AppendClient:
    from millrace.client.append_client import AppendClient
    from millrace.rpc.launch import launch_of

    return AppendClient.connect(settings.data_dir, deadline=settings.start_deadline, launch=launch_of(settings))


def _names(service: LogService, pchannel: str | None) -> list[str]:
    known = service.names()
    if pchannel is None:
        return known
    if pchannel not in known:
        raise ChannelNotFound(f"no PChannel {pchannel!r}; those there are: {', '.join(known) or 'none yet'}")
    return [pchannel]


def _position(text: str) -> LogId:
    try:
        return LogId.parse(text)
    except InvalidArgument:
        raise InvalidArgument(f"--from takes earliest, latest or ledger:entry (0:17), not {text!r}") from None
