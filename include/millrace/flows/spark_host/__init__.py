"""A flow as a Spark query: its frames, micro-batches and incarnations, and what it tells of itself."""
