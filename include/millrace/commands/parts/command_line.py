"""Shared parts of all commands: options, settings, printing and errors.

The callback of the program declares the shared options once. A command takes those that its context names, before or
after its own name: ``millrace --data X status`` and ``millrace status --data X`` are the same. A command without a
context takes none of them.

Exit codes: 0 success, 1 a MillraceError (`CODE: message` on stderr, never a traceback), 2 wrong usage, 3 stored data is
damaged (a verification found it, or a command met it), 130 Ctrl-C, 143 SIGTERM (millrace.commands.parts.interrupts).
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NoReturn, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

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
from millrace.base.package import ROOT, VERSION
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import collection_names, read_collection, read_page
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
"""Errors about damaged stored data. Any command that meets one that a retry does not cure exits with 3."""
EXIT_INTERRUPTED: Final = 130

MAX_NAMED: Final = 20
"""Collections that an error names."""
PIPE_WIDTH: Final = 200
"""Width of a table that goes to a pipe or a file, which have no screen to fit."""

Row = Mapping[str, Any]
CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


class ReportingGroup(TyperGroup):
    """A group of commands that reports Millrace's errors as one line and an exit code, and Ctrl-C as an exit code."""

    def invoke(self, ctx: Any) -> Any:
        hide_pandas_from_arrow()
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            missing = missing_extra_error(error)
            if missing is None:
                raise
            typer.echo(f"{missing.code}: {missing}", err=True)
            raise typer.Exit(EXIT_ERROR) from None
        except MillraceError as error:
            interrupts = ctx.find_root().obj
            # An error after a signal is a consequence of the signal: the user knows.
            if not (isinstance(interrupts, InterruptHandler) and interrupts.signal is not None):
                typer.echo(f"{error.code}: {error}", err=True)
            damaged = isinstance(error, DAMAGE_ERRORS) and not error.retriable
            raise typer.Exit(EXIT_VERIFICATION_FAILED if damaged else EXIT_ERROR) from None
        except OSError as error:
            # No strerror: an error of a library. A broken pipe: the reader of the output has gone.
            if error.strerror is None or isinstance(error, ConnectionError):
                raise
            typer.echo(f"{FileRefused.code}: {FileRefused.from_os_error(error)}", err=True)
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


class CommandContext(typer.Context):
    """The context of a command that works on a deployment. Such a command takes --data."""

    takes: ClassVar[tuple[str, ...]] = ("data",)
    """Names of the shared options that the command takes."""
    shared: Mapping[str, Any] = MappingProxyType({})
    """Values of the shared options. The command's own line takes precedence over the program's."""

    @property
    def data(self) -> Path | None:
        """The value of --data, or None if it was not given."""
        found: Path | None = self.shared.get("data")
        return found

    @cached_property
    def settings(self) -> Settings:
        """The settings, with --data in place of their data folder. Raises InvalidSettings."""
        if self.data is None:
            return Settings.load()
        return Settings.load(env={**os.environ, "MILLRACE_DATA": str(self.data.expanduser().absolute())})


class JsonContext(CommandContext):
    """The context of a command that can print its result as JSON: --json."""

    takes = (*CommandContext.takes, "as_json")

    @property
    def as_json(self) -> bool:
        return bool(self.shared.get("as_json"))


class ServiceContext(CommandContext):
    """The context of a command that calls the pipeline service: --server and --roots."""

    takes = (*CommandContext.takes, "server", "roots")

    @property
    def server(self) -> str:
        """The address of the service, or "" for this host."""
        return str(self.shared.get("server") or "")

    @property
    def roots(self) -> Path | None:
        """The file with the root certificates for the service."""
        found: Path | None = self.shared.get("roots")
        return found


class JsonServiceContext(JsonContext, ServiceContext):
    """The context of a command that calls the pipeline service and can print its answer as JSON."""

    takes = (*ServiceContext.takes, "as_json")


class Command(TyperCommand):
    """A command that takes the shared options that its context names, besides its own."""

    @cached_property
    def context_class(self) -> type[typer.Context]:  # type: ignore[override] # an attribute there
        """The annotation of the callback's context parameter. Looked up late: only one command of a process runs."""
        hints = get_type_hints(inspect.unwrap(self.callback)) if self.callback is not None else {}
        return next(
            (each for each in hints.values() if inspect.isclass(each) and issubclass(each, CommandContext)),
            typer.Context,
        )

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)
        shared = [each for each in ctx.find_root().command.params if each.name in _accepted_options(ctx)]
        return [*own[:-1], *shared, *own[-1:]]  # --help stays last

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, args)
        root, taken = ctx.find_root(), _accepted_options(ctx)
        for option in root.command.params:
            if option.name in SHARED and option.name not in taken and _is_given(root, option.name):
                raise typer.BadParameter(
                    f"`{ctx.command_path}` does not take this option", ctx=ctx, param_hint=option.opts[0]
                )
        own = {name: ctx.params.pop(name) for name in taken if name in ctx.params}
        if taken:
            ctx.shared = {name: value if _is_given(ctx, name) else root.params.get(name) for name, value in own.items()}
        return rest


class CommandGroup(typer.Typer):
    """A group whose commands take the shared options."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **options: Any
    ) -> Callable[[CommandFunction], CommandFunction]:
        return super().command(name, cls=cls, **options)


def _accepted_options(context: typer.Context) -> tuple[str, ...]:
    return context.takes if isinstance(context, CommandContext) else ()


def _is_given(context: Any, name: str) -> bool:
    """Return whether the option was given on the command line, as opposed to a default or an environment variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def complete_collection(context: typer.Context, incomplete: str) -> list[str]:
    """Return the collections whose name begins with `incomplete`, for the shell.

    None without a readable data folder.
    """
    if not isinstance(context, CommandContext):
        return []
    try:
        return [each for each in collection_names(context.settings.data_dir) if each.startswith(incomplete)]
    except MillraceError:
        return []


