"""Records to be put aside without being transformed or written.

A declaration names them (``errors.skip``), or a command does while the flow runs. The flow's document ``skip.json``
(documents.py) holds those of commands, by lane, until the lane's position has passed them. The next planned range
leaves them out.
"""

from __future__ import annotations

import json

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.flows.declare.errors import MAX_SKIPPED
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.documents import SKIP, change_document
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.status import flow_folder


def skipped_of(settings: Settings, flow: Flow) -> dict[str, frozenset[int]]:
    """Return the positions of records of `flow` to be skipped, by lane."""
    found = {lane: set(positions) for lane, positions in _read(settings, flow.name).items()}
    for each in flow.errors.skip:
        found.setdefault(each.lane, set()).add(each.position)
    return {lane: frozenset(positions) for lane, positions in found.items()}


def skip_record(settings: Settings, flow: str, lane: str, position: int) -> None:
    """Put the record at `position` of `lane` aside when the flow reaches it.

    Raises InvalidArgument if the flow has no such lane or has passed the position, or if MAX_SKIPPED records wait to be
    skipped. Raises MetaUnavailable.
    """
    standing = positions_of(settings, flow)
    if lane not in standing:
        lanes = ", ".join(sorted(standing)[:10]) or "none yet"
        raise InvalidArgument(f"{flow!r} has no lane {lane[:200]!r}: it has {lanes}")
    if position < standing[lane].position:
        raise InvalidArgument(f"{flow!r} has passed {position} of {lane}: it is at {standing[lane].position}")

    def change(before: bytes | None) -> bytes:
        known = _decoded(before)
        known.setdefault(lane, []).append(position)
        waiting = {
            name: sorted({each for each in positions if name not in standing or each >= standing[name].position})
            for name, positions in known.items()
        }
        if sum(map(len, waiting.values())) > MAX_SKIPPED:
            raise InvalidArgument(f"{MAX_SKIPPED} records of {flow!r} wait to be skipped: set the offset instead")
        return json.dumps({name: each for name, each in waiting.items() if each}).encode() + b"\n"

    change_document(settings, flow, SKIP, change)


def _read(settings: Settings, flow: str) -> dict[str, list[int]]:
    try:
        return _decoded((flow_folder(settings, flow) / SKIP).read_bytes())
    except FileNotFoundError:
        return {}


def _decoded(body: bytes | None) -> dict[str, list[int]]:
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        return {}
    return {str(lane): [int(each) for each in positions] for lane, positions in value.items()}
