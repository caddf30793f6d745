"""What runs a flow: a user of the range loop (docs/architecture.md) whose channels are partitions of topics.

A range is read from Kafka, transformed and written to the sink; failures go to the error topic. When all of it is
acknowledged, the position moves in one fenced commit. `host.py` runs the loop in its own process; Spark runs the same
definition (jobs/pipeline.py).
"""
