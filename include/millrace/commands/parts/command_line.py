"""What all commands share: the options, the settings they lead to, how results are printed, and what an error looks
like.

Exit codes: 0 all is well, 1 a MillraceError (`CODE: message` on stderr, never a traceback), 2 wrong usage, 3 something
that is stored does not hold (a verification found it, or a command met it), 130 Ctrl-C, 143 SIGTERM
(millrace.commands.parts.interrupts).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from millrace.base.errors import (
    BackupDamaged,
    FileRefused,
    InvalidArgument,
    LogCorrupted,
    MillraceError,
    SpoolCorrupted,
    StagedFileDamaged,
    StateDamaged,
    TableDamaged,
    WalGap,
)
from millrace.base.extras import missing_extra_error
from millrace.base.package import VERSION
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import read_collections
from millrace.commands.parts.interrupts import InterruptHandler
from millrace.message.ids import tick_physical_ms
from millrace.runtime.arrow_without_pandas import hide_pandas_from_arrow

if TYPE_CHECKING:
    from rich.console import Console

    from millrace.catalog.collection import CollectionInfo

EXIT_ERROR: Final = 1
EXIT_VERIFICATION_FAILED: Final = 3
DAMAGE_ERRORS: Final = (
    TableDamaged,
    StateDamaged,
    StagedFileDamaged,
    LogCorrupted,
    SpoolCorrupted,
    BackupDamaged,
    WalGap,
)
"""Errors that say of what is stored that it does not hold, whichever command met it."""
EXIT_INTERRUPTED: Final = 130

PIPE_WIDTH: Final = 200
"""Columns of a table that goes to a pipe or a file: there is no screen to fit it to."""

Row = Mapping[str, Any]


class ReportingGroup(TyperGroup):
    """A group of commands that turns Millrace's errors into a line and an exit code, and Ctrl-C into an exit code."""

    def invoke(self, ctx: Any) -> Any:
        hide_pandas_from_arrow()
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            told = missing_extra_error(error)
            if told is None:
                raise
            typer.echo(f"{told.code}: {told}", err=True)
            raise typer.Exit(EXIT_ERROR) from None
        except MillraceError as error:
            interrupts = ctx.find_root().obj
            if not (
                isinstance(interrupts, InterruptHandler) and interrupts.signal is not None
            ):  # else it is a consequence
                typer.echo(f"{error.code}: {error}", err=True)
            raise typer.Exit(EXIT_VERIFICATION_FAILED if isinstance(error, DAMAGE_ERRORS) else EXIT_ERROR) from None
        except OSError as error:
            if error.strerror is None or isinstance(
                error, ConnectionError
            ):  # a library's own; a reader of ours that has gone
                raise
            typer.echo(f"{FileRefused.code}: {FileRefused.from_os_error(error)}", err=True)
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


def complete_collection(context: typer.Context, incomplete: str) -> list[str]:
    """The collections whose name begins so, for the shell; none where the data folder cannot be found out."""
    try:
        known = read_collections(load_settings(context.params.get("data")).data_dir)
    except MillraceError:
        return []
    return [each.name for each in known if each.name.startswith(incomplete)]


def _folder(text: str) -> Path:
    """The value of --data. An empty one is what a variable that is not set leaves, and would be the working folder."""
    if not text:
        raise typer.BadParameter("it is empty: name a folder")
    return Path(text)


DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        parser=_folder,
        help="The deployment's data folder. Without it: MILLRACE_DATA, then the settings file, then the default.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
CollectionName = Annotated[
    str,
    typer.Argument(metavar="COLLECTION", help="The collection's name.", autocompletion=complete_collection),
]


DATA_PANEL: Final = "Rows"
INSPECT_PANEL: Final = "Looking into it"
OPERATE_PANEL: Final = "Running it"
PANELS: Final = (DATA_PANEL, INSPECT_PANEL, OPERATE_PANEL)
"""Parts of the program's help, in their order; a command is in one of them."""

