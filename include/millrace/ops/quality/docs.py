"""The Data Docs on disk: static HTML under ``quality/docs``, of which the newest runs are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

KEPT_RUNS: Final = 20
"""Runs whose pages stay; results themselves are kept in ``quality/results``."""

_RUN: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


def keep_newest(folder: Path, *, runs: int = KEPT_RUNS) -> int:
    """Remove the pages of all but the newest `runs` runs; how many runs were removed."""
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / "validations").rglob("*")) if folder.is_dir() else []:
        if path.is_dir() and _RUN.fullmatch(path.name):
            found.setdefault(path.name, []).append(path)
    old = sorted(found)[:-runs] if len(found) > runs else []
    for name in old:
        for path in found[name]:
            shutil.rmtree(path, ignore_errors=True)
    return len(old)
