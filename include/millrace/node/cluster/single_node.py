"""The log's server of a deployment whose log is on one machine and whose catalog is in a meta store."""

from __future__ import annotations

from pathlib import Path

from millrace.coord.catalog.shared import open_shared_catalog
from millrace.coord.consumer_positions import open_positions
from millrace.coord.machine.copies import following
from millrace.log.protocol import LogService
from millrace.node.append import server


def append_extension(service: LogService, folder: Path) -> server.AppendExtension:
    """Make the append host of a log's server that takes all appends itself. Loaded by name (millrace.rpc.launch)."""
    return server.append_extension(
        service, folder, positions=open_positions, shared=open_shared_catalog, follow=following
    )
