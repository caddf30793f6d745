"""``millrace jobs`` and ``millrace unpark``: the streaming job in the foreground, and letting a parked PChannel go on."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.base.errors import ChannelNotFound, LogUnavailable
from millrace.commands.parts.command_line import OPERATE_PANEL, DataFolder, command_group, load_settings, root
from millrace.commands.parts.exec_python import exec_python
from millrace.runtime.launch.command import jobs_folder

app = command_group("jobs", OPERATE_PANEL, "Run jobs: the streaming node in the foreground, any job detached.")


@app.command()
def run(
    with_flusher: Annotated[
        bool, typer.Option("--with-flusher", help="The flusher too: tables of the collections, segments, checkpoints.")
    ] = False,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="End where log and WAL stand now, instead of going on.")
    ] = False,
    data: DataFolder = None,
) -> None:
    """Run the streaming node here until Ctrl-C or SIGTERM (it ends behind the batch that it is at).

    Needs Java 17 or 21 and the checkout's jobs/ folder (MILLRACE_HOME names the checkout where this package lies elsewhere).

    Example: `millrace jobs run --with-flusher`

    Example: `millrace jobs run --with-flusher --available-now`
    """
    settings = load_settings(data)
    arguments = [str(jobs_folder() / "streaming_node.py")]
    arguments += ["--with-flusher"] if with_flusher else []
    arguments += ["--available-now"] if available_now else []
    exec_python(arguments, settings)


@root.command(rich_help_panel=OPERATE_PANEL)
def unpark(
    pchannel: Annotated[str, typer.Argument(metavar="PCHANNEL", help="The PChannel, such as dml_0.")],
    data: DataFolder = None,
) -> None:
    """Let a parked PChannel go on, once the cause is mended; it parks again where it is not.

    `millrace status` shows what is parked and why.

    Example: `millrace unpark dml_0`
    """
    from millrace.client.append_client import AppendClient
    from millrace.node.range_loop.parking import unpark as unpark_node

    settings = load_settings(data)
    freed = []
    try:
        unpark_node(settings.parked_path, pchannel)
        freed.append("the streaming node")
    except ChannelNotFound:
        pass  # the append host may have parked it by itself
    try:
        with AppendClient.connect(settings.data_dir, start=False, deadline=5.0) as client:
            if pchannel in client.service.names() and (freed or client.describe(pchannel)["parked"]):
                client.restart(pchannel)
                freed.append("the append host")
    except LogUnavailable:
        pass  # without a server there is no append host that stands still
    if not freed:
        raise ChannelNotFound(f"{pchannel} is not parked")
    typer.echo(f"{pchannel} goes on ({' and '.join(freed)}).")
