"""Joins a cluster if this process is configured as a node. The cluster's code is loaded only in that case."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from millrace.base.data_folder import prepare_data_folder, restrict_umask
from millrace.base.settings import Settings

if TYPE_CHECKING:
    from millrace.node.cluster.member import Member


def cluster_member() -> AbstractContextManager[Member | None]:
    """Enter the cluster as the node in MILLRACE_NODE. Yields None if it is not set: the process owns all PChannels."""
    settings = Settings.load()
    if not settings.node:
        return nullcontext()
    from millrace.node.cluster.member import Member

    restrict_umask()
    prepare_data_folder(settings.data_dir)
    return Member(settings)
