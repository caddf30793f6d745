"""Folders that an operation may read files from, or write backups to, where somebody asked for it through Airflow.

Whoever fills in a form names a path, and the job works with the rights of the service: without a bound that is every file of its
user. So a job that a launcher started keeps to the folders of a setting, links resolved. Who runs a job or a command in a
shell has that user's rights already, and may name any path.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.runtime.launch.process import RUN_FOLDER_VARIABLE

INBOX: Final = "inbox"
"""Folder in the data folder that loads may read where the setting names none."""


def started_by_launcher() -> bool:
    """Whether a launcher started this process, for somebody who need not have its rights."""
    return RUN_FOLDER_VARIABLE in os.environ


def load_roots(settings: Settings) -> list[Path]:
    """Folders that a launched load may read from."""
    return _named(settings.load_roots) or [settings.data_dir / INBOX]


def backup_roots(settings: Settings) -> list[Path]:
    """Folders that a launched backup may go to: the one of the setting, and further ones."""
    return [*([Path(settings.backup_dir)] if settings.backup_dir else []), *_named(settings.backup_roots)]


def check_within(path: str, roots: Sequence[Path], *, setting: str, asked: str = "") -> None:
    """Raises InvalidArgument where `path` (which need not be there, and may be a pattern) lies in none of the folders.

    It is judged as it is written first, so that nothing is asked of the file system about what lies elsewhere. `asked` is what
    the error names instead of it: a pattern, not what it found.
    """
    place = Path(path)
    written = ".." not in place.parts and "\0" not in path
    inside = written and any(place.is_relative_to(each) for root in roots for each in (root, root.resolve()))
    if inside and containing_root(place, roots) is not None:
        return
    known = ", ".join(map(str, roots)) or "none yet"
    raise InvalidArgument(
        f"{asked or path} lies outside of the folders that may be named here ({known}): use one of those, or have whoever runs"
        f" this deployment add one to the setting {setting}"
    )


def containing_root(path: Path, roots: Sequence[Path]) -> Path | None:
    """The folder among `roots`, resolved, that `path` lies in once links are resolved; None: none of them."""
    found = path.resolve()
    return next((root.resolve() for root in roots if found.is_relative_to(root.resolve())), None)


def _named(text: str) -> list[Path]:
    return [Path(each) for each in text.split(os.pathsep) if each]
