"""Records that somebody named to be put aside without being transformed or written.

A declaration names them (``errors.skip``), or a command does while the flow runs: those are in
``<data>/pipelines/<id>/skip.json``, by lane, until the lane's position has passed them. A range that is planned next
leaves them out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.errors import MAX_SKIPPED
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.status import flow_folder

FILE: Final = "skip.json"


def skipped_of(settings: Settings, flow: Flow) -> dict[str, frozenset[int]]:
    """Return the named records of `flow`, by lane."""
    found = {lane: set(positions) for lane, positions in _read(_path(settings, flow.name)).items()}
    for each in flow.errors.skip:
        found.setdefault(each.lane, set()).add(each.position)
    return {lane: frozenset(positions) for lane, positions in found.items()}


def skip_record(settings: Settings, flow: str, lane: str, position: int) -> None:
    """Have the record at `position` of `lane` put aside when the flow comes to it.

    Raises InvalidArgument if the flow has no such lane or has passed the position, or if MAX_SKIPPED records wait to be
    skipped.
    """
    standing = positions_of(settings, flow)
    if lane not in standing:
        lanes = ", ".join(sorted(standing)[:10]) or "none yet"
        raise InvalidArgument(f"{flow!r} has no lane {lane[:200]!r}: it has {lanes}")
    if position < standing[lane].position:
        raise InvalidArgument(f"{flow!r} has passed {position} of {lane}: it stands at {standing[lane].position}")
    known = _read(_path(settings, flow))
    known.setdefault(lane, []).append(position)
    waiting = {
        name: sorted({each for each in positions if name not in standing or each >= standing[name].position})
        for name, positions in known.items()
    }
    if sum(map(len, waiting.values())) > MAX_SKIPPED:
        raise InvalidArgument(f"{MAX_SKIPPED} records of {flow!r} wait to be skipped: set the offset instead")
    replace_json(_path(settings, flow), {name: each for name, each in waiting.items() if each}, synced=True)


def _read(path: Path) -> dict[str, list[int]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {str(lane): [int(each) for each in positions] for lane, positions in value.items()}


def _path(settings: Settings, flow: str) -> Path:
    return flow_folder(settings, flow) / FILE
