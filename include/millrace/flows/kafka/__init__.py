"""Connections to Kafka clusters, for sources and sinks."""
