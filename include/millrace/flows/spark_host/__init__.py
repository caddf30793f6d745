"""A flow as a Spark query: its frames, micro-batches, incarnations and status."""
