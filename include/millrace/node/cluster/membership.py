"""Whether this process is a node of a cluster: what that takes is loaded where it is one alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from millrace.base.data_folder import prepare_data_folder, restrict_umask
from millrace.base.settings import Settings

if TYPE_CHECKING:
    from millrace.node.cluster.member import Member


def cluster_member() -> AbstractContextManager[Member | None]:
    """This process as the node that MILLRACE_NODE names; None where it names none: all PChannels are the process's own."""
    settings = Settings.load()
    if not settings.node:
        return nullcontext()
    from millrace.node.cluster.member import Member

    restrict_umask()
    prepare_data_folder(settings.data_dir)
    return Member(settings)
