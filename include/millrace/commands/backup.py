"""``millrace backup``: make, list, verify and restore backups of a running deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import BackupNotFound, InvalidArgument
from millrace.commands.parts.command_line import (
    EXIT_VERIFICATION_FAILED,
    OPERATE_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    print_facts,
    print_json,
    print_rows,
)

if TYPE_CHECKING:
    from millrace.operations.backup.bucket import BackupPlace

app = command_group("backup", OPERATE_PANEL, "Back up the whole deployment while it runs, and restore it.")

BackupsOption = Annotated[
    str | None,
    typer.Option("--in", metavar="FOLDER", help="The folder or URI of backups. Without it: the setting backup_dir."),
]
BackupArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[BACKUP]",
        help=(
            "A backup's folder or URI, or a folder of backups: the newest one in it. Without it: the newest in"
            " backup_dir."
        ),
        show_default=False,
    ),
]


@app.command()
def make(
    context: JsonContext,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FOLDER", help="The folder or URI (s3://…) of backups. Without it: backup_dir."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="Backups of this deployment to keep, including this one.")] = 7,
    verify: Annotated[bool, typer.Option("--verify", help="Read the backup again and compare digests.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be copied.")] = False,
) -> None:
    """Make a backup while the deployment runs. It contains everything that was acknowledged before it began.

    Example: `millrace backup make --to /mnt/backups/millrace`
    """
    from millrace.operations.backup.declaration import BackupParams
    from millrace.operations.backup.run import run
    from millrace.runtime.progress import Progress

    folder = "" if to is None else str(_named(to))
    params = BackupParams.parse({"to": folder, "keep": keep, "verify": verify, "dry_run": dry_run})
    print_facts(run(context.settings, params, Progress()).to_json(), as_json=context.as_json)


@app.command(name="list")
def list_(context: JsonContext, folder: BackupsOption = None) -> None:
    """List the backups in a folder, the newest first.

    Example: `millrace backup list --in /mnt/backups/millrace`
    """
    from millrace.operations.backup.manifest import list_backups

    place = _place(folder, context)
    if isinstance(place, Path) and place.exists() and not place.is_dir():
        raise BackupNotFound(f"{place} is not a folder: name the one that backups go to")
    rows = [
        {
            "id": manifest.id,
            "started": manifest.started,
            "bytes": manifest.bytes,
            "files": len(manifest.files),
            "log": "included" if manifest.log_included else manifest.log,
            "deployment": manifest.deployment,
            "folder": str(each),
        }
        for each, manifest in list_backups(place)
    ]
    columns = ("id", "started", "bytes", "files", "log", "deployment")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="There is no backup in that folder.")


@app.command()
def verify(context: JsonContext, backup: BackupArgument = None) -> None:
    """Read a backup and compare sizes and digests. The exit code is 3 if a file differs.

    Example: `millrace backup verify /mnt/backups/millrace`
    """
    from millrace.operations.backup.verify import verify_backup as read_back

    found = read_back(_place(backup, context))
    if context.as_json:
        print_json(found.to_json())
    else:
        for words in found.problems:
            typer.echo(words)
        typer.echo(f"{found.id}: {found.files:,} files, {found.bytes:,} bytes, {len(found.problems)} not as they were.")
    if not found.ok:
        raise typer.Exit(EXIT_VERIFICATION_FAILED)


@app.command()
def restore(context: JsonContext, backup: BackupArgument = None) -> None:
    """Restore a backup into an empty data folder. `make up` then continues the deployment.

    The tables go where the setting `tables` says (MILLRACE_TABLES): into the data folder, or to a prefix of an object
    store that is empty.

    Example: `millrace backup restore /mnt/backups/millrace --data /srv/millrace`
    """
    from millrace.operations.backup.restore import restore_backup as bring_back

    print_facts(bring_back(context.settings, _place(backup, context)).to_json(), as_json=context.as_json)


def _place(given: str | None, context: CommandContext) -> BackupPlace:
    named = context.settings.backup_dir if given is None else given
    if not named:
        raise InvalidArgument("name the folder of backups, or set backup_dir")
    return _named(named)


def _named(text: str) -> BackupPlace:
    from millrace.operations.backup.bucket import backup_place

    return backup_place(text) if "://" in text else Path(text).expanduser().absolute()
