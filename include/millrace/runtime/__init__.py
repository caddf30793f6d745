"""Run programs: Java, jars and the Spark session; jobs with queries, heartbeat and progress; Spark slots and sandboxes.

`launch/` starts a detached job once for each run id; any process can ask for its state at any time.
"""
