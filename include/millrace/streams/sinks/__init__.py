"""Where a stream's rows go: a collection, a Delta table, a Kafka topic, a function of yours; each by the guarantee that is chosen (docs/sinks.md)."""
