"""The operation `quality_release`: a person accepts what failed. Needs no Spark."""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.operations.operation import OperationReport
from millrace.operations.quality.declaration import ReleaseParams
from millrace.operations.quality.gate import blocked
from millrace.operations.quality.quarantine import release_blocks
from millrace.runtime.progress import Progress


class ReleaseReport(OperationReport):
    """What was released, and what still stands."""

    released: tuple[str, ...]
    by: str
    blocks: tuple[str, ...]


def run(settings: Settings, params: ReleaseParams, progress: Progress) -> ReleaseReport:
    """Release the blocks. Raises InvalidArgument for an id that is none."""
    progress.update("releasing", blocks=len(params.blocks))
    found = release_blocks(settings, params.blocks, by=params.by, note=params.note)
    return ReleaseReport(released=tuple(found), by=params.by, blocks=tuple(block.id for block in blocked(settings)))
