"""The range host of flows: a user of the range loop (docs/architecture.md) whose channels are partitions of topics.

A range is read from Kafka, transformed and written to the sink; failures go to the error topic. When all of it is
acknowledged, the position moves in one fenced commit. `host.py` runs the loop in its own process; jobs/pipeline.py runs
the same definition on Spark.
"""
