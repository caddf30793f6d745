"""Folders that an operation may read from or back up to when it was started through Airflow.

A person who fills in a form names a path, and the job runs with the rights of the service account. Without a limit that
person could read every file of the account. A job that a launcher started is therefore limited to the folders of a
setting, with links resolved. A person who runs a job or a command in a shell already has the rights of that account and
may name any path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.runtime.launch.folder import RUN_FOLDER_VARIABLE

INBOX: Final = "inbox"
"""Folder in the data folder that loads may read from if the setting names none."""


def started_by_launcher() -> bool:
    """Return whether a launcher started this process, possibly for a person without its rights."""
    return RUN_FOLDER_VARIABLE in os.environ


def load_roots(settings: Settings) -> list[Path]:
    """Return the folders that a launched load may read from."""
    return _named(settings.load_roots) or [settings.data_dir / INBOX]


def backup_roots(settings: Settings) -> list[Path]:
    """Return the folders that a launched backup may write to: backup_dir, then backup_roots."""
    return _named(os.pathsep.join([settings.backup_dir, settings.backup_roots]))


def backup_root_names(settings: Settings) -> list[str]:
    """Return the same as they are written, with the prefixes of object stores."""
    return [*([settings.backup_dir] if settings.backup_dir else []), *_split(settings.backup_roots)]


def move_roots(settings: Settings) -> list[Path]:
    """Return the folders that a launched move may write to, besides the data folder."""
    return _named(settings.move_roots)


def move_root_names(settings: Settings) -> list[str]:
    """Return the same as they are written, with the prefixes of object stores."""
    return _split(settings.move_roots)


def check_uri_within(uri: str, roots: Sequence[str], *, setting: str) -> None:
    """Check that the prefix `uri` of an object store is one of `roots` or lies below one. Raises InvalidArgument."""
    inside = any(f"{uri}/".startswith(f"{root.rstrip('/')}/") for root in roots)
    if inside and ".." not in uri.split("/"):
        return
    known = ", ".join(roots) or "none yet"
    raise InvalidArgument(
        f"{uri} lies outside the allowed folders ({known}). Use one of them, or ask the operator of this deployment to"
        f" add a folder to the setting {setting}"
    )


def check_within(path: str, roots: Sequence[Path], *, setting: str, asked: str = "") -> None:
    """Check that `path` lies in one of the folders `roots`. It may be a pattern and need not exist.

    Checks the path as written first, so that nothing outside the folders is looked up. `asked` is the path that the
    error names instead, for example the pattern that `path` matched.

    Raises InvalidArgument if the path lies outside.
    """
    place = Path(path)
    written = ".." not in place.parts and "\0" not in path
    inside = written and any(place.is_relative_to(each) for root in roots for each in (root, root.resolve()))
    if inside and containing_root(place, roots) is not None:
        return
    known = ", ".join(map(str, roots)) or "none yet"
    raise InvalidArgument(
        f"{asked or path} lies outside the allowed folders ({known}). Use one of them, or ask the operator of this "
        f"deployment to add a folder to the setting {setting}"
    )


def containing_root(path: Path, roots: Sequence[Path]) -> Path | None:
    """Return the folder among `roots`, resolved, that contains `path` once links are resolved, or None."""
    found = path.resolve()
    return next((root.resolve() for root in roots if found.is_relative_to(root.resolve())), None)


def _named(text: str) -> list[Path]:
    return [Path(each) for each in _split(text) if "://" not in each]


def _split(text: str) -> list[str]:
    """Split at the separator of paths, but not within the ``://`` of a URI."""
    return [each for each in re.split(rf"{re.escape(os.pathsep)}(?!//)", text) if each]