root = typer.Typer(
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
"""The program. A command registers itself: ``@root.command(rich_help_panel=INSPECT_PANEL)``."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"millrace {VERSION}")
        raise typer.Exit


@root.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def command_group(name: str, panel: str, words: str, *, cls: type[ReportingGroup] = ReportingGroup) -> typer.Typer:
    """A group of commands with its help, registered with the program: ``@app.command()`` adds one."""
    made = typer.Typer(help=words, cls=cls, no_args_is_help=True, rich_markup_mode="markdown")
    root.add_typer(made, name=name, rich_help_panel=panel)
    return made


def load_settings(data: Path | None) -> Settings:
    """The settings, with `data` over their data folder. Raises InvalidSettings."""
    if data is None:
        return Settings.load()
    return Settings.load(env={**os.environ, "MILLRACE_DATA": str(data.expanduser().absolute())})


def find_collection(settings: Settings, name: str) -> CollectionInfo:
    """The collection `name`, without a server. Raises CollectionNotFound that names those there are."""
    from millrace.base.errors import CollectionNotFound

    known = read_collections(settings.data_dir)
    for each in known:
        if each.name == name:
            return each
    there = f"those there are: {', '.join(each.name for each in known)}" if known else "there are none yet"
    raise CollectionNotFound(f"no collection {name!r} in {settings.data_dir}; {there}")


def parse_json_object(text: str | None) -> dict[str, Any]:
    """What the option --params says. Raises InvalidArgument."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"--params is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument("--params takes a JSON object, such as '{\"dry_run\": true}'")
    return found


# --- printing ---------------------------------------------------------------------------------------------------------------


def console(*, err: bool = False) -> Console:
    """Where people's output goes: as wide as the screen, wide where there is none; colours on a terminal alone."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False, emoji=False)


def print_json(value: Any) -> None:
    """One JSON document, on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False, default=_plain))


def print_rows(rows: Iterable[Row], *, columns: Sequence[str], as_json: bool, empty: str, title: str = "") -> None:
    """`rows` as a JSON array with all they hold, or as a table of `columns` (`empty` where there is none)."""
    rows = list(rows)
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(empty)
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        numeric = bool(kinds) and kinds <= {int, float}
        table.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(format_value(row.get(name), exact=_is_identity(name))) for name in columns))
    console().print(table)


def print_facts(facts: Row, *, as_json: bool) -> None:
    """One thing's properties: a JSON object, or a line each."""
    if as_json:
        print_json(facts)
        return
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        typer.echo(f"{name.replace('_', ' '):<{width}}  {format_value(value, exact=_is_identity(name))}")


def format_value(value: Any, *, exact: bool = False) -> str:
    """A value for a person; whole numbers with thousands separators unless `exact`."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() if not exact:
            return f"{value:,}"
        case float():
            return f"{value:,.3f}".rstrip("0").rstrip(".")
        case list() | tuple():
            return ", ".join(format_value(each) for each in value) or "-"
        case dict():
            return ", ".join(f"{name}={format_value(each, exact=True)}" for name, each in value.items()) or "-"
        case _:
            return str(value)


def format_count(number: int, what: str) -> str:
    """``1 row``, ``2,000 rows``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def tick_time(tick: int) -> str | None:
    """A time tick's moment: UTC, ISO 8601; None for 0."""
    return iso_time(tick_physical_ms(tick)) if tick else None


def iso_time(physical_ms: int) -> str | None:
    """Unix milliseconds as UTC, ISO 8601; None for what no calendar has."""
    try:
        return datetime.fromtimestamp(physical_ms / 1e3, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def _is_identity(name: str) -> bool:
    """Whether the numbers of a column name something, so that they are not to be read in thousands."""
    return name in {"id", "tick", "term", "epoch", "pid", "version"} or name.endswith(("_id", "_tick", "_version"))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode()
    if isinstance(value, date):
        return value.isoformat().replace("+00:00", "Z")
    if hasattr(value, "to_json"):
        return value.to_json()
    return str(value)
