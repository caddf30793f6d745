"""Durability of the tables before the log is truncated: syncs files, log entries and folders of every table.

Streaming node and flusher fsync what they commit. Other writers may not, and truncation must not depend on them.
Therefore everything committed since the last call is synced once more before the log is truncated. The versions known
to be synced are kept in a file that may be lost: all live files are synced then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.storage.table import open_table, sync_table
from millrace.tables.collections.data_tables import stored_collection_ids

SYNCED_VERSIONS_FILE: Final = "checkpoint-synced.json"


def tables_to_sync(settings: Settings) -> dict[str, str]:
    """Return the tables that truncation of the log depends on, by name with their URIs."""
    names = ["wal", "segments", "checkpoints"]
    names += [f"collections/{number}" for number in stored_collection_ids(settings, "collections")]
    names += [f"deletes/{number}" for number in stored_collection_ids(settings, "deletes")]
    return {name: settings.table_uri(name) for name in names}


def sync_tables(settings: Settings) -> int:
    """Sync everything committed since the last call and return the number of files."""
    memory = settings.run_path / SYNCED_VERSIONS_FILE
    known = _read(memory)
    reached: dict[str, int] = {}
    count = 0
    for name, path in tables_to_sync(settings).items():
        table = open_table(path)
        if table is not None:
            reached[name] = table.version
            count += sync_table(table, known.get(name))
    replace_json(memory, reached)
    return count


def _read(path: Path) -> dict[str, int]:
    try:
        value = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return (
        {name: version for name, version in value.items() if isinstance(version, int)}
        if isinstance(value, dict)
        else {}
    )
