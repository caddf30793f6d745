"""Sinks of streams by the chosen guarantee: a collection, a Delta table, a Kafka topic, a function (docs/sinks.md)."""
