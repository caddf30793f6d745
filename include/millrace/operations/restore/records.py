"""Records of restores in progress. Light, because other modules read them too."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from millrace.base.data_folder import encode_file_name
from millrace.base.errors import UnsupportedVersion
from millrace.base.files import replace_json
from millrace.base.settings import Settings

VERSION: Final = 1
"""Version of a record. A record without a version is from an earlier build and is read as version 1."""
RestoreState: TypeAlias = Literal["loading", "done"]
LOADING: Final = "loading"
DONE: Final = "done"


def restores_path(settings: Settings) -> Path:
    """Return the folder of the records: one file per collection created or replaced by a restore."""
    return settings.data_dir / "restores"


def read_record(settings: Settings, name: str) -> dict[str, Any]:
    """Return the record of a restore, or an empty dict if there is none."""
    try:
        found: dict[str, Any] = json.loads(_path(settings, name).read_text())
    except FileNotFoundError:
        return {}
    version = found.pop("version", VERSION)
    if version > VERSION:
        raise UnsupportedVersion(
            f"{_path(settings, name)} has version {version}, but this build knows {VERSION}: continue with the build "
            "that began the restore"
        )
    return found


def write_record(settings: Settings, name: str, record: dict[str, Any]) -> None:
    """Replace the record of a restore, durably."""
    replace_json(_path(settings, name), {"version": VERSION, **record}, synced=True)


def remove_finished_records(settings: Settings, *, before: float, dry_run: bool = False) -> int:
    """Remove the records of restores that ended before `before` (Unix seconds), and return their number.

    The record of an unfinished restore stays: the next run continues from it.
    """
    count = 0
    for path in sorted(restores_path(settings).glob("*.json")):
        with suppress(FileNotFoundError, ValueError):
            if path.is_symlink() or path.stat().st_mtime >= before:
                continue
            if json.loads(path.read_text()).get("state") != DONE:
                continue
            count += 1
            if not dry_run:
                path.unlink()
    return count


def unfinished_records(settings: Settings) -> int:
    """Return the number of restores that began and have not ended."""
    count = 0
    for path in restores_path(settings).glob("*.json"):
        with suppress(FileNotFoundError, ValueError):
            count += json.loads(path.read_text()).get("state") != DONE
    return count


def _path(settings: Settings, name: str) -> Path:
    return restores_path(settings) / f"{encode_file_name(name)}.json"
