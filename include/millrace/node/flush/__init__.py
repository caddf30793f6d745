"""`wal` to collection tables, segments and checkpoints: the same pattern, plan, run, commit, over the WAL's visible rows."""
