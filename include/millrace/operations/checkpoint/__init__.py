"""Checkpoints: written, verified by a replay, and what may be removed behind them.

`params.py` is what a DAG imports. `store.py` is the table of recovery checkpoints, `verify.py` the replay, `durable.py` makes
the tables outlive a power loss before the log is cut, `bases.py` and `wal_trim.py` give up what the WAL need not keep. None of
it needs Spark.
"""
