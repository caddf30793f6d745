"""Data quality: Great Expectations over the WAL, the segments, the checkpoints and the collections of a deployment.

A DAG imports `declaration.py`. Truncation, trimming and VACUUM ask `gate.py` before they remove anything. `gate.py`,
`state.py` and `quarantine.py` need neither Spark nor Great Expectations. `run.py` is the work of the job.
"""
