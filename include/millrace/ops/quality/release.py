"""The operation `quality_release`: a person accepts what failed. Needs no Spark."""

from __future__ import annotations

from millrace.ops.operation import OperationReport, Progress
from millrace.ops.quality.gate import blocked
from millrace.ops.quality.params import ReleaseParams
from millrace.ops.quality.quarantine import release
from millrace.settings import Settings


class ReleaseReport(OperationReport):
    """What was released, and what still stands."""

    released: tuple[str, ...]
    by: str
    blocks: tuple[str, ...]


def run(settings: Settings, params: ReleaseParams, progress: Progress) -> ReleaseReport:
    """Release the blocks. Raises InvalidArgument for an id that is none."""
    progress.say("releasing", blocks=len(params.blocks))
    found = release(settings, params.blocks, by=params.by, note=params.note)
    return ReleaseReport(released=tuple(found), by=params.by, blocks=tuple(block.id for block in blocked(settings)))
