"""Data quality: Great Expectations over the WAL, the segments, the checkpoints and the collections of a deployment.

`params.py` is what a DAG imports. `gate.py` is what truncation, trimming and VACUUM ask before they remove anything; it and
`state.py`, `quarantine.py` need neither Spark nor Great Expectations. `run.py` is the work of the job.
"""
