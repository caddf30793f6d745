"""The quality gate: a failed critical expectation blocks every removal until a check passes or a person releases it.

Truncation, WAL trimming and VACUUM call :func:`require_unblocked` before they remove anything. The log, the WAL and the
files to be removed are the evidence of what went wrong, so they stay until a later check of the same range passes or a
person runs the operation `quality_release`.

Reads one small Delta row and imports neither Spark nor Great Expectations.
"""

from __future__ import annotations

from millrace.base.errors import QualityBlocked
from millrace.base.settings import Settings
from millrace.operations.operation import OperationReport, counted
from millrace.operations.quality.declaration import ReleaseParams
from millrace.operations.quality.quarantine import release_blocks
from millrace.operations.quality.results import read_state
from millrace.operations.quality.state import Block
from millrace.runtime.progress import Progress


class ReleaseReport(OperationReport):
    """The blocks that were released, and those that remain."""

    released: tuple[str, ...]
    by: str
    blocks: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return f"{counted(len(self.released), 'block')} released by {self.by}; {len(self.blocks):,} remain."


def blocked(settings: Settings) -> list[Block]:
    """Return the blocks in force. Empty before the first quality run."""
    return list(read_state(settings).blocks)


def require_unblocked(settings: Settings, *, what: str) -> None:
    """Check that no block is in force.

    Raises QualityBlocked, which names the refused action `what` and the failures, if there is one.
    """
    found = blocked(settings)
    if not found:
        return
    listed = "; ".join(f"{each.id}: {each.table} {each.expectation} ({each.unexpected} wrong)" for each in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise QualityBlocked(
        f"{what} is blocked by failed critical expectations: {listed}{more}. Repair the data and run quality again, "
        "or have a person release the blocks (quality_release)",
        blocks=tuple(each.id for each in found),
    )


def run_release(settings: Settings, params: ReleaseParams, progress: Progress) -> ReleaseReport:
    """Release the blocks. Raises InvalidArgument if an id is unknown."""
    progress.update("releasing", blocks=len(params.blocks))
    found = release_blocks(settings, params.blocks, by=params.by, note=params.note)
    return ReleaseReport(released=tuple(found), by=params.by, blocks=tuple(block.id for block in blocked(settings)))
