"""What quality forbids: nothing is truncated, trimmed or vacuumed while a critical expectation stands failed.

Light: reads one small Delta row; imports neither Spark nor Great Expectations. The evidence of what is wrong lies in the log,
the WAL and the removed files; so it stays until the check passes over the same range, or a person releases it.
"""

from __future__ import annotations

from millrace.base.errors import QualityBlocked
from millrace.base.settings import Settings
from millrace.operations.quality.results import read_state
from millrace.operations.quality.state import Block


def blocked(settings: Settings) -> list[Block]:
    """What stands in the way of removing anything; nothing where no check was ever made."""
    return list(read_state(settings).blocks)


def require_unblocked(settings: Settings, *, what: str) -> None:
    """Return where nothing is blocked. Raises QualityBlocked that names `what` was refused and the failures."""
    found = blocked(settings)
    if not found:
        return
    listed = "; ".join(f"{each.id}: {each.table} {each.expectation} ({each.unexpected} wrong)" for each in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise QualityBlocked(
        f"{what} is refused while critical expectations stand failed: {listed}{more}. Mend the data and run quality "
        "again, or have a person release them (quality_release)",
        blocks=tuple(each.id for each in found),
    )
