"""Checkpoints: write them, verify them by a replay, and remove what is no longer needed before them.

A DAG imports `declaration.py`. `recovery_checkpoints.py` is the table of recovery checkpoints, `replay_verification.py`
the replay. `table_sync.py` makes the tables durable before the log is truncated. `base_verification.py` and
`wal_trim.py` remove what the WAL need not keep. None of it needs Spark.
"""
