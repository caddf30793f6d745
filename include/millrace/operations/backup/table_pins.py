"""Pins each table at one version, in an order that makes them consistent, and copies the Delta log of that version.

The order is that of a clone (millrace.operations.recovery.clone), preceded by tables that describe others: verified
states (``recovery_checkpoints``) and records of rebuilt slices must not be ahead of what they describe. Of a Delta log,
the newest checkpoint up to the version and the commits after it are copied. They name the data files to take later.
The caller holds a pin (millrace.storage.pins), so that they stay until they are linked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.base.errors import Malformed
from millrace.base.settings import Settings
from millrace.flows.range_host.positions import flow_tables
from millrace.flows.sinks.delta.sink import OUTPUTS
from millrace.operations.backfill.derived import SLICES, derived_names
from millrace.operations.backup.files import BackupFiles
from millrace.operations.backup.manifest import DATA_FOLDER
from millrace.operations.coverage import Coverage
from millrace.operations.recovery.clone import tables_to_clone
from millrace.storage.delta_log import log_files_of_version
from millrace.storage.store import store_at
from millrace.storage.table import open_table, table_exists


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """One table at one version."""

    uri: str
    name: str
    version: int
    files: dict[str, int]
    """Live files, relative to the table, with their sizes in bytes."""


def tables_to_pin(settings: Settings, *, outputs: bool = True) -> Iterator[str]:
    """Yield the names of all existing tables in the order of pinning; without `outputs`, not those of flows' sinks."""
    slices = f"derived/{SLICES}"
    derived = [f"derived/{name}" for name in derived_names(settings)]
    # Of a flow the positions before what they say is there: a restored one writes again what came between.
    yield from (
        name
        for name in flow_tables(settings)
        if (outputs or not name.startswith(f"{OUTPUTS}/")) and table_exists(settings.table_uri(name))
    )
    about = [slices, *(each for each in derived if each != slices), "quality/results", "quality/quarantine"]
    for name in [*about, "recovery_checkpoints"]:
        if table_exists(settings.table_uri(name)):
            yield name
    yield from tables_to_clone(settings)


def pin_tables(
    settings: Settings,
    files: BackupFiles | None,
    covered: Coverage,
    *,
    at: Callable[[str], int | None] = lambda uri: None,
    outputs: bool = True,
) -> dict[str, PinnedTable]:
    """Pin all tables and return them by name, in the order of pinning. Their logs go into `files` (None: a dry run).

    `at` may say at which version to pin the table at a URI; None: at the newest.

    A table that has not changed since the previous backup (`covered`) has the version and the log that are there: its
    log is linked from it, and the table is not opened. The caller must prevent removals
    (millrace.node.retention.removal_lock). Without `outputs`, the tables of flows' sinks are left to `pin_outputs`.
    """
    return _pin(settings, tables_to_pin(settings, outputs=outputs), files, covered, at)


def pin_outputs(settings: Settings, files: BackupFiles, covered: Coverage) -> dict[str, PinnedTable]:
    """Pin the tables of flows' sinks: those have what any checkpoint says that was read before."""
    names = (name for name in flow_tables(settings) if name.startswith(f"{OUTPUTS}/"))
    found = (name for name in names if table_exists(settings.table_uri(name)))
    return _pin(settings, found, files, covered, lambda uri: None)


def _pin(
    settings: Settings,
    names: Iterable[str],
    files: BackupFiles | None,
    covered: Coverage,
    at: Callable[[str], int | None],
) -> dict[str, PinnedTable]:
    found = {}
    for name in names:
        uri = settings.table_uri(name)
        if covered.look(name, uri) is not None and files is not None:
            again = files.reuse_table(name)
            if again is not None:
                found[name] = PinnedTable(uri, name, *again)
                continue
        version = at(uri)
        with store_at(uri).lease():  # no log cleanup meanwhile
            table = open_table(uri, version=version)
            if table is None:
                continue
            if files is not None:
                for part in log_files_of_version(table.store, table.version):
                    files.copy_table_file(table.store, part, name)
        found[name] = PinnedTable(uri, name, table.version, table.live_files())
        if files is not None:
            _check(files.folder / DATA_FOLDER / name, found[name])
    return found


def _check(copy: Path, pinned: PinnedTable) -> None:
    """Check that the copied log names the same files at the same version. Raises Malformed."""
    table = open_table(copy)
    if table is None or table.version != pinned.version or table.live_files() != pinned.files:
        raise Malformed(
            f"the Delta log of {pinned.uri} does not yield version {pinned.version} from its last checkpoint"
        )
