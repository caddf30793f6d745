"""A durable queue on the producer's disk for the time when the log cannot be reached, and the sender that empties it."""
