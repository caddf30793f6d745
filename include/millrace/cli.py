"""``millrace``: everything about a deployment from the command line.

The commands are in millrace.commands, one module a group; this module names them and fixes their order in the help.
millrace.__main__ runs it as a process.
"""

from __future__ import annotations

import typer

from millrace.commands import (
    backup,
    collections,
    configuration,
    jobs,
    log,
    produce,
    read,
    scan,
    status,
    system,
    tables,
    verify,
    wal,
)
from millrace.commands.command_line import ReportingGroup

app = typer.Typer(
    name="millrace",
    cls=ReportingGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="""A streaming write-ahead log for tables.

    Make a collection, produce rows into it, run the streaming job, read the rows as of any moment:

    `millrace collections create users --field id:int64 --field 'name:string?' --key id`

    `echo '{"id": 1, "name": "Ada"}' | millrace produce users -`

    `millrace jobs run --with-flusher --available-now`

    `millrace read users`

    Exit codes: 0 all is well, 1 an error (`CODE: message`), 2 wrong usage, 3 what is stored does not hold, 130 Ctrl-C, 143 SIGTERM.
    """,
)

_ROWS, _LOOK, _RUN = "Rows", "Looking into it", "Running it"

app.add_typer(collections.app, name="collections", rich_help_panel=_ROWS)
app.command(rich_help_panel=_ROWS)(produce.produce)
app.command(rich_help_panel=_ROWS)(read.read)
app.command(rich_help_panel=_ROWS)(scan.scan)
app.command(rich_help_panel=_LOOK)(status.status)
app.command(rich_help_panel=_LOOK)(verify.verify)
app.command(rich_help_panel=_LOOK)(tables.segments)
app.command(rich_help_panel=_LOOK)(tables.checkpoints)
app.add_typer(wal.app, name="wal", rich_help_panel=_LOOK)
app.add_typer(log.app, name="log", rich_help_panel=_LOOK)
app.add_typer(system.app, name="system", rich_help_panel=_RUN)
app.add_typer(backup.app, name="backup", rich_help_panel=_RUN)
app.add_typer(jobs.app, name="jobs", rich_help_panel=_RUN)
app.command(rich_help_panel=_RUN)(jobs.unpark)
app.add_typer(configuration.app, name="config", rich_help_panel=_RUN)
app.command(rich_help_panel=_RUN)(configuration.version)
