"""``millrace scan``: the messages of a channel in time-tick order, transactions assembled, one JSON object a line."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import ChannelNotFound, ChannelParked, InvalidArgument, LogUnavailable, MillraceError
from millrace.catalog.sqlite_file import read_collection, read_collections_by_id
from millrace.commands.parts.command_line import (
    DATA_PANEL,
    CommandContext,
    print_json,
    root,
)
from millrace.message.ids import LogId, MessageId, collection_id_of
from millrace.message.types import BEHAVIOUR, MessageType

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.client.append_client import AppendClient
    from millrace.rpc.tail import TailBatch, TailSource, TimeTick
    from millrace.wal.scanner import DeliverPolicy

_VCHANNEL = re.compile(r"(?P<pchannel>.+)_\d+v\d+")


@root.command(rich_help_panel=DATA_PANEL)
def scan(
    context: CommandContext,
    channel: Annotated[str, typer.Argument(metavar="CHANNEL", help="A PChannel (dml_0) or a VChannel (dml_0_1v0).")],
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="earliest|latest|ID|tick:N", help="Start at a message id, or after a time tick."
        ),
    ] = "earliest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new messages until Ctrl-C.")] = False,
    types: Annotated[
        list[str] | None,
        typer.Option("--types", metavar="TYPE[,TYPE…]", help="Only these. Without it: all but TIME_TICK."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many lines.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Include payloads: rows, keys and bodies.")] = False,
    principal: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only messages of this principal, such as the name of a token.")
    ] = None,
) -> None:
    """Print a channel's accepted messages, one JSON object a line.

    A committed transaction is one line that contains its messages, at the commit's time tick. Without --follow the scan
    ends with the last message that was appended before it began. Without a log server it prints the WAL table and fails
    with LOG_UNAVAILABLE, because the log may hold more. For a parked PChannel it prints the messages before the entry
    that parks it and fails with CHANNEL_PARKED.

    Example: `millrace scan dml_0 --types INSERT,DELETE --limit 10`

    Example: `millrace scan dml_0_1v0 --from latest --follow`
    """
    policy = _policy(start)
    wanted = _types(types or [])
    settings = context.settings
    vchannel = _VCHANNEL.fullmatch(channel)
    if vchannel is not None:
        number = collection_id_of(channel) or 0
        known = read_collections_by_id(settings.data_dir, [number]).get(number)
        if known is None or channel not in known.vchannels:
            there = f"collection {number} has {', '.join(known.vchannels)}" if known else f"no collection {number}"
            raise ChannelNotFound(f"no VChannel {channel!r}: {there}; `millrace collections list` shows them")
    pchannel = channel if vchannel is None else vchannel["pchannel"]
    from millrace.client.append_client import AppendClient
    from millrace.client.consume.scan import scan as start_scan
    from millrace.commands.parts.message_json import payload_decoder, principals_of, unit_json
    from millrace.tables.wal.log_replay import UncommittedMessages
    from millrace.wal.scanner import TypeFilter

    payload = payload_decoder(settings) if rows else None
    client: AppendClient | None = None
    try:
        client = AppendClient.connect(settings.data_dir, start=False, deadline=settings.read_deadline)
    except LogUnavailable:
        if follow or start == "latest":
            raise  # only a server knows the next messages
    with client or nullcontext():
        tail, names, until, stopped = _sources(settings, client, pchannel)
        if pchannel not in names:
            named = read_collection(settings.data_dir, channel)
            if named is not None:
                raise ChannelNotFound(
                    f"{channel!r} is a collection; scan one of its channels: {', '.join(named.vchannels)}"
                )
            raise ChannelNotFound(f"no PChannel {pchannel!r}; those there are: {', '.join(names) or 'none yet'}")
        with start_scan(
            channel,
            policy,
            wal=settings.wal_uri,
            tail=tail,
            filters=[TypeFilter(wanted)],
            until_tick=None if follow else until,
            log=None if client is None else UncommittedMessages(settings.wal_uri, client.service),
            stall_timeout=settings.read_deadline,
        ) as found:
            of_principal = (unit for unit in found if principal is None or principal in principals_of(unit))
            for number, unit in enumerate(of_principal, 1):
                print_json(unit_json(unit, payload))
                if number == limit:
                    return
    if stopped is not None:
        raise stopped


class _NoTail:
    """The tail of a scan without a server: it is empty, so the scan ends with the table."""

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> TailBatch:
        from millrace.rpc.tail import TailBatch

        return TailBatch([], after_tick)

    def time_tick(self, pchannel: str, *, persist: bool = True, deadline: float = 30.0) -> TimeTick:
        from millrace.rpc.tail import TimeTick

        nowhere = MessageId(0, 0, 0, 0)
        return TimeTick(0, nowhere, nowhere, False)  # without a server no tick is made


def _sources(
    settings: Settings, client: AppendClient | None, pchannel: str
) -> tuple[TailSource, list[str], int, MillraceError | None]:
    """Return the tail, the known PChannels, a tick after everything that can be shown, and why it is incomplete."""
    from millrace.tables.wal.reader import WalSnapshot

    if client is None:
        wal = WalSnapshot.open(settings.wal_uri)
        names = [] if wal is None else wal.pchannels()
        until = 0 if wal is None else wal.last_tick(pchannel)
        return (
            _NoTail(),
            names,
            until,
            LogUnavailable(
                f"no log server runs: the scan ends with the WAL table, at tick {until}. Later messages of the log are"
                " missing. `millrace jobs run` starts the server, and so does any append"
            ),
        )
    names = client.service.names()
    if pchannel not in names:
        return client, names, 0, None
    try:
        return client, names, client.tick(pchannel), None
    except MillraceError as error:
        found = client.describe(pchannel)
        if found["parked"]:
            words = f"{pchannel} is parked at entry {LogId(*found['position'])}: {found['parked']}"
            parked = ChannelParked(f"{words}. The scan ends there; `millrace status` says more.")
            return client, names, int(found["last_tick"]), parked
        if isinstance(error, InvalidArgument) and not found["term"]:
            return client, names, 0, None  # no term is open yet, so there are no messages
        raise


def _policy(text: str) -> DeliverPolicy:
    """Return the deliver policy that ``--from`` names. Raises InvalidArgument."""
    from millrace.wal.scanner import All, Latest, StartAfterTick, StartFrom

    if text == "earliest":
        return All()
    if text == "latest":
        return Latest()
    if text.startswith("tick:"):
        tick = text.removeprefix("tick:")
        if not (tick.isascii() and tick.isdigit()):
            raise InvalidArgument(f"{text!r}: write tick:N with a time tick, such as tick:460012345678901234")
        return StartAfterTick(int(tick))
    if text.count(":") == 3:
        return StartFrom(MessageId.parse(text))
    raise InvalidArgument(f"--from takes earliest, latest, a message id (0:17:0:0) or tick:N, not {text!r}")


def _types(texts: list[str]) -> set[MessageType]:
    if not texts:
        return set(BEHAVIOUR) - {MessageType.TIME_TICK}
    names = {name.strip().upper() for text in texts for name in text.split(",") if name.strip()}
    known = {kind.name: kind for kind in BEHAVIOUR}
    unknown = sorted(names - known.keys())
    if unknown:
        raise InvalidArgument(f"no message type {unknown[0]}; known are {', '.join(sorted(known))}")
    return {known[name] for name in names}