CollectionName = Annotated[
    str,
    typer.Argument(metavar="COLLECTION", help="The collection's name.", autocompletion=complete_collection),
]


DATA_PANEL: Final = "Rows"
INSPECT_PANEL: Final = "Looking into it"
OPERATE_PANEL: Final = "Running it"
PANELS: Final = (DATA_PANEL, INSPECT_PANEL, OPERATE_PANEL)
"""Sections of the program's help, in their order. Each command is in one of them."""

root = CommandGroup(
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

    Exit codes: 0 success, 1 an error (`CODE: message`), 2 wrong usage, 3 damaged stored data, 130 Ctrl-C, 143 SIGTERM.
    """,
)
"""The program. Commands register themselves: ``@root.command(rich_help_panel=INSPECT_PANEL)``."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"millrace {VERSION}")
        raise typer.Exit


def _folder(text: str) -> Path:
    """Parse --data. Refuse an empty value: an unset variable leaves one, and it would mean the working folder."""
    if not text:
        raise typer.BadParameter("it is empty: name a folder")
    return Path(text)


@root.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            parser=_folder,
            help="The deployment's data folder. Default: MILLRACE_DATA, the settings file, or the built-in default.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    server: Annotated[
        str,
        typer.Option(
            "--server",
            metavar="URL",
            envvar="MILLRACE_PIPELINES",
            help="Address of the pipeline service, such as https://host:13012. Default: this host. "
            "MILLRACE_SERVER_TOKEN holds the token.",
            show_default=False,
        ),
    ] = "",
    roots: Annotated[
        Path | None,
        typer.Option(
            "--roots",
            metavar="FILE",
            parser=Path,
            help="Root certificates (PEM) that signed the pipeline service's certificate.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Declare the shared options. :class:`Command` hands them to the commands that take them."""


SHARED: Final = ("data", "as_json", "server", "roots")
"""Options of the program that commands take too, in the order of their help."""


def command_group(
    name: str, panel: str, words: str, *, cls: type[ReportingGroup] = ReportingGroup, hidden: bool = False
) -> CommandGroup:
    """Register a group of commands with the program, and return it. ``@group.command()`` adds a command.

    A `hidden` group is not in any help.
    """
    made = CommandGroup(help=words, cls=cls, no_args_is_help=True, rich_markup_mode="markdown")
    root.add_typer(made, name=name, rich_help_panel=panel, hidden=hidden)
    return made


def exec_python(arguments: Sequence[str], settings: Settings) -> NoReturn:
    """Replace this process by Python with `arguments` and these settings. It gets the signals, its exit code counts."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    sys.stdout.flush()
    sys.stderr.flush()
    environment = os.environ | settings.environment() | {"PYTHONPATH": paths}
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def find_collection(settings: Settings, name: str) -> CollectionInfo:
    """Return the collection `name`, without a server. Raises CollectionNotFound, which lists the known ones."""
    from millrace.base.errors import CollectionNotFound
    from millrace.catalog.collection import CollectionQuery

    found = read_collection(settings.data_dir, name)
    if found is not None:
        return found
    page = read_page(settings.data_dir, CollectionQuery(limit=MAX_NAMED))
    names = f"known are {', '.join(each.name for each in page.items)}" if page.items else "there are none yet"
    more = f" and {page.total - len(page.items):,} more" if page.next else ""
    raise CollectionNotFound(f"no collection {name!r} in {settings.data_dir}; {names}{more}")


def parse_json_object(text: str | None) -> dict[str, Any]:
    """Parse the option --params. Raises InvalidArgument unless it is a JSON object."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"--params is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument("--params takes a JSON object, such as '{\"dry_run\": true}'")
    return found


# --- printing ---------------------------------------------------------------------------------------------------------


def console() -> Console:
    """Return the console for human output.

    As wide as the screen, PIPE_WIDTH without one, colours on a terminal only.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, emoji=False)


def print_json(value: Any) -> None:
    """Print one JSON document on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False, default=_plain))


def print_rows(rows: Iterable[Row], *, columns: Sequence[str], as_json: bool, empty: str, title: str = "") -> None:
    """Print `rows` as a JSON array with all fields, or as a table of `columns`, or `empty` if there are none."""
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
    """Print properties as a JSON object, or one per line."""
    if as_json:
        print_json(facts)
        return
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        typer.echo(f"{name.replace('_', ' '):<{width}}  {format_value(value, exact=_is_identity(name))}")


def format_value(value: Any, *, exact: bool = False) -> str:
    """Format a value for people: integers get thousands separators unless `exact`."""
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
    """Return a count with its noun: ``1 row``, ``2,000 rows``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def tick_time(tick: int) -> str | None:
    """Return the time of a tick in ISO 8601 (UTC), or None for 0."""
    return iso_time(tick_physical_ms(tick)) if tick else None


def iso_time(physical_ms: int) -> str | None:
    """Return Unix milliseconds in ISO 8601 (UTC), or None outside the calendar."""
    try:
        return datetime.fromtimestamp(physical_ms / 1e3, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def _is_identity(name: str) -> bool:
    """Return whether a column's numbers are identifiers, which get no thousands separators."""
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
