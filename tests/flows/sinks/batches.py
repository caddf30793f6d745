"""Documents as batches, as a worker cuts them."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.flows.batch import Batch
from millrace.flows.records import Action
from millrace.flows.sinks.sink import Sink, Verdicts


def put(sink: Sink, documents: Sequence[Action]) -> Verdicts:
    """Write `documents`, a batch for each lane of their records, from its first to behind its last offset."""
    lanes: dict[str, list[Action]] = {}
    for each in documents:
        lanes.setdefault(f"{each.record.topic}-{each.record.partition}", []).append(each)
    verdicts = Verdicts()
    for lane, found in (lanes or {"in-0": []}).items():
        offsets = [each.record.offset for each in found] or [-1]
        verdicts.add(sink.write(Batch(lane, min(offsets), max(offsets) + 1, documents=found)))
    return verdicts
