"""Where restores keep what they are at. Light: others look there, too."""

from __future__ import annotations

from pathlib import Path

from millrace.settings import Settings


def restores_path(settings: Settings) -> Path:
    """The folder of the records of restores, one file a collection that was made."""
    return settings.data_dir / "restores"
