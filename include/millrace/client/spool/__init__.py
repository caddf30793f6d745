"""A durable queue on the producer's disk for messages while the log is unreachable, and its sender."""
