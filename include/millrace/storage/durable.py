"""What a table holds is durable: files, log entries and folders up to its version now.

The writers of ours sync what they commit. Others that write to a table may not, and what relies on it (the truncation of a log)
must not depend on them: so what was committed since the last time is synced once more. Its cost is that of the commits since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from millrace.storage.delta_log import LOG_FOLDER, commit_file, read_actions
from millrace.storage.table import TableHandle


def sync_table(table: TableHandle, known: int | None) -> int:
    """Sync what came behind the version `known` (None: all that is live) up to the table's; how many files that was."""
    if known == table.version:
        return 0
    found = None if known is None or known > table.version else _added(table, known)
    if found is None:  # nothing is known, or some of the entries are gone
        names = [
            *table.live_files(),
            *(f"{LOG_FOLDER}/{name}" for name in table.store.list(LOG_FOLDER) if name.endswith(".json")),
        ]
    else:
        names = [*found, *(commit_file(version) for version in range((known or 0) + 1, table.version + 1))]
    count = sum(_sync(table, name) for name in names)
    for folder in {*_folders(names)}:
        _sync(table, folder)
    return count


def _added(table: TableHandle, known: int) -> list[str] | None:
    """Files that the commits behind `known` added, removed ones among them (they are skipped where they are gone)."""
    found: list[str] = []
    for version in range(known + 1, table.version + 1):
        actions = read_actions(table.store, version)
        if actions is None:
            return None
        found += [unquote(action["add"]["path"]) for action in actions if "add" in action]
    return found


def _folders(names: Iterable[str]) -> Iterator[str]:
    """The folders from each file's own up to the table's, each of which is an entry of the one above."""
    for name in names:
        while "/" in name:
            name = name.rpartition("/")[0]
            yield name


def _sync(table: TableHandle, name: str) -> int:
    """Sync one; 0 where there is nothing any more."""
    try:
        table.store.sync([name])
    except FileNotFoundError:
        return 0
    return 1
