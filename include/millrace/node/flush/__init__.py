"""`wal` to collection tables, segments and checkpoints: plan, run and commit ranges of the WAL's visible rows."""
