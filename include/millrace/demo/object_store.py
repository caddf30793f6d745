"""``make run STORE=s3``: tables in an object store of this host, compared with the same log's tables on a disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.registry import OBJECT_STORES, create_server
from millrace.demo.cluster_faults import DemoServers
from millrace.log.protocol import LogService
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.verification import verify_collections
from millrace.tables.wal.table import WalPosition, WalTable

FOLDER: Final = "brokers"
_TRIES: Final = 5


@contextmanager
def running_store(settings: Settings, kind: str, servers: DemoServers, console: Console) -> Iterator[Settings]:
    """Yield the settings with the tables in a store of `kind` ("": unchanged); run its server meanwhile.

    A folder whose tables are in such a server continues with it.
    """
    folder = settings.data_dir / FOLDER
    kind = kind or next((name for name in OBJECT_STORES if (folder / name).exists()), "")
    if not kind:
        yield settings
        return
    if settings.tables:
        raise InvalidSettings(f"STORE={kind}, but MILLRACE_TABLES is {settings.tables}: choose one of them")
    if WalTable.exists(settings.wal_uri):
        raise InvalidSettings(
            f"the tables of {settings.data_dir} lie on its disk: start over with ARGS=--fresh, or choose another"
            " MILLRACE_DATA"
        )
    console.print(f"Starting an object store ({kind}) on this host; its first start builds it …")
    with servers.added(create_server(kind, folder / kind, settings=settings)) as running:
        console.print(f"Tables: [bold]{running.url}[/]")
        os.environ.update(running.client_environment)  # for delta-rs, obstore and child processes
        yield replace(settings, tables=running.url)


def equal_on_disk(settings: Settings, log: LogService) -> bool:
    """Return whether the same log gives tables of equal digests on a disk. No streaming job may be running.

    The disk's tables are removed again.
    """
    folder = Path(settings.run_path / "on-disk").absolute()
    disk = replace(settings, tables=str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for _ in range(_TRIES):
            for each in (settings, disk):
                ingest_to_end(each, log)
                flush_to_end(each)
            if _ends(settings) == _ends(disk):
                break  # no tick was appended in between
        return _digests(settings) == _digests(disk)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _positions(settings: Settings) -> dict[str, WalPosition]:
    wal = WalTable.open(settings.wal_uri)
    return {name: wal.position(name) for name in wal.pchannels()}


def _ends(settings: Settings) -> dict[str, str]:
    return {name: str(each.position) for name, each in _positions(settings).items()}


def _digests(settings: Settings) -> tuple[dict[str, str], dict[int, tuple[int, int]]]:
    """Return the digest of each PChannel's WAL, and rows and digest of each collection's table."""
    channels = {name: str(each.totals.digest) for name, each in _positions(settings).items()}
    return channels, {name: (each.stored, each.table_digest) for name, each in verify_collections(settings).items()}
