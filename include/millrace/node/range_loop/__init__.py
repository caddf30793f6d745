"""The loop that keeps a table up to date with its source: plan, run ranges, commit, repeat.

- `definition`: the interface that a loop implements. Ingest and flush are two implementations; a stream can be another.
- `schedule`: plans the next micro-batch.
- `batch_driver`: commits the ranges of a micro-batch and reports on them.

Two hosts run the loop: Spark (`query`, `source`) and the calling process (`in_process`, `runner`).
"""
