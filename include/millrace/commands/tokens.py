"""``millrace tokens``: tokens for access to the log's server from other machines, with their permissions.

Works on the file; servers that run notice.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.access.grants import Role
from millrace.base.errors import InvalidArgument
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    JsonContext,
    command_group,
    iso_time,
    print_facts,
    print_json,
    print_rows,
)

if TYPE_CHECKING:
    from millrace.access.token_file import Token

app = command_group("tokens", OPERATE_PANEL, "Create, list and revoke access tokens for clients on other hosts.")

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}

TokenName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token's owner.", show_default=False)]


@app.command()
def add(
    context: JsonContext,
    name: TokenName,
    role: Annotated[
        list[Role], typer.Option("--role", help="What it may do. Repeat it.", show_default=False, case_sensitive=False)
    ],
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="PATTERN",
            help="On what: NAME or collection:NAME, pchannel:NAME, vchannel:NAME, group:NAME, with * and ?. Repeat it."
            " Without it: everything.",
            show_default=False,
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="When it runs out: 30d, 12h, 15m, or an ISO timestamp. Without it: never.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Create a token and show it once; only its digest is stored. Clients set it as MILLRACE_SERVER_TOKEN.

    Example: `millrace tokens add shop-7 --role produce --on 'orders*' --expires 90d`
    """
    from millrace.access.grants import EVERYTHING, Grant
    from millrace.base.data_folder import prepare_data_folder
    from millrace.coord.machine.tokens import open_tokens

    settings = context.settings
    grants = [Grant(each, tuple(on or (EVERYTHING,))) for each in dict.fromkeys(role)]
    until = None if expires is None else _moment(expires)
    prepare_data_folder(settings.data_dir)
    with open_tokens(settings) as tokens:
        token, made = tokens.add(name, grants, expires=until)
    print_facts(_facts(made) | {"token": token}, as_json=context.as_json)


@app.command(name="list")
def list_(context: JsonContext) -> None:
    """List the tokens with their grants and expiry. The tokens themselves cannot be shown again.

    Example: `millrace tokens list`
    """
    from millrace.coord.machine.tokens import open_tokens

    with open_tokens(context.settings) as tokens:
        rows = [_facts(each) for each in tokens.tokens()]
    columns = ("name", "may", "created", "expires", "state")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="There are no tokens except the server's own.")


@app.command()
def revoke(context: JsonContext, name: TokenName) -> None:
    """Revoke a token. New calls fail at once; open connections and streams end within two seconds.

    Example: `millrace tokens revoke shop-7`
    """
    from millrace.coord.machine.tokens import open_tokens

    with open_tokens(context.settings) as tokens:
        gone = _facts(tokens.revoke(name))
    if context.as_json:
        print_json(gone)
    else:
        typer.echo(f"Revoked {name}.")


def _facts(token: Token) -> dict[str, Any]:
    grants = token.principal.grants
    return {
        "name": token.principal.name,
        "may": [f"{grant.role} on {' '.join(grant.patterns)}" for grant in grants],
        "created": iso_time(int(token.created * 1000)),
        "expires": None if token.expires is None else iso_time(int(token.expires * 1000)),
        "state": "ran out" if token.expired(datetime.now(UTC).timestamp()) else "good",
    }


def _moment(text: str) -> float:
    """Return a duration from now, or a timestamp, as Unix seconds. Raises InvalidArgument."""
    span = re.fullmatch(r"(\d{1,6})([mhd])", text)
    try:
        if span is not None:
            return (datetime.now(UTC) + timedelta(**{_UNITS[span[2]]: int(span[1])})).timestamp()
        found = datetime.fromisoformat(text)
        return (found.replace(tzinfo=UTC) if found.tzinfo is None else found).timestamp()
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{text[:100]!r} is not an expiry time of a token: write 30d, 12h, 15m or 2027-01-31T12:00:00Z"
        ) from None
