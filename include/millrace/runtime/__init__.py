"""How programs run: Java, jars and the Spark session; jobs with their queries, heartbeat and progress; places and priority.

`launch/` starts a job detached, once for each run id, and knows from any process at any time what became of it.
"""
