"""The assets of Millrace: what a DAG of one's own can start on.

    with DAG("mine", schedule=[segments_flushed]): ...

``segments_flushed`` comes from a watcher in the triggerer, which reads the streaming flusher's progress; the others are
outlets of Millrace's own DAGs. Each event carries, as its extra, what happened: the segments and their collections, the
tick of the checkpoint, the suites that passed.
"""

from __future__ import annotations

from typing import Final

from airflow.sdk import Asset, AssetWatcher

from millrace_airflow.triggers import SegmentsFlushedTrigger

segments_flushed: Final = Asset(
    "segments_flushed",
    uri="millrace://segments",
    group="millrace",
    watchers=[AssetWatcher(name="millrace_flusher", trigger=SegmentsFlushedTrigger())],
)
"""Updated when the flusher has completed segments (sealed and written to their collection)."""

checkpoint_written: Final = Asset("checkpoint_written", uri="millrace://checkpoints", group="millrace")
"""Updated when a checkpoint was written and verified by a replay."""

quality_passed: Final = Asset("quality_passed", uri="millrace://quality", group="millrace")
"""Updated when the critical expectations of a quality run passed."""
