"""The flows of a data folder, whichever host runs them: declared streams, and pipelines that ran or are deployed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from millrace.base.settings import Settings
from millrace.flows.range_host import observed
from millrace.flows.spark_host import status as streams
from millrace.flows.status import FlowStatus


def flow_statuses(settings: Settings, *, without: AbstractSet[str] = frozenset()) -> list[FlowStatus]:
    """Return the status of each flow, by name, but for the pipelines `without`.

    Raises InvalidStream if a declaration cannot be read.
    """
    names = [each for each in observed.pipelines_here(settings) if each not in without]
    pipelines = [observed.flow_status(settings, each) for each in names]
    return sorted([*streams.flow_statuses(settings), *pipelines], key=lambda each: (each.name, each.host))
