"""``millrace verify``: compare log, WAL and tables by content."""

from __future__ import annotations

from contextlib import ExitStack
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import typer

from millrace.base.errors import ChannelParked, MillraceError
from millrace.catalog.sqlite_file import pchannel_names, read_collections
from millrace.commands.parts.command_line import (
    EXIT_VERIFICATION_FAILED,
    INSPECT_PANEL,
    JsonContext,
    print_json,
    print_rows,
    root,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.client.append_client import AppendClient
    from millrace.coord.catalog.sync import GetDefinitions
    from millrace.log.protocol import LogService
    from millrace.wal.state import ChannelState


@root.command(rich_help_panel=INSPECT_PANEL)
def verify(context: JsonContext) -> None:
    """Check log, WAL and collections against each other, by content. Reads everything; changes nothing.

    Checks the log's checksums, the order of time ticks, the committed rows of the WAL, a replay of the log through the
    chain, each collection's table up to its own tick, each published version as another engine reads it against a read
    at its tick, and the coordinator's catalog against the chain. A table that the flusher has not caught up with is
    "behind", which is not an error. The exit code is 3 if a check fails or a PChannel is parked.

    Example: `millrace verify`
    """
    from millrace.commands.log import open_log_read_only
    from millrace.storage.pins import TablePins
    from millrace.storage.table import open_table

    settings = context.settings
    channels: list[dict[str, Any]] = []
    parked = parked_channels(settings, None)
    catalog: list[dict[str, Any]] = []
    published: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if open_table(settings.wal_uri) is not None:  # else there is nothing to check
            stack.enter_context(TablePins(settings.pins_uri).pinned())
            service, client = stack.enter_context(open_log_read_only(settings))
            ask = _replayed_definitions(settings, service) if client is None else client.definitions
            channels = check_channels(settings, log=service)
            parked = parked_channels(settings, client) if client is not None else parked | stuck_channels(settings, ask)
            catalog = check_catalog(settings, service, ask)
            published = check_published(settings, service) if all(each["holds"] for each in channels) else []
        collections = check_collections(settings) if all(each["holds"] for each in channels) else []
    channels = add_parked(channels, parked)
    holds = all(each["holds"] for each in [*channels, *collections, *published, *catalog])
    if context.as_json:
        parts = {"pchannels": channels, "collections": collections, "published": published, "catalog": catalog}
        print_json({"holds": holds} | parts)
    else:
        print_rows(
            channels,
            columns=("pchannel", "holds", "messages", "rejections", "committed", "stored", "replayed", "detail"),
            as_json=False,
            empty="The WAL is empty: the streaming job has committed nothing yet.",
        )
        print_rows(
            collections,
            columns=(
                "collection", "holds", "state", "inserted", "visible", "deleted", "rolled_back", "rejected",
                "duplicates", "detail",
            ),
            as_json=False,
            empty="No rows to account for.",
        )  # fmt: skip
        if published:
            columns = ("collection", "id", "holds", "version", "tick", "rows", "detail")
            print_rows(published, columns=columns, as_json=False, empty="")
        if catalog:
            print_rows(catalog, columns=("collection", "id", "holds", "detail"), as_json=False, empty="")
        nothing = not (channels or collections or catalog)
        message = f"There is nothing to check in {settings.data_dir} yet." if nothing else "Everything holds."
        typer.echo(message if holds else "Something does not hold: see above.")
    if not holds:
        raise typer.Exit(EXIT_VERIFICATION_FAILED)


def parked_channels(settings: Settings, client: AppendClient | None) -> dict[str, str]:
    """Return why each parked PChannel is parked: in the streaming node or, with `client`, in the append host."""
    from millrace.node.range_loop.parking import read_parked

    found = {each.pchannel: f"{ChannelParked.code}: {each.error()}" for each in read_parked(settings.parked_path)}
    if client is None:
        return found
    for name in client.service.names():
        try:
            parked = client.describe(name)["parked"]
        except MillraceError as error:
            if error.retriable:
                raise
            parked = f"{error.code}: {error}"
        if parked:
            found.setdefault(name, f"{ChannelParked.code}: the append host does not advance: {parked}")
    return found


def stuck_channels(settings: Settings, ask: GetDefinitions) -> dict[str, str]:
    """Return why each PChannel would park an append host, by running the chain. For use while no host runs."""
    found = {}
    for name in sorted(pchannel_names(settings.data_dir)):
        try:
            ask(name, None)
        except MillraceError as error:
            if error.retriable:
                raise
            found[name] = f"{ChannelParked.code}: the chain does not advance: {error.code}: {error}"
    return found


def add_parked(channels: list[dict[str, Any]], parked: dict[str, str]) -> list[dict[str, Any]]:
    """Return `channels` with the parked ones marked as failed: nothing after the parking entry was checked."""
    rows = {each["pchannel"]: each for each in channels}
    for name, words in sorted(parked.items()):
        row = rows.setdefault(name, {"pchannel": name, "detail": None})
        row |= {"holds": False, "detail": "; ".join(filter(None, (words, row["detail"])))}
    return list(rows.values())


def check_channels(settings: Settings, *, log: LogService | None) -> list[dict[str, Any]]:
    """Return for each PChannel whether the WAL holds the committed rows and, with `log`, what a replay gives."""
    from millrace.operations.verification import verify_channel
    from millrace.storage.table import open_table
    from millrace.tables.wal.reader import WalSnapshot
    from millrace.tables.wal.table import WalTable

    table = open_table(settings.wal_uri)
    if table is None:
        return []
    wal = WalTable(table)
    snapshot = WalSnapshot.open(settings.wal_uri, version=wal.version)
    assert snapshot is not None
    rows: list[dict[str, Any]] = []
    for name in wal.pchannels():
        try:
            found = verify_channel(snapshot, wal, log, name)
        except MillraceError as error:
            if error.retriable:
                raise
            rows.append({"pchannel": name, "holds": False, "detail": f"{error.code}: {error}"})
            continue
        details = []
        if found.committed != found.stored:
            details.append("the rows in the WAL are not those that were committed")
        if found.replayed is not None and found.replayed != found.committed:
            details.append("the log gives other rows than the WAL has")
        if not found.same_state:
            details.append("the log gives another channel state than the WAL has")
        if log is not None and found.replayed is None:
            details.append("the log's beginning is gone: not run again")
        rows.append(
            {
                "pchannel": name,
                "holds": found.ok,
                "messages": found.messages,
                "rejections": found.rejections,
                "last_tick": found.last_tick,
                "committed": str(found.committed),
                "stored": str(found.stored),
                "replayed": None if found.replayed is None else str(found.replayed),
                "detail": "; ".join(details) or None,
            }
        )
    return rows


def check_catalog(settings: Settings, service: LogService, ask: GetDefinitions) -> list[dict[str, Any]]:
    """Return the catalog entries that differ from the chain; all of them if the coordinator's file is lost."""
    from millrace.operations.recovery.catalog_repair import catalog_differences

    found = catalog_differences(settings, service, ask)
    return [{"collection": each.name, "id": each.id or None, "holds": False, "detail": each.detail} for each in found]


def check_collections(settings: Settings) -> list[dict[str, Any]]:
    """Return each collection's rows by outcome, and whether its table holds exactly the visible ones."""
    from millrace.operations.verification import verify_collections

    known = {each.id: each for each in read_collections(settings.data_dir, dropped=True)}
    reports = verify_collections(settings)
    rows = []
    for number, found in sorted(reports.items()):
        collection = known.get(number)
        duplicates = found.rejected["DUPLICATE"] + found.rejected["ALREADY_APPLIED"]
        rejected = {
            reason: count
            for reason, count in sorted(found.rejected.items())
            if reason not in ("DUPLICATE", "ALREADY_APPLIED")
        }
        # All rows for a collection that never existed were rejected, so nothing of it may be stored.
        rows.append(
            {
                "collection": collection.name if collection is not None else str(number),
                "id": number,
                "holds": found.matches_flushed,
                "state": "whole" if found.ok else "behind" if found.matches_flushed else "differs",
                "inserted": found.inserted,
                "visible": found.visible,
                "deleted": found.deleted,
                "rolled_back": found.rolled_back,
                "rejected": rejected,
                "duplicates": duplicates,
                "stored": found.stored,
                "detail": found.problem or None,
            }
        )
    return rows


def check_published(settings: Settings, service: LogService) -> list[dict[str, Any]]:
    """Return for each published version whether delta-rs reads the rows of its tick from it."""
    from millrace.operations.published_verification import verify_published

    known = {each.id: each.name for each in read_collections(settings.data_dir, dropped=True)}
    rows = []
    for number, found in sorted(verify_published(settings, service).items()):
        detail = found.problem or None
        if found.folded:
            detail = "not compared: compaction has removed rows of that tick; verify again after the next publish"
        elif not found.ok and not detail:
            detail = f"a read at its tick gives {found.read_rows} rows" + (
                "" if found.rows != found.read_rows else ", and others"
            )
        rows.append(
            {
                "collection": known.get(number, str(number)),
                "id": number,
                "holds": found.ok,
                "version": found.version,
                "tick": found.tick,
                "rows": found.rows,
                "detail": detail,
            }
        )
    return rows


def _replayed_definitions(settings: Settings, service: LogService) -> GetDefinitions:
    """Return a lookup of a PChannel's definitions that replays the log after the WAL, as an append host would."""
    from millrace.tables.wal.log_replay import replay_log
    from millrace.tables.wal.state_check import valid_state
    from millrace.tables.wal.table import WalTable
    from millrace.wal.definitions import PChannelDefinitions

    @cache
    def reached(pchannel: str) -> ChannelState | MillraceError:
        log = service.open(pchannel)
        try:
            state = valid_state(WalTable.open(settings.wal_uri), log, pchannel)
            for outcome in replay_log(log, state, until=log.end()):
                state = outcome.state
        except MillraceError as error:
            return error
        finally:
            log.close()
        return state

    def ask(pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        found = reached(pchannel)
        if isinstance(found, MillraceError):
            raise copy(found)
        return PChannelDefinitions.of(found, collection_id)

    return ask
