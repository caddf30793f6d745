"""Which segments the flusher has brought to an end, as its progress file says: light enough for a triggerer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.base.settings import Settings


def read_flushed_segments(settings: Settings) -> list[dict[str, Any]]:
    """The newest flushed segments that the progress file names, or those of a cluster's nodes: pchannel, collection_id,
    segment_id, rows, time_tick."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    name = "flushed-segments.json"  # written by millrace.node.flush.flushed_segments, which needs Arrow; reading it needs nothing
    for path in (settings.run_path / name, *sorted((settings.run_path / "nodes").glob(f"*/{name}"))):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        found |= {(each["pchannel"], each["segment_id"]): each for each in value.get("segments", [])}
    return list(found.values())


def new_segments(
    found: list[dict[str, Any]], told: Mapping[str, int] | None, *, collection_id: int | None = None
) -> list[dict[str, Any]]:
    """Of `found` what is behind the ticks that were told already, oldest first; nothing where nobody has asked before."""
    if told is None:
        return []
    fresh = [each for each in found if each["time_tick"] > told.get(each["pchannel"], 0)]
    if collection_id is not None:
        fresh = [each for each in fresh if each["collection_id"] == collection_id]
    return sorted(fresh, key=lambda each: (each["time_tick"], each["segment_id"]))
