"""``millrace log tombstone``: replace the entry that parks its PChannel (millrace.node.append.tombstones)."""

from __future__ import annotations

import getpass
import os
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.base.errors import InvalidArgument
from millrace.commands.log import app
from millrace.commands.parts.command_line import (
    JsonContext,
    iso_time,
    print_facts,
    print_json,
)
from millrace.message.ids import LogId

if TYPE_CHECKING:
    from millrace.message.tombstones import Tombstone


_PLACE_SECONDS: Final = 120.0
"""Timeout for replacing an entry, which includes a commit to the ``wal`` table."""


@app.command()
def tombstone(
    context: JsonContext,
    pchannel: Annotated[str, typer.Argument(metavar="PCHANNEL", help="The PChannel, such as dml_0.")],
    entry: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="The entry that parks it, such as 0:17.")],
    checksum: Annotated[
        str, typer.Option("--checksum", metavar="SHA256", help="SHA-256 of the entry's bytes, as shown without --yes.")
    ] = "",
    reason: Annotated[
        str, typer.Option("--reason", help="Why the entry is discarded. The rejection keeps it forever.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Replace the entry. Without it, only show the entry.")] = False,
) -> None:
    """Replace an entry that parks its PChannel and that no host has judged. The entry's content is lost.

    Without `--yes`, shows the entry and changes nothing.

    Example: `millrace log tombstone dml_0 0:17`
    """
    from millrace.client.append_client import AppendClient
    from millrace.message.tombstones import Tombstone
    from millrace.rpc import calls
    from millrace.rpc.launch import launch_of

    settings = context.settings
    place = LogId.parse(entry)
    if yes and not (checksum and reason):
        raise InvalidArgument(
            "--yes needs --checksum and --reason: run the command without --yes first to see the entry"
        )
    request: dict[str, Any] = {"pchannel": pchannel, "entry": list(place)}
    with AppendClient.connect(
        settings.data_dir, deadline=settings.start_deadline, launch=launch_of(settings)
    ) as client:
        if yes:
            request |= {"sha256": checksum, "author": _user(), "reason": reason}
            placed = client.call(calls.TOMBSTONE, request, seconds=_PLACE_SECONDS)
            _say_placed(Tombstone.from_json(pchannel, placed), as_json=context.as_json)
        else:
            _show(client.call(calls.TOMBSTONE, request), pchannel, entry, as_json=context.as_json)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


def _show(found: dict[str, Any], pchannel: str, entry: str, *, as_json: bool) -> None:
    facts = {
        "pchannel": pchannel,
        "entry": entry,
        "appended": iso_time(found["physical_ms"]),
        "bytes": found["bytes"],
        "checksum": found["sha256"],
        "parked": found["judged"],
        "committed": None if found["committed"] is None else str(LogId(*found["committed"])),
    }
    print_facts(facts, as_json=as_json)
    if not as_json:
        typer.echo(
            "\nNothing was changed. A tombstone discards this entry forever. Every reader then sees an invalid entry"
            "\nin its place, which the WAL records as one MALFORMED rejection with your name, the reason and this"
            "\nchecksum. Its producer was told that the PChannel is parked, not that its messages were rejected."
            "\nIf you have a build that can judge the entry, run that instead. To place the tombstone:\n"
            f"\n  millrace log tombstone {pchannel} {entry} --checksum {found['sha256']} --reason '…' --yes"
        )


def _say_placed(placed: Tombstone, *, as_json: bool) -> None:
    if as_json:
        print_json({"pchannel": placed.pchannel, **placed.to_json(), "entry": str(placed.entry)})
        return
    typer.echo(
        f"Entry {placed.entry} of {placed.pchannel} is now a tombstone, placed by {placed.author} at {placed.at}:"
        f" {placed.reason}"
        f"\nResume the PChannel: millrace unpark {placed.pchannel}"
    )
