"""Log to `wal`: plan a range (`planner.py`), run it in a task (`ranges.py`), commit it in the driver (`committer.py`)."""
