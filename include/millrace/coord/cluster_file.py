"""Whether a deployment is a cluster. Imports no meta store: a single node's processes ask this, too."""

from __future__ import annotations

from typing import Final

from millrace.base.settings import Settings

STORE_FILE: Final = "cluster.db"
"""The embedded meta store, in the folder ``coord`` of the data folder."""


def is_cluster(settings: Settings) -> bool:
    """Return whether a cluster process has used this data folder. This check creates no store."""
    return bool(settings.meta_store) or (settings.data_dir / "coord" / STORE_FILE).exists()
