"""Debezium's change events: read from topics of Kafka, and written to them (docs/capture.md)."""
