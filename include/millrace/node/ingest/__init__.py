"""Log to `wal`: plan a range (`planner.py`), run it in a task (`ingester.py`), commit it in the driver
(`committer.py`).
"""
