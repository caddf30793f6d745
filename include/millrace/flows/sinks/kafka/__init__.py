"""Documents into a topic, in the order of each key, acknowledged by all in-sync replicas."""
