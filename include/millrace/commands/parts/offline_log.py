"""The log for commands that look: by its server where one runs, else its files and brokers as they are, and nothing is
started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import TYPE_CHECKING

from millrace.base.errors import LogUnavailable, MillraceError

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.client.append_client import AppendClient
    from millrace.coord.catalog_sync import GetDefinitions
    from millrace.log.protocol import LogService
    from millrace.wal.state import ChannelState


@contextmanager
def open_log_read_only(settings: Settings) -> Iterator[tuple[LogService, AppendClient | None]]:
    """The deployment's log for reading alone, and its server's client where one runs.

    Raises LogBusy, LogUnavailable (a server starts in this moment: ask again).
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


def replayed_definitions(settings: Settings, service: LogService) -> GetDefinitions:
    """What the chain has on a PChannel, by a replay of what the log holds behind the WAL: what an append host would
    tell."""
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
